"""Where the ledger's files are, and whose: directories, locks, and segments by their names.

    DIRECTORY/id                              the ledger's name among those of all machines
    DIRECTORY/usage.sqlite                    the records
    DIRECTORY/journal/INSTANCE/lock           held while that gateway process lives
    DIRECTORY/journal/INSTANCE/00000001.seg   what it wrote and the database may not have yet
    DIRECTORY/damaged/                        segments with something unreadable in the middle, kept for a
                                              person

Every gateway process has a directory of its own. Whoever gets the lock of another's knows that it is dead and
recovers it.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.clock import Clock
from penstock.config.ledger import LedgerConfig
from penstock.config.machine import state_directory
from penstock.errors import LedgerError

TRIES_MAX = 100
_SUFFIX = ".seg"
_NEW = ".new-"


def ledger_directory(config: LedgerConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the ledger is: as configured, or in the user's state directory."""
    return Path(config.directory).expanduser() if config.directory else state_directory(environ) / "ledger"


def database_path(directory: Path) -> Path:
    """The SQLite file."""
    return directory / "usage.sqlite"


def journal_root(directory: Path) -> Path:
    """The directory of all processes' journals."""
    return directory / "journal"


def identity(directory: Path, proposed: str) -> str:
    """The ledger's name for all time, the same for all its processes: `proposed`, a random one, if it has
    none yet.

    Raises:
        OSError: it cannot be read or made.
    """
    path, new = directory / "id", directory / f".id-{proposed}"
    if not path.exists():
        new.write_text(proposed, encoding="ascii")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(new, path)  # Unlike a rename, the first to come wins.
        finally:
            new.unlink()
    return path.read_text(encoding="ascii").strip()


@dataclass(slots=True, frozen=True)
class Claim:
    """A journal directory that is ours until `release`, or until this process dies."""

    directory: Path
    lock: int
    """File descriptor."""

    @property
    def instance(self) -> str:
        """The directory's name: unique on this machine."""
        return self.directory.name

    def release(self, *, remove: bool) -> None:
        """Give it up; with `remove` nothing of it stays."""
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock)


def claim_new(directory: Path, clock: Clock) -> Claim:
    """A new directory for this process.

    Raises:
        LedgerError: it cannot be made.
    """
    root = journal_root(directory)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        stamp = clock.wall_ns() // 1_000_000
        for attempt in range(TRIES_MAX):
            name = f"{stamp:013d}-{os.getpid()}-{attempt}"
            if (root / name).exists():
                continue
            # Under a hidden name until it is locked: nobody may take it for one that was left behind.
            hidden = root / (_NEW + name)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                hidden.mkdir(mode=0o700)
                if (lock := _try_lock(hidden)) is not None:
                    hidden.rename(root / name)
                    return Claim(root / name, lock)
    except OSError as error:
        raise LedgerError(
            f"ledger.directory: {directory} cannot be written ({error.strerror}); "
            "name another one, or set ledger.enabled: false"
        ) from error
    raise LedgerError(f"ledger.directory: no free name under {root}")


def claim_abandoned(directory: Path) -> list[Claim]:
    """Every directory whose process is dead, oldest first; now ours to recover."""
    claims: list[Claim] = []
    for path in instance_directories(directory, hidden=True):
        with contextlib.suppress(OSError):
            if (lock := _try_lock(path)) is not None:
                claim = Claim(path, lock)
                if path.name.startswith(_NEW):
                    claim.release(remove=True)  # Its maker died before it wrote anything.
                elif not path.exists():
                    claim.release(remove=False)  # Somebody else has recovered it meanwhile.
                else:
                    claims.append(claim)
    return claims


def instance_directories(directory: Path, *, hidden: bool = False) -> list[Path]:
    """The journals of all processes, living and dead, oldest first."""
    try:
        entries = sorted(journal_root(directory).iterdir())
    except FileNotFoundError:
        return []
    return [path for path in entries if path.is_dir() and (hidden or not path.name.startswith("."))]


def is_alive(path: Path) -> bool:
    """Whether the process that this journal belongs to still runs."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def segment_path(directory: Path, sequence: int) -> Path:
    """The file of one segment."""
    return directory / f"{sequence:08d}{_SUFFIX}"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """The segments of one journal in the order in which they were written."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        paths = [path for path in directory.iterdir() if path.suffix == _SUFFIX and path.stem.isdigit()]
        found.extend((int(path.stem), path) for path in paths)
    return sorted(found)


def keep_damaged(directory: Path, instance: str, path: Path) -> Path:
    """Put a copy of a damaged segment aside; returns where."""
    aside = directory / "damaged" / f"{instance}-{path.name}"
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(path, aside)
    return aside


def _try_lock(directory: Path) -> int | None:
    """Lock a directory; None if its process lives."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
