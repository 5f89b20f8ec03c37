"""Models of the hub and of object storage on this machine's disk, and how their files come there.

    PLACE/entries/NAME--VERSION/            the model's files, as an engine loads them
                     .penstock/model.json   its files with sizes and digests: written when all are there
                     .penstock/parts/NAME   what has come of a file that is not whole; a later attempt,
                                            also of another process, continues behind it
    PLACE/locks/NAME--VERSION               held, shared, by every process that uses the model; touched when
                                            one begins to
    PLACE/locks/download                    held by the one process that downloads
    PLACE/latest/NAME                       the version that the source had last, for when it cannot be asked

A file is in its place once it is whole and has the digest that its source gives. Least recently used models
go when room is wanted, never one that is in use. Locks are the kernel's (`flock`): a process that ends, in
whatever way, holds none.
"""

import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError, ConfigError
from penstock.weight_cache.source import Listing, RemoteFile, Source, SourceUnreachable, check_listing

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


SPARE_BYTES = 256 << 20
"""Left free on the disk, whatever the cache may take."""
_MODEL = Path(".penstock") / "model.json"
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_PINS: dict[Path, int] = {}
"""Locks that this process holds on the models that it uses, until it ends."""

Tell = Callable[[str, int, int], None]
"""Called with what happens, bytes that are here, and bytes in all."""


def say_nothing(_what: str, _done: int, _total: int) -> None:
    """For callers that do not watch."""


class StoredFile(msgspec.Struct, frozen=True):
    """One file that is here."""

    name: str
    size: int
    sha256: str


class StoredModel(msgspec.Struct, frozen=True):
    """The content of `model.json`."""

    name: str
    version: str
    files: tuple[StoredFile, ...]
    is_whole: bool = False
    """All of its files are among them."""

    @property
    def digest(self) -> str:
        """Over all files: what `#digest=` behind an address wants."""
        known = hashlib.blake2b(digest_size=16)
        for file in sorted(self.files, key=lambda file: file.name):
            known.update(f"{file.name}\0{file.size}\0{file.sha256}\n".encode())
        return known.hexdigest()


@dataclass(slots=True, frozen=True, kw_only=True)
class Entry:
    """One model's place."""

    directory: Path
    model: StoredModel | None
    """None: nothing of it is here whole."""
    num_bytes: int
    used_ns: int
    """When, on the wall clock."""
    is_used: bool
    """By a process that runs."""


