"""What penstock keeps between runs on this machine: the gateway's secret, and the keys file if no other is named."""

import contextlib
import os
from pathlib import Path

import msgspec

from penstock import rng
from penstock.config.state import state_directory
from penstock.config.tree import Config

SECRET_BYTES_MAX = 4096


def default_keys_file() -> Path:
    """Where `penstock keys` writes if nothing says another place."""
    return state_directory() / "keys.jsonl"


def with_secret(config: Config) -> Config:
    """The config with `auth.secret` filled in: what was kept from an earlier run, or a new one that is kept now.

    A machine that does not let us keep it is no reason not to serve: then it is new at every start, and so are the
    tenants' caches.
    """
    if config.auth.secret:
        return config
    secret = rng.fresh_token(32)
    with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError):  # There may be no home directory.
        secret = _kept_secret(state_directory() / "gateway-secret", secret)
    return msgspec.structs.replace(config, auth=msgspec.structs.replace(config.auth, secret=secret))


def _kept_secret(path: Path, fresh: str) -> str:
    """The secret in the file; `fresh` becomes it if there is none. Of several processes that start, one is first."""
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
            os.link(mine, path)  # Atomic, and it never replaces: whoever is first has written a whole file.
    finally:
        mine.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle) as file:
        info = os.fstat(file.fileno())
        kept = file.read(SECRET_BYTES_MAX).strip()
    return kept if kept and info.st_uid == os.getuid() and not info.st_mode & 0o077 else fresh
