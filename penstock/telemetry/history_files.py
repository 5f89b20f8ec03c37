"""The history on disk: a record for each minute, appended when the minute is over.

    DIRECTORY/MINUTE-INSTANCE.hist     one server appends to one file at a time; a start reads all of them

A record is length, CRC, minute, and the counts (`counts.Book.encode`, compressed). A server that is killed
loses the minute that was not over. Parts of one minute in several files add up: servers that share a ledger's
directory, one after the other or side by side, have one history when they start.

What cannot be read is left out, with one warning, and everything behind it in that file.
"""

import asyncio
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.telemetry.counts import Counts, Series, decode_rows
from penstock.telemetry.history import MINUTE_S, SLO_S, History
from penstock.telemetry.log import Log

BYTES_MAX = 64 * 1024 * 1024
"""Of all files together: what is over it goes, oldest first."""
FILE_MINUTES = 360
"""A file takes records for so long."""
RECORD_BYTES_MAX = 4 * 1024 * 1024

_HEAD = struct.Struct("<IIQ")


class HistoryFiles:
    """The files of one directory. Blocks on the disk: call it from a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()
        self._file: int | None = None
        self._since = 0

    def append(self, minute: int, body: bytes) -> None:
        """Write one minute.

        Raises:
            OSError: it cannot be written.
        """
        packed = zlib.compress(body, 1)
        record = _HEAD.pack(len(packed), zlib.crc32(packed), minute) + packed
        with self._one_at_a_time:
            if os.write(self._current(minute), record) < len(record):
                self.close()
                raise OSError("a minute of the history was not written whole")

    def read(self, damaged: Callable[[Path], None]) -> Iterator[tuple[int, list[tuple[Series, Counts]]]]:
        """Every minute there is; `damaged` is called for each file that cannot be read to its end."""
        for path in sorted(self._directory.glob("*.hist")):
            try:
                yield from _records(path.read_bytes())
            except (OSError, ValueError):
                damaged(path)

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _current(self, minute: int) -> int:
        if self._file is None or minute - self._since >= FILE_MINUTES:
            self.close()
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old(minute)
            name = f"{minute:012}-{os.getpid()}-{id(self):x}.hist"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.open(self._directory / name, flags, 0o600)
            self._since = minute
        return self._file

    def _remove_old(self, minute: int) -> None:
        left = BYTES_MAX
        for path in sorted(self._directory.glob("*.hist"), reverse=True):
            try:
                stat = path.stat()
                left -= stat.st_size
                if left < 0 or stat.st_mtime < minute * MINUTE_S - SLO_S:
                    path.unlink()
            except OSError:
                continue  # Another server has removed it meanwhile.


class HistoryKeeper:
    """Brings a history over restarts."""

    def __init__(self, history: History, files: HistoryFiles | None, log: Log) -> None:
        """Without `files` it is in memory only."""
        self.history = history
        self._files, self._log = files, log
        self._is_failing = False

    async def load(self) -> None:
        """Take over what earlier servers wrote."""
        if self._files is None:
            return
        damaged = list[Path]()
        for minute, rows in await asyncio.to_thread(list, self._files.read(damaged.append)):
            self.history.restore(minute, rows)
        if damaged:
            self._log.warning(
                "files of the history are damaged: what cannot be read is left out",
                files=len(damaged),
                first=str(damaged[0]),
            )

    async def write_closed(self) -> None:
        """Write down each minute that is over."""
        if closed := self.history.take_closed():
            await asyncio.to_thread(self.write, closed)

    async def stop(self) -> None:
        """Write down the minute that is not over."""
        await asyncio.to_thread(self.write, self.history.take_closed(all_of_it=True))
        if self._files is not None:
            self._files.close()

    def write(self, minutes: Sequence[tuple[int, bytes]]) -> None:
        """Write down these minutes; trouble is said once."""
        if self._files is None:
            return
        try:
            for minute, body in minutes:
                self._files.append(minute, body)
        except OSError as error:
            if not self._is_failing:
                self._log.warning(
                    "the history cannot be written down, so a restart would forget it", error=error
                )
            self._is_failing = True
        else:
            self._is_failing = False


def _records(data: bytes) -> Iterator[tuple[int, list[tuple[Series, Counts]]]]:
    """
    Raises:
        ValueError: the rest is damaged.
    """
    place = 0
    while place < len(data):
        if len(data) - place < _HEAD.size:
            raise ValueError("half a record")
        size, crc, minute = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        packed = data[place : place + size]
        if size > RECORD_BYTES_MAX or len(packed) < size or zlib.crc32(packed) != crc:
            raise ValueError("a damaged record")
        place += size
        try:
            yield minute, decode_rows(zlib.decompress(packed))
        except (zlib.error, msgspec.MsgspecError) as error:
            raise ValueError("a record of another version") from error