class WeightCache:
    """The models below one directory, shared by all processes of a machine."""

    def __init__(
        self, place: Path, bytes_max: int = 0, *, tell: Tell = say_nothing, pause_s: float = PAUSE_S
    ) -> None:
        """`bytes_max`: of all models together; 0: what the disk has."""
        self.place, self.bytes_max, self._tell, self._pause_s = place, bytes_max, tell, pause_s

    def fetch(self, source: Source, digest: str = "") -> Path:
        """The directory with the model, which stays there until this process ends.

        `digest`: it must have this one.

        Raises:
            SourceError: the source does not give it, and it is not here.
            CheckpointError: it is damaged, or another one than was asked for.
            ConfigError: there is no room for it, or the cache's directory cannot be used.
        """
        try:
            return self._fetch(source, digest)
        except OSError as error:
            raise ConfigError(f"{source.name}: the weight cache in {self.place}: {error}") from error

    def _fetch(self, source: Source, digest: str) -> Path:
        for name in ("entries", "locks", "latest"):
            (self.place / name).mkdir(parents=True, exist_ok=True)
        try:
            listing = source.listing()
        except SourceUnreachable as error:
            found = self._latest(source.name)
            if found is None:
                raise
            self._tell(f"{source.name}: {error}: what was fetched before is used", 0, 0)
            return self._checked(source.name, found, digest)
        check_listing(source.name, listing.files)
        directory = self._directory(source.name, listing.version)
        self._pin(directory)
        if self._whole(directory) is None:
            with self._turn(source.name):
                if self._whole(directory) is None:  # No other process has fetched it while we waited.
                    self._download(source, listing, directory)
        (self.place / "latest" / _plain(source.name)).write_text(listing.version)
        return self._checked(source.name, directory, digest)

    def entries(self) -> list[Entry]:
        """All that is here, the least recently used first."""
        found: list[Entry] = []
        for directory in sorted((self.place / "entries").glob("*")):
            lock = self._lock_of(directory)
            if not lock.exists():
                lock.touch()
            found.append(
                Entry(
                    directory=directory,
                    model=_stored(directory),
                    num_bytes=_bytes_below(directory),
                    used_ns=lock.stat().st_mtime_ns,
                    is_used=not _is_free(lock),
                )
            )
        return sorted(found, key=lambda entry: entry.used_ns)

    def verify(self, entry: Entry) -> list[str]:
        """Read all files of a model again. Returns what is wrong; such a file is deleted, and the next
        `fetch` brings it again.
        """
        assert entry.model is not None, "only what is whole can be verified"
        wrong: list[str] = []
        for file in entry.model.files:
            path, found = entry.directory / file.name, hashlib.sha256()
            try:
                feed(path, (found,))
            except OSError as error:
                wrong.append(f"{file.name}: {error.strerror}")
                continue
            if found.hexdigest() != file.sha256:
                wrong.append(f"{file.name}: expected sha256 {file.sha256}, got {found.hexdigest()}")
                path.unlink()
        return wrong

    def remove(self, entry: Entry) -> bool:
        """Delete a model; False if a process uses it."""
        with self._alone(entry.directory) as is_mine:
            if is_mine:
                shutil.rmtree(entry.directory)
        return is_mine

    def _directory(self, name: str, version: str) -> Path:
        return self.place / "entries" / f"{_plain(name)}--{version[:16]}"

    def _lock_of(self, directory: Path) -> Path:
        return self.place / "locks" / directory.name

    def _latest(self, name: str) -> Path | None:
        """The last fetched directory, if it is still whole."""
        try:
            version = (self.place / "latest" / _plain(name)).read_text()
        except FileNotFoundError:
            return None
        directory = self._directory(name, version)
        self._pin(directory)
        return directory if self._whole(directory) is not None else None

    def _pin(self, directory: Path) -> None:
        """Hold the model for as long as this process lives, and note that it was used now."""
        lock = self._lock_of(directory)
        if directory not in _PINS:
            held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(held, fcntl.LOCK_SH)
            _PINS[directory] = held
        os.utime(lock)

    def _whole(self, directory: Path) -> StoredModel | None:
        """The model if all of its files are here, as long as they were."""
        model = _stored(directory)
        if model is None or not model.is_whole:
            return None
        return model if all(_is_here(directory, file) for file in model.files) else None

    def _checked(self, name: str, directory: Path, digest: str) -> Path:
        model = self._whole(directory)
        assert model is not None, "it was fetched"
        if digest and digest != model.digest:
            raise CheckpointError(f"{name}: expected the digest {digest}, got {model.digest}")
        return directory

    @contextlib.contextmanager
    def _turn(self, name: str) -> Generator[None]:
        """One download at a time: two would share the line, and neither model would be there sooner."""
        with (self.place / "locks" / "download").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._tell(f"{name}: another download runs; this one waits for it", 0, 0)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _download(self, source: Source, listing: Listing, directory: Path) -> None:
        known = _stored(directory)
        files = {file.name: file for file in (known.files if known else ()) if _is_here(directory, file)}
        left = [file for file in listing.files if file.name not in files]
        there = _bytes_below(directory)
        self._make_room(source.name, max(listing.num_bytes - there, 0), listing.num_bytes, directory)
        done, what = listing.num_bytes - sum(file.size for file in left), f"fetching {source.name}"

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._tell(what, done, listing.num_bytes)

        def note(*, is_whole: bool) -> None:
            fresh = directory / _MODEL.with_suffix(".new")
            model = StoredModel(source.name, listing.version, tuple(files.values()), is_whole)
            fresh.write_bytes(msgspec.json.encode(model))
            fresh.replace(directory / _MODEL)

        transfer = Transfer(source, directory, count, pause_s=self._pause_s)
        (directory / _MODEL.parent).mkdir(parents=True, exist_ok=True)
        for file in left:
            note(is_whole=False)  # A fetch that continues after a crash begins with the missing file.
            files[file.name] = StoredFile(file.name, file.size, transfer.fetch(file))
        note(is_whole=True)

    def _make_room(self, name: str, wanted: int, total: int, directory: Path) -> None:
        """Delete the least recently used models until this one fits."""
        if self.bytes_max and total > self.bytes_max:
            raise ConfigError(
                f"{name}: has {total} bytes; the weight cache in {self.place} may have {self.bytes_max}"
            )
        entries = self.entries()
        held = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if self._fits(held, wanted):
                return
            if entry.directory != directory and self.remove(entry):
                self._tell(f"{entry.directory.name}: makes room in the weight cache", 0, 0)
                held -= entry.num_bytes
        if not self._fits(held, wanted):
            free = shutil.disk_usage(self.place).free
            bound = f", and may have {self.bytes_max}" if self.bytes_max else ""
            raise ConfigError(
                f"{name}: has {wanted} bytes to fetch; the weight cache in {self.place} holds {held} that "
                f"are in use{bound}, and its disk has {free} free"
            )

    def _fits(self, held: int, wanted: int) -> bool:
        if self.bytes_max and held + wanted > self.bytes_max:
            return False
        return wanted + SPARE_BYTES <= shutil.disk_usage(self.place).free

    @contextlib.contextmanager
    def _alone(self, directory: Path) -> Generator[bool]:
        """Whether no process uses the model; none begins to meanwhile."""
        with self._lock_of(directory).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def _plain(name: str) -> str:
    """A file name that is this model's alone."""
    known = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{_NOT_PLAIN.sub('-', name)[-96:].strip('-.')}-{known}"


def _stored(directory: Path) -> StoredModel | None:
    try:
        return msgspec.json.decode((directory / _MODEL).read_bytes(), type=StoredModel)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


def _is_here(directory: Path, file: StoredFile) -> bool:
    """Whether the file is as long as it was when it was fetched."""
    with contextlib.suppress(OSError):
        return (directory / file.name).stat().st_size == file.size
    return False


def _is_free(lock: Path) -> bool:
    with lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _bytes_below(directory: Path) -> int:
    return sum(_sizes(directory))


def _sizes(directory: Path) -> Iterator[int]:
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # Another process may be deleting it.
            if path.is_file():
                yield path.stat().st_size
