"""A child process, a port for it and what it uses; and the C programs of bench/relay."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "relay"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Process:
    """A child and what it used."""

    def __init__(self, *command: str, log: Path, **environment: str) -> None:
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
            )

    def pids(self) -> list[int]:
        """It and its descendants: a gateway may be several processes."""
        return family(self.child.pid)

    def cpu_s(self) -> float:
        """User and system time of all of it."""
        total = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total * TICK_S

    def cpu_exact_s(self) -> float:
        """The same to the nanosecond, of threads that live: for differences of short times."""
        tasks = [path for pid in self.pids() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9

    def rss_mb(self) -> float:
        """Resident memory of all of it."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids())
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def end(self) -> None:
        """Stop it."""
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGTERM)
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            todo += [int(word) for word in task.read_text().split()]
    return found


def build(into: Path) -> None:
    """Compile the client and the upstream."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("a C compiler is needed")
    for name in ("load", "upstream"):
        subprocess.run([compiler, "-O2", "-o", str(into / name), str(HERE / f"{name}.c")], check=True)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
