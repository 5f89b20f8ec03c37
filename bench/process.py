"""A child process, a port for it, questions to it and what it uses; `penstock serve` as one, and `penstock
bench` at it; the C programs of bench/relay.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

START_S = 600.0
"""A large model, with its files on a disk."""
SERVE = (sys.executable, "-m", "penstock", "serve")
HERE = Path(__file__).parent / "relay"
END_S, POLL_S = 20.0, 0.02
CTRL_C = signal.SIGINT
"""Ends ours at once; behind SIGTERM it listens on for a lameduck time."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Process:
    """A child and what it used."""

    def __init__(
        self,
        *command: str,
        log: Path,
        cwd: Path | None = None,
        ends_by: signal.Signals = signal.SIGTERM,
        **environment: str,
    ) -> None:
        self.log, self._ends_by = log, ends_by
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

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

    def wait(self, is_there: Callable[[], bool], patience_s: float = START_S) -> float:
        """The seconds until it is.

        Raises:
            RuntimeError: it ended before, or it took too long; then it is stopped.
        """
        began_s = time.monotonic()
        while not is_there():
            if self.child.poll() is not None or time.monotonic() > began_s + patience_s:
                self.end()
                raise RuntimeError(f"it did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def end(self) -> None:
        """Stop it."""
        if self.child.poll() is None:
            os.killpg(self.child.pid, self._ends_by)
            try:
                self.child.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()


class Served(Process):
    """A `penstock serve` in a folder of its own (configuration, log, state), which takes requests."""

    def __init__(
        self,
        place: Path,
        config: Mapping[str, object] | str,
        *,
        command: Sequence[str] = SERVE,
        cwd: Path | None = None,
        **environment: str,
    ) -> None:
        """`config`: may be empty. `cwd`: where paths in `command` begin; else `place`.

        Raises:
            RuntimeError: it did not start.
        """
        self.port = free_port()
        place.mkdir(parents=True, exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(config)  # JSON is YAML.
        file = place / "penstock.yaml"
        file.write_text(text)
        where = {"PENSTOCK_STATE_DIR": str(place / "state"), "PYTHONPATH": ""}
        super().__init__(
            *command, *(("-c", str(file.resolve())) if text else ()), "--port", str(self.port),
            log=place / "log", cwd=cwd or place, ends_by=CTRL_C, **where, **environment,
        )  # fmt: skip
        self.ready_s = round(self.wait(lambda: ask(self.port, "/ready")[0] == 200), 1)
        self.url = f"http://127.0.0.1:{self.port}/v1"


def ask(port: int, path: str, body: object = None, key: str = "") -> tuple[int, str]:
    """Status and text of an answer to a GET, or to a POST of `body`; (0, why) where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    head = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        connection.request(*(("GET", path) if body is None else ("POST", path, json.dumps(body), head)))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def load_report(url: str, key: str, *flags: str, shown: bool = False) -> dict[str, Any]:
    """The report of one `penstock bench`, whose progress bar shows, and if `shown` its tables.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*SERVE[:-1], "bench", "--url", url, "--json", file.name, *flags]
        environment = {**os.environ, "PENSTOCK_API_KEY": key}
        out = None if shown else subprocess.PIPE
        done = subprocess.run(command, check=False, stdout=out, env=environment, text=True)
        if done.returncode:
            raise RuntimeError(f"penstock bench ended with {done.returncode}: {(done.stdout or '')[-2000:]}")
        return json.loads(Path(file.name).read_text())


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
    compiler = needed("cc", "gcc")
    for name in ("load", "upstream"):
        subprocess.run([compiler, "-O2", "-o", str(into / name), str(HERE / f"{name}.c"), "-lm"], check=True)


def needed(*programs: str) -> str:
    """The first of them that there is; without one the bench ends and says so."""
    found = next(filter(None, map(shutil.which, programs)), None)
    return found or sys.exit(f"{' or '.join(programs)} is needed: install it with the system's packages")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
