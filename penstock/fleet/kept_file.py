"""A small file that keeps a controller's state over a restart: read whole, written whole or not at all."""

import asyncio
import contextlib
import os
from pathlib import Path

from penstock.telemetry.log import Log

FILE_BYTES_MAX = 16 * 1024 * 1024


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


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(FILE_BYTES_MAX)
    return b""


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(body)
    new.replace(path)
