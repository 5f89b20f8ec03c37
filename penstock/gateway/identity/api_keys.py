"""API keys as they are stored: hashed, with a tenant, and a life of their own.

    sk-k3v7q2mwz5ta_Jx0...43 characters...   the key; shown once, to whoever makes it
    sk-k3v7q2mwz5ta                          its prefix; shown in lists, logs and the ledger

Only a BLAKE2b hash is kept, and no slow password hash is needed: a key is 256 bits of the machine's entropy,
so there is no dictionary to try, and finding one from its hash means 2^255 guesses at any speed. (Slow hashes
are for secrets that people think of.) (gateway/identity/tenants.py looks them up.)

Everything here is a function of what is handed in; files are for gateway/identity/api_keys.py. Times are
seconds since the epoch.
"""

import base64
import contextlib
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.config.tenancy import LABEL, id_problem
from penstock.errors import ConfigError
from penstock.rng import fresh_key, fresh_token

ID_CHARS = 12
LABEL_CHARS_MAX = 200
FOREVER = 2**53
_ID = re.compile(r"(?:sk-)?([a-z2-7]{12})(?:_[A-Za-z0-9_-]{43})?")
_HASH = re.compile(r"[0-9a-f]{64}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One key's record: everything but the key."""

    id: str
    hash: str
    """Of the whole key, in hexadecimal."""
    tenant: str
    tier: str = ""
    """Tier of a tenant that the configuration does not list."""
    label: str = ""
    created_s: int
    not_before_s: int = 0
    expires_s: int = 0
    """It is accepted until just before then; 0: for good."""
    revoked_s: int = 0
    """When it was revoked; 0: never."""
    replaces: str = ""
    """Id of the key that was rotated into this one."""
    admin: bool = False
    """It may look at the fleet and change it (`/admin`), beside being its tenant's."""
    scrape: bool = False
    """It may read the numbers of all tenants (`/metrics`, `/status.json`), and nothing else."""

    @property
    def prefix(self) -> str:
        """The part of the key that may be shown."""
        return f"sk-{self.id}"

    def state(self, now_s: int) -> str:
        """Whether it is "active", or why it is not: "revoked", "expired" or "early"."""
        if self.revoked_s:
            return "revoked"
        if self.expires_s and now_s >= self.expires_s:
            return "expired"
        return "early" if now_s < self.not_before_s else "active"


@dataclass(slots=True, frozen=True, kw_only=True)
class Issued:
    """A new key: the record, and the key itself, which cannot be shown again."""

    record: ApiKey
    key: str


def issue(
    now_s: int,
    *,
    tenant: str,
    tier: str = "",
    label: str = "",
    not_before_s: int = 0,
    expires_s: int = 0,
    replaces: str = "",
    admin: bool = False,
    scrape: bool = False,
) -> Issued:
    """Make a key.

    Raises:
        ConfigError: a name, a label or a time that cannot be.
    """
    key_id = base64.b32encode(fresh_key(10)).decode().lower()[:ID_CHARS]
    key = f"sk-{key_id}_{fresh_token(32)}"
    record = ApiKey(
        id=key_id,
        hash=digest_of(key.encode()).hex(),
        tenant=tenant,
        tier=tier,
        label=label,
        created_s=now_s,
        not_before_s=not_before_s,
        expires_s=expires_s,
        replaces=replaces,
        admin=admin,
        scrape=scrape,
    )
    if problem := record_problem(record):
        raise ConfigError(problem)
    if expires_s and expires_s <= not_before_s:
        raise ConfigError("it ends before it begins, so the key would never be accepted")
    return Issued(record=record, key=key)


def rotate(old: ApiKey, now_s: int, *, grace_s: int, expires_s: int | None = None) -> tuple[ApiKey, Issued]:
    """The old key, ending after a grace time, and a new one of the same tenant.

    The new key lives as long as the old one was to live, unless `expires_s` says until when (0: for good).

    Raises:
        ConfigError: the old key is not accepted any more.
    """
    if (state := old.state(now_s)) in ("revoked", "expired"):
        raise ConfigError(f"{old.prefix} is {state}; make a new key instead")
    if expires_s is None:
        expires_s = now_s + (old.expires_s - old.created_s) if old.expires_s else 0
    issued = issue(
        now_s,
        tenant=old.tenant,
        tier=old.tier,
        label=old.label,
        expires_s=expires_s,
        replaces=old.id,
        admin=old.admin,
        scrape=old.scrape,
    )
    ends_s = min(old.expires_s or FOREVER, now_s + grace_s)
    return msgspec.structs.replace(old, expires_s=ends_s), issued


def revoke(old: ApiKey, now_s: int) -> ApiKey:
    """The key, never accepted again. Revoking it once more changes nothing."""
    return old if old.revoked_s else msgspec.structs.replace(old, revoked_s=now_s)


def find(keys: Iterable[ApiKey], shown: str) -> ApiKey:
    """The record of a prefix, an id or a whole key (for those who found one where it should not be).

    Raises:
        ConfigError: there is none.
    """
    match = _ID.fullmatch(shown.strip())
    found = next((key for key in keys if match and key.id == match[1]), None)
    if found is None:
        raise ConfigError(f"there is no key {shown[:20]!r} in the file")
    return found


def record_problem(record: ApiKey) -> str:
    """Problems of a record; empty if nothing is."""
    if not _ID.fullmatch(record.id) or len(record.id) != ID_CHARS:
        return f"id: expected {ID_CHARS} characters of a-z and 2-7"
    if not _HASH.fullmatch(record.hash):
        return "hash: expected 64 hexadecimal digits"
    if problem := id_problem(record.tenant):
        return f"tenant: {problem}"
    if record.tier and not LABEL.fullmatch(record.tier):
        return f"tier: expected 1 to 64 letters, digits and _.-, got {record.tier[:80]!r}"
    if len(record.label) > LABEL_CHARS_MAX or not record.label.isprintable():
        return f"label: expected at most {LABEL_CHARS_MAX} printable characters"
    if record.admin and record.scrape:
        return "admin, scrape: an admin's key reads all numbers already; give one of the two"
    times = (record.created_s, record.not_before_s, record.expires_s, record.revoked_s)
    if not all(0 <= time <= FOREVER for time in times):
        return "a time that is not possible"
    return ""


def tier_problem(keys: Sequence[ApiKey], tiers: Iterable[str], listed: Iterable[str]) -> str:
    """Why the keys do not go with the configuration's tiers and listed tenants; empty if they do.

    A tenant that the configuration does not list has the tier that its keys say, so they must say the same.
    """
    known, configured, seen = set(tiers), set(listed), dict[str, ApiKey]()
    for key in keys:
        if key.revoked_s:
            continue
        if key.tier and key.tier not in known:
            return (
                f"{key.prefix}: there is no tier {key.tier!r}; there are {', '.join(sorted(known)) or 'none'}"
            )
        other = seen.setdefault(key.tenant, key)
        if other.tier != key.tier and key.tenant not in configured:
            return (
                f"{key.prefix}: tier {key.tier!r} for tenant {key.tenant!r}, whose key {other.prefix} "
                f"says {other.tier!r}; list the tenant in the configuration, or make them agree"
            )
    return ""


def digest_of(key: bytes) -> bytes:
    """The hash that is stored of a whole key."""
    return hashlib.blake2b(key, digest_size=32, person=b"penstock-apikey").digest()


# The file of hashed keys: one JSON object per line, replaced as a whole, so that a reader never sees half of
# a change.
#
# Writers exclude one another with a lock beside the file. Gateways only read; they notice a change by
# `stamp`.

LINE_BYTES_MAX = 2048
KEYS_MAX = 100_000
Stamp = tuple[int, int, int]
"""Modification time, size and inode: a change that keeps all three is no change of ours."""
T = TypeVar("T")


def stamp(path: Path) -> Stamp | None:
    """A stamp that tells one state of the file from another; None if it is not there."""
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
    """Change the file: `change` gets its records (none, if there is no file) and returns new ones and a
    result.

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
    """Write beside the file, make it last, then put it in the file's place; a crash leaves the old one or the
    new one.
    """
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
