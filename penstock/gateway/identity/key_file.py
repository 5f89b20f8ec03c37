"""The file of hashed keys: one JSON object per line, replaced as a whole, so that a reader never sees half of a change.

Writers exclude one another with a lock beside the file. Gateways only read; they notice a change by `stamp`.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import ConfigError
from penstock.gateway.identity.api_keys import ApiKey, record_problem

LINE_BYTES_MAX = 2048
KEYS_MAX = 100_000
Stamp = tuple[int, int, int]
"""Modification time, size and inode: a change that keeps all three is no change of ours."""
T = TypeVar("T")


def stamp(path: Path) -> Stamp | None:
    """What tells one state of the file from another; None if it is not there."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


def read_keys(path: Path, *, keys_max: int = KEYS_MAX) -> tuple[ApiKey, ...]:
    """All records.

    Raises:
        ConfigError: the file cannot be read, anybody may write to it, or a line is wrong.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ConfigError(f"{path}: everybody may write to it, and so make keys; chmod 600 it")
            data = file.read(keys_max * LINE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    if len(data) > keys_max * LINE_BYTES_MAX or len(lines) > keys_max + 1:
        raise ConfigError(f"{path}: over the bound of {keys_max} keys")
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = msgspec.json.decode(line, type=ApiKey)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        problem = record_problem(key) or ("id: it is there twice" if key.id in keys else "")
        if problem:
            raise ConfigError(f"{path}:{number}: {problem}")
        keys[key.id] = key
    return tuple(keys.values())


def edit_keys(
    path: Path,
    change: Callable[[tuple[ApiKey, ...]], tuple[Sequence[ApiKey], T]],
    *,
    keys_max: int = KEYS_MAX,
) -> T:
    """Change the file: `change` gets its records (none, if there is no file) and returns new ones and a result.

    Raises:
        ConfigError: the file cannot be read or written, or there would be too many keys.
    """
    try:
        with _locked(path):
            before = read_keys(path, keys_max=keys_max) if path.exists() else ()
            after, result = change(before)
            if len(after) > keys_max:
                raise ConfigError(
                    f"{path}: over the bound of {keys_max} keys; remove the lines of keys that have ended"
                )
            assert not any(map(record_problem, after)), "what is written must be readable"
            _replace(path, b"".join(msgspec.json.encode(key) + b"\n" for key in after))
            return result
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the lock file, which stays: removing it would let two writers lock two files."""
    lock = path.with_name(f".{path.name}.lock")
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, data: bytes) -> None:
    """Write beside the file, make it last, then put it in the file's place; a crash leaves the old one or the new one."""
    path = path.resolve()  # A link stays a link.
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # Of a writer that died; we hold the lock.
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
