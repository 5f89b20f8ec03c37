"""One file of a model onto this disk: what came before a connection broke is kept, and what came is hashed.

.penstock/parts/NAME    grows; a later attempt, also of another process, goes on behind it
NAME                    whole, and of the digest that its source gives
"""

import hashlib
import http.client
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.weight_cache.source import RemoteFile, Source, SourceUnreachable

CHUNK_BYTES = 1 << 20
ATTEMPTS = 6
"""In a row that brought nothing."""
PAUSE_S = 1.0
"""Before the second attempt; twice as long before each further one."""
PAUSE_S_MAX = 30.0
OnBytes = Callable[[int], None]
"""Called with bytes that have come, or that were there; with fewer than none where a file begins again."""


class Transfer:
    """Brings files of one source below one directory."""

    def __init__(
        self, source: Source, directory: Path, on_bytes: OnBytes, *, pause_s: float = PAUSE_S
    ) -> None:
        self._source, self._directory, self._on_bytes = source, directory, on_bytes
        self._parts = directory / ".penstock" / "parts"
        self._pause_s = pause_s
        self._never = threading.Event()

    def fetch(self, file: RemoteFile) -> str:
        """Bring the file whole. Returns its SHA-256.

        Raises:
            CheckpointError: it is another one than its source says, twice.
            SourceError: the source does not give it.
            OSError: the disk does not take it.
        """
        part = self._parts / file.name.replace("/", "%2F")
        part.parent.mkdir(parents=True, exist_ok=True)
        target = self._directory / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        for is_last in (False, True):
            self._complete(file, part)
            sha256, found = _digests(file, part)
            if file.digest is None or found == file.digest.hex:
                with part.open("rb+") as whole:
                    os.fsync(whole.fileno())
                part.replace(target)
                return sha256
            part.unlink()  # Nothing of it can be trusted: once more from its beginning.
            self._on_bytes(-file.size)
            if is_last:
                raise CheckpointError(
                    f"{self._source.name}: {file.name}: expected {file.digest.algorithm} {file.digest.hex}, "
                    f"got {found} from {file.size} bytes, twice"
                )
        raise AssertionError

    def _complete(self, file: RemoteFile, part: Path) -> None:
        """Bring what is missing, in as many attempts as bring something, and a few that do not."""
        self._on_bytes(have := _size(part, file.size))
        failures = 0
        while have < file.size or not part.exists():
            try:
                came = self._attempt(file, part, have)
            except (OSError, http.client.HTTPException, SourceUnreachable) as error:
                if isinstance(error, OSError) and error.filename is not None:
                    raise  # The disk's trouble, not the network's.
                now = _size(part, file.size)
                failures = 1 if now > have else failures + 1
                if failures >= ATTEMPTS:
                    raise SourceUnreachable(f"{file.name}: {error}") from error
                have = now
                self._pause(failures, error)
                continue
            failures, have = (0 if came > have else failures + 1), came
            if failures >= ATTEMPTS:
                raise SourceUnreachable(f"{file.name}: ends after {have} of {file.size} bytes")

    def _attempt(self, file: RemoteFile, part: Path, have: int) -> int:
        with self._source.open(file, have) as (stream, begins):
            if begins not in (0, have):
                raise SourceUnreachable(f"begins at {begins} where {have} was asked for")
            if begins < have:
                self._on_bytes(-have)
                have = 0
            read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
            with part.open("r+b" if have else "wb") as out:
                out.seek(have)
                out.truncate()
                while have < file.size and (chunk := read(min(CHUNK_BYTES, file.size - have))):
                    out.write(chunk)
                    have += len(chunk)
                    self._on_bytes(len(chunk))
                if have == file.size and read(1):
                    raise CheckpointError(
                        f"{self._source.name}: {file.name}: has more than {file.size} bytes"
                    )
        return have

    def _pause(self, failures: int, error: Exception) -> None:
        wanted_s = self._pause_s * 2 ** (failures - 1)
        if isinstance(error, SourceUnreachable):
            wanted_s = max(wanted_s, error.retry_after_s)
        self._never.wait(min(wanted_s, PAUSE_S_MAX))


def _size(part: Path, size_max: int) -> int:
    """The size of a part that is there; a part that is longer than the whole is another file's."""
    try:
        size = part.stat().st_size
    except FileNotFoundError:
        return 0
    if size > size_max:
        part.unlink()
        return 0
    return size


def _digests(file: RemoteFile, part: Path) -> tuple[str, str]:
    """SHA-256, and what its source calls it by."""
    sha256, named = hashlib.sha256(), None
    if file.digest is not None and file.digest.algorithm != "sha256":
        named = file.digest.begin(file.size)
    feed(part, (sha256,) if named is None else (sha256, named))
    return sha256.hexdigest(), (named or sha256).hexdigest()


def feed(path: Path, hashes: tuple[Any, ...]) -> None:
    """Read a file into hashes."""
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            for each in hashes:
                each.update(chunk)
