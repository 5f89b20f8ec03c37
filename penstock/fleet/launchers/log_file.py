"""What one worker prints, kept in a file that cannot fill the disk.

Two files, each up to half the bound: NAME.log, and NAME.log.1 with what came before it.
"""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from penstock.clock import NS_PER_S, Clock

LOG_BYTES_MAX = 8 * 1024 * 1024
"""Of one worker, unless somebody says otherwise."""


class LogFile:
    """Lines with the time in front of them. A disk that is full or not ours costs the lines, never the worker."""

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


def tee(
    say: Callable[[str], None], directory: Path | None, name: str, clock: Clock, *, bytes_max: int
) -> Callable[[str], None]:
    """What says a line and, where there is a directory, keeps it too."""
    if directory is None:
        return say
    file = LogFile(directory, name, clock, bytes_max=bytes_max)

    def log(line: str) -> None:
        file.write(line)
        say(line)

    return log
