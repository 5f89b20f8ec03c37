"""The random key of a running `penstock serve`, kept where only the same user can read it.

So `penstock chat` in another shell just works. The file is removed when the server stops.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from penstock.config.hosts import is_loopback

KEY_BYTES_MAX = 4096


def save_key(port: int, key: str) -> None:
    """Write the key down; a machine that does not let us is no reason not to serve."""
    with contextlib.suppress(OSError):
        directory = _directory()
        directory.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(directory):
            return
        path = directory / f"key-{port}"
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
        with (directory / f"key-{port}").open() as file:
            return file.read(KEY_BYTES_MAX).strip()
    except OSError:
        return ""


def forget_key(port: int) -> None:
    """Remove the key again."""
    with contextlib.suppress(OSError):
        (_directory() / f"key-{port}").unlink(missing_ok=True)


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


def _is_private(directory: Path) -> bool:
    """Whether the directory is ours alone: in a shared /tmp somebody else may have made it first."""
    info = directory.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077
