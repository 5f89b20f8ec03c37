"""A `penstock serve` process, as an operator has it."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = 90.0
COMMAND = (sys.executable, "-m", "penstock", "serve")


class Server:
    """A `penstock serve` process; its output goes to files, so that it never blocks on us."""

    def __init__(self, place: Path, *argv: str, command: Sequence[str] = COMMAND, **environment: str) -> None:
        self.out, self.err = place / "out", place / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*command, *argv], stdout=out, stderr=err, env={**os.environ, **environment}
            )

    def until(self, happened: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline, f"{what}\n{self.out.read_text()}\n{self.err.read_text()}"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.until(
            lambda: "Ctrl-C drains" in self.out.read_text() or self.process.poll() is not None, "no banner"
        )
        assert self.process.poll() is None, self.err.read_text()

    def wait_said(self, words: str) -> None:
        self.until(lambda: words in self.err.read_text(), f"never said {words!r}")

    def wait_ended(self) -> int:
        return self.process.wait(PATIENCE_S)

    @property
    def url(self) -> str:
        found = re.search(r"API +(http://\S+)", self.out.read_text())
        assert found
        return found[1]

    @property
    def key(self) -> str:
        found = re.search(r"key +(sk-\S+)", self.out.read_text())
        return found[1] if found else ""

    @property
    def workers(self) -> list[int]:
        """The process ids of its engine workers."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
