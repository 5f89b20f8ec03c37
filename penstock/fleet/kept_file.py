"""The files of a controller: a small one that keeps its state over a restart, read whole, and written whole
or not at all; and the record of its decisions, to which lines are appended.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from penstock.telemetry.log import Log

FILE_BYTES_MAX = 16 * 1024 * 1024
RECORD_BYTES_MAX = 8 * 1024 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024
PENDING_MAX = 2000


class KeptFile:
    """One such file. Trouble with it is logged, and nothing else: the server runs on with what it knows."""

    def __init__(self, path: Path | None, holds: str, log: Log) -> None:
        """Without `path` nothing is kept. `holds` names the content in the log."""
        self._path, self._holds, self._log = path, holds, log

    async def load(self) -> bytes:
        """The content; empty: there is none, or it cannot be read."""
        if self._path is None:
            return b""
        try:
            return await asyncio.to_thread(_read, self._path)
        except OSError as error:
            self._log.error(f"{self._holds} cannot be read", path=str(self._path), error=error)
            return b""

    async def save(self, body: bytes) -> None:
        """Replace the content."""
        if self._path is None:
            return
        try:
            await asyncio.to_thread(_write, self._path, body)
        except OSError as error:
            self._log.error(f"{self._holds} cannot be kept over a restart", path=str(self._path), error=error)

    def damaged(self, error: Exception) -> None:
        """The content that `load` returned cannot be read."""
        self._log.error(f"{self._holds}: the file is damaged", path=str(self._path), error=error)

    @property
    def is_there(self) -> bool:
        """Whether something was kept."""
        return self._path is not None and self._path.exists()


class RecordFile:
    """Lines of JSON, in two files of at most `RECORD_BYTES_MAX`; the older one ends in `.1.jsonl`.

    All but `write` belong to the owner's event loop.
    """

    def __init__(self, path: Path | None, about: str, log: Log) -> None:
        """Without `path` nothing is kept. `about` names in the log what is decided."""
        self._path, self._about, self._log = path, about, log
        self._pending: deque[bytes] = deque(maxlen=PENDING_MAX)
        self._is_failing = False

    @property
    def is_kept(self) -> bool:
        """Whether there is a file at all."""
        return self._path is not None

    @property
    def has_changes(self) -> bool:
        """Whether there is something to write."""
        return bool(self._pending)

    def add(self, line: bytes) -> None:
        """A line more."""
        if self._path is not None:
            self._pending.append(line)

    def write(self) -> bool:
        """Write down what was added, and say whether the next line begins a new file. Blocks on the disk;
        trouble is said once.
        """
        lines = list[bytes]()
        with contextlib.suppress(IndexError):  # Of two threads that write, neither knows how many are left.
            while True:
                lines.append(self._pending.popleft())
        if self._path is None or not lines:
            return False
        is_full = False
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
                file.write(b"\n".join(lines) + b"\n")
                num_bytes = file.tell()
            if num_bytes > RECORD_BYTES_MAX:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
                is_full = True
        except OSError as error:
            if not self._is_failing:
                self._log.warning(f"decisions about {self._about} cannot be written down", error=error)
            self._is_failing = True
        else:
            self._is_failing = False
        return is_full


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a record, each with its number.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        yield from enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1)


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(FILE_BYTES_MAX)
    return b""


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(body)
    new.replace(path)
