"""The events of a server, and their authors: admins' actions, alerts, workers that came and went, and
configurations.

    an admin drains ──┐
    an alert begins ──┼─> Notes, in each process ─> Audit, in the one that remembers ─> GET /admin/audit
    a worker leaves ──┘                                └─> audit.jsonl, beside the history

`Audit` keeps the last `KIND_EVENTS_MAX` of each kind, so a worker that comes and goes all day does not push
out who revoked a key. Its file has one line of JSON for each event; servers that share the directory, one
after the other or side by side, append to one file. A server that is killed loses what was noted in its last
second.

Nothing of a prompt, an answer or a key is noted: of a key only its id.
"""

import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S, Clock
from penstock.telemetry.log import Log

Kind = Literal["admin", "alert", "worker", "config", "server"]
KIND_EVENTS_MAX = 500
"""Of each kind, the last."""
LISTED_MAX = 500
"""In one answer."""
TEXT_CHARS_MAX = 300
FILE_BYTES_MAX = 4 * 1024 * 1024
"""A file that is larger is written again with what is kept of it, which is less than half of that."""
SAME_S = 10.0
"""Several gateway processes see the same of a worker: what they note of it within this time is one event."""


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened."""

    number: int = 0
    """Grows; what is noted later has a larger one."""
    at_ms: int
    """Since the Unix epoch."""
    kind: Kind
    what: str
    """"drained", "alert fires", "left" ..."""
    about: str = ""
    """The worker, the key's id, the alert, the file."""
    why: str = ""
    by: str = ""
    """The id of the key that did it; empty: the server by itself."""


Keep = Callable[[AuditEvent], None]


def keep_nothing(_: AuditEvent) -> None:
    """Where nothing is remembered."""


class Notes:
    """Hands on what happens in this process to where it is kept."""

    def __init__(self, clock: Clock, keep: Keep) -> None:
        self._clock, self._keep = clock, keep

    def note(self, kind: Kind, what: str, about: str = "", *, why: str = "", by: str = "") -> None:
        """It happened now."""
        at_ms = self._clock.wall_ns() // NS_PER_MS
        self._keep(
            AuditEvent(at_ms=at_ms, kind=kind, what=what, about=_cut(about), why=_cut(why), by=_cut(by))
        )


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /admin/audit`."""

    events: list[AuditEvent]
    """The newest first."""
    total: int
    """That are kept."""


class Audit:
    """The list, and its file. All but `load` and `write` belong to the owner's event loop."""

    def __init__(self, path: Path | None, log: Log) -> None:
        """Without `path` it is in memory only."""
        self._path, self._log = path, log
        self._kept: dict[Kind, deque[AuditEvent]] = _empty()
        self._pending: deque[AuditEvent] = deque(maxlen=KIND_EVENTS_MAX)
        self._one_writer = threading.Lock()
        self._number = 0
        self._is_failing = False

    def keep(self, event: AuditEvent) -> None:
        """It happened; it gets its number here."""
        kept = self._kept[event.kind]
        if event.kind == "worker" and _is_reported(event, reversed(kept)):
            return
        self._number += 1
        event = msgspec.structs.replace(event, number=self._number)
        kept.append(event)
        if self._path is not None:
            self._pending.append(event)

    def report(self, *, kind: str = "", before: int = 0, limit: int = LISTED_MAX) -> AuditReport:
        """The last ones: of one kind, or older than the one of that number."""
        rows = [each for name, kept in self._kept.items() if kind in ("", name) for each in kept]
        rows.sort(key=lambda event: -event.number)
        older = [event for event in rows if not before or event.number < before]
        return AuditReport(events=older[:limit], total=len(rows))

    def load(self) -> None:
        """Take over what earlier servers noted. Blocks on the disk."""
        if self._path is None:
            return
        try:
            events, num_damaged = _read(self._path)
        except OSError as error:
            self._log.warning("the audit trail cannot be read; it begins empty", error=error)
            return
        for number, event in enumerate(events, 1):
            self._kept[event.kind].append(msgspec.structs.replace(event, number=number))
        self._number = len(events)
        if num_damaged:
            self._log.warning("lines of the audit trail are damaged and left out", lines=num_damaged)

    @property
    def has_changes(self) -> bool:
        """Whether there is something to write."""
        return bool(self._pending)

    def write(self) -> None:
        """Write down what was noted; trouble is said once. Blocks on the disk."""
        with self._one_writer:
            events = [self._pending.popleft() for _ in range(len(self._pending))]
            if self._path is None or not events:
                return
            try:
                _append(self._path, events)
            except OSError as error:
                if not self._is_failing:
                    self._log.warning(
                        "the audit trail cannot be written down, so a restart would forget it", error=error
                    )
                self._is_failing = True
            else:
                self._is_failing = False


_decoder = msgspec.json.Decoder(AuditEvent)


def _empty() -> dict[Kind, deque[AuditEvent]]:
    return {kind: deque(maxlen=KIND_EVENTS_MAX) for kind in get_args(Kind)}


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 1]}…"


def _is_reported(event: AuditEvent, others: Iterable[AuditEvent]) -> bool:
    """Whether another process has just noted the same; `others` are the newest first."""
    for other in others:
        if abs(event.at_ms - other.at_ms) * NS_PER_MS >= SAME_S * NS_PER_S:
            return False  # All further ones are older still.
        if (event.what, event.about, event.why) == (other.what, other.about, other.why):
            return True
    return False


def _read(path: Path) -> tuple[list[AuditEvent], int]:
    """A file's events within the bounds, oldest first, and how many of its lines are damaged.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists():
        return [], 0
    kept, num_damaged = _empty(), 0
    for line in path.read_bytes().splitlines():
        try:
            event = _decoder.decode(line)
        except msgspec.DecodeError:
            num_damaged += 1
        else:
            kept[event.kind].append(event)
    events = [event for each in kept.values() for event in each]
    return sorted(events, key=lambda event: (event.at_ms, event.number)), num_damaged


def _append(path: Path, events: Iterable[AuditEvent]) -> None:
    """Add lines, and keep the file within its bound. Others may do the same meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = _lines(events)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file):
                continue  # Another server has just put a shorter one in its place.
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" + data  # A full disk left half a line.
            if os.write(file, data) < len(data):
                raise OSError("events were not written whole")
            if size + len(data) > FILE_BYTES_MAX:
                shorter = path.with_name(f"{path.name}.{os.getpid()}")
                shorter.touch(mode=0o600)
                shorter.write_bytes(_lines(_read(path)[0]))
                shorter.replace(path)
            return
        finally:
            os.close(file)


def _lines(events: Iterable[AuditEvent]) -> bytes:
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def _is_at(path: Path, file: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False
