"""What one worker prints, kept in a file that cannot fill the disk.

Two files, each up to half the bound: NAME.log, and NAME.log.1 with what came before it.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from penstock.clock import NS_PER_S, Clock

LOG_BYTES_MAX = 8 * 1024 * 1024
"""Of one worker."""


class LogFile:
    """Lines with the time in front of them.

    A disk that is full or not ours costs the lines, never the worker.
    """

    def __init__(self, directory: Path, name: str, clock: Clock, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = directory / f"{quote(name, safe='@')}.log"
        self._clock, self._half = clock, bytes_max // 2
        self._size = 0
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._size = self.path.stat().st_size

    def write(self, line: str) -> None:
        """Add a line; it is in the file when this returns."""
        time = datetime.fromtimestamp(self._clock.wall_ns() / NS_PER_S, UTC)
        data = f"{time.isoformat(timespec='milliseconds')} {line}\n".encode(errors="replace")[: self._half]
        with contextlib.suppress(OSError):
            if self._size + len(data) > self._half:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._size = 0
            with self.path.open(
                "ab"
            ) as file:  # Opened each time: a worker prints little, and may live for months.
                file.write(data)
            self._size += len(data)


def stderr_line(line: str) -> None:
    """Where a worker's lines go unless the caller knows better."""
    print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, frozen=True)
class WorkerLogs:
    """Who hears the lines that workers print, and where they are kept beside that."""

    say: Callable[[str], None] = stderr_line
    directory: Path | None = None
    """With a file for each worker; None: nowhere."""

    def of(self, name: str, clock: Clock) -> Callable[[str], None]:
        """Takes one worker's lines."""
        if self.directory is None:
            return self.say
        file = LogFile(self.directory, name, clock)

        def log(line: str) -> None:
            file.write(line)
            self.say(line)

        return log
