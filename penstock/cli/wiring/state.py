"""State that Penstock keeps on this machine: the gateway's secret, the keys file if no other is named, and
the key of a running server.
"""

import contextlib
import ipaddress
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from penstock import rng
from penstock.config.machine import is_loopback, state_directory
from penstock.config.tree import Config

SECRET_BYTES_MAX = 4096


def default_keys_file() -> Path:
    """Where `penstock keys` writes if nothing says another place."""
    return state_directory() / "keys.jsonl"


def with_secret(config: Config) -> Config:
    """The config with `auth.secret` filled in: what was kept from an earlier run, or a new one that is kept
    now.

    A machine that does not let us keep it is no reason not to serve: then it is new at every start, and so
    are the tenants' caches.
    """
    if config.auth.secret:
        return config
    secret = rng.fresh_token(32)
    with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError):  # There may be no home directory.
        secret = _kept_secret(state_directory() / "gateway-secret", secret)
    return msgspec.structs.replace(config, auth=msgspec.structs.replace(config.auth, secret=secret))


def _kept_secret(path: Path, fresh: str) -> str:
    """The secret in the file; `fresh` becomes it if there is none.

    Of several processes that start, one is first.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = path.with_name(f".{path.name}.{os.getpid()}")
    mine.unlink(missing_ok=True)
    handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(fresh)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)  # Atomic, and it never replaces: the first process has written a whole file.
    finally:
        mine.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle) as file:
        info = os.fstat(file.fileno())
        kept = file.read(SECRET_BYTES_MAX).strip()
    return kept if kept and info.st_uid == os.getuid() and not info.st_mode & 0o077 else fresh


# The random key of a running `penstock serve`, kept where only the same user can read it.
#
# So `penstock chat` in another shell just works. The file is removed when the server stops.

KEY_BYTES_MAX = 4096


def save_key(host: str, port: int, key: str) -> None:
    """Write down the key of the server at an address; a machine that does not let us is no reason not to
    serve.
    """
    with contextlib.suppress(OSError):
        if (directory := runtime_directory()) is None:
            return
        path = directory / key_name(host, port)
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(key)


def load_key(host: str, port: int) -> str:
    """The key of our own server on that port of this machine, or an empty string."""
    if not is_loopback(host):
        return ""
    directory = _directory()
    try:
        if not _is_private(directory):
            return ""
    except OSError:
        return ""
    for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        with contextlib.suppress(OSError), (directory / key_name(address, port)).open() as file:
            return file.read(KEY_BYTES_MAX).strip()
    return ""


def forget_key(host: str, port: int) -> None:
    """Remove the key again."""
    with contextlib.suppress(OSError):
        (_directory() / key_name(host, port)).unlink(missing_ok=True)


def key_name(host: str, port: int) -> str:
    """The file that keeps the key of the server at an address."""
    return f"key-{address_name(host, port)}"


def address_name(host: str, port: int) -> str:
    """A file name's part for a numeric address: two servers may have one port, each of another address."""
    return f"{ipaddress.ip_address(host.strip('[]')).compressed}-{port}"


def runtime_directory() -> Path | None:
    """Where this user's running servers keep what ends with them; None: there is no place for that."""
    directory = _directory()
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        if _is_private(directory):
            return directory
    return None


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


def _is_private(directory: Path) -> bool:
    """Whether the directory is ours alone: in a shared /tmp another user may have made it first."""
    info = directory.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
