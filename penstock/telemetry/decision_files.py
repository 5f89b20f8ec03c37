"""The placement decisions of the last hour, on disk: whichever process made them, and after a restart.

    DIRECTORY/TIME-INSTANCE.dec     one process appends to one file at a time; all processes read all of them

A file is a row of batches: length, number of entries, eight bytes of hash for each request, and the entries
(msgpack, compressed), with the settings that they were decided by once for all of them. A search for a
request reads the hashes, and of the rest only the lines that it wants.
Old files are removed by whichever process begins a new one: `BYTES_MAX` bounds the directory, so a fleet that
decides faster than some hundred times a second remembers less than an hour.

Decisions are written every `FLUSH_S` by a thread: a process that is killed loses that much.
"""

import asyncio
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S, Clock, sleep
from penstock.policy.placement.pick import Choice, ComplexityChoice, Decision
from penstock.policy.placement.score import ScoredRequest, WorkerFacts
from penstock.policy.terms import PlacementTerms
from penstock.telemetry.log import Log
from penstock.types import RequestId

BYTES_MAX = 256 * 1024 * 1024
"""Of all files together, but for the last batch of each process."""
FILE_BYTES_MAX = 4 * 1024 * 1024
KEPT_S = 3900.0
"""An hour, and some minutes for a reader at the end of it."""
FILE_S = 300.0
"""A file takes entries for so long."""
FLUSH_S = 0.5
LOOKS = 5
"""At what another process may have yet to write, before nothing is known."""
PENDING_MAX = 20_000
"""Entries that wait to be written; of more the oldest are lost."""
FAILURES_MAX = 100
"""Failures among them; more are not kept: refusals in a flood would push the decisions out of the files."""

_HEAD = struct.Struct("<II")
_HASH_BYTES = 8


class Failure(msgspec.Struct, frozen=True):
    """How a request ended without its answer."""

    status: int
    """Of HTTP, if it had not begun to stream."""
    code: str
    message: str
    """Empty where it may repeat what the client wrote."""


class DecisionEntry(msgspec.Struct, frozen=True):
    """One thing that was decided about a request."""

    request_id: RequestId
    decision: Decision | None = None
    choice: ComplexityChoice | None = None
    """The model, of a request that named none."""
    failure: Failure | None = None


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """A decision in a batch, without its settings."""

    route: str
    at_ns: int
    config: int
    """Which of the batch's settings it was made by."""
    request: ScoredRequest
    candidates: tuple[WorkerFacts, ...]
    draws: tuple[int, ...]
    choice: Choice
    looked_up: bool


class _Item(msgspec.Struct, frozen=True, array_like=True):
    """An entry in a batch."""

    request_id: RequestId
    decision: _Written | None
    choice: ComplexityChoice | None
    failure: Failure | None


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    configs: list[PlacementTerms]
    items: list[_Item]


_decode = msgspec.msgpack.Decoder(_Batch).decode
_encode = msgspec.msgpack.Encoder().encode


class DecisionFiles:
    """The files, as one process writes and all read them. Blocks on the disk: call it from a thread."""

    def __init__(self, directory: Path, clock: Clock, *, bytes_max: int = BYTES_MAX) -> None:
        self._directory, self._clock, self._bytes_max = directory, clock, bytes_max
        self._one_at_a_time = threading.Lock()
        self._file: int | None = None
        self._since_ns = self._num_bytes = 0

    def append(self, entries: list[DecisionEntry]) -> None:
        """Write a batch.

        Raises:
            OSError: it cannot be written.
        """
        hashes = b"".join([_hash(entry.request_id) for entry in entries])
        body = hashes + zlib.compress(_encode(_batch_of(entries)), 1)
        with self._one_at_a_time:
            written = os.write(self._current(), _HEAD.pack(len(body), len(entries)) + body)
            self._num_bytes += written
            if written < _HEAD.size + len(
                body
            ):  # The disk is full: what is behind half a batch is not found.
                self._close()
                raise OSError("a batch of decisions was not written whole")

    def find(self, *names: RequestId) -> list[DecisionEntry]:
        """The decisions about a request, by any of its names, oldest first."""
        wanted, found = {_hash(name) for name in names}, list[DecisionEntry]()
        for path in sorted(self._directory.glob("*.dec")):
            try:
                found += [entry for entry in _matching(path, wanted) if entry.request_id in names]
            except OSError:
                continue  # Another process has removed it meanwhile.
        return found

    def close(self) -> None:
        """Write no more."""
        with self._one_at_a_time:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _current(self) -> int:
        """The file that takes the next batch; a new one if the last is full, or old."""
        now_ns = self._clock.wall_ns()
        is_old = now_ns - self._since_ns > FILE_S * NS_PER_S
        if self._file is None or is_old or self._num_bytes > min(FILE_BYTES_MAX, self._bytes_max // 4):
            self._close()
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old(now_ns)
            name = f"{now_ns // NS_PER_MS:015}-{os.getpid()}-{id(self):x}.dec"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.open(self._directory / name, flags, 0o600)
            self._since_ns, self._num_bytes = now_ns, 0
        return self._file

    def _remove_old(self, now_ns: int) -> None:
        """Keep the bounds; a file that another process writes to may be among those that go."""
        left = self._bytes_max - min(FILE_BYTES_MAX, self._bytes_max // 4)
        for path in sorted(self._directory.glob("*.dec"), reverse=True):
            try:
                stat = path.stat()
                left -= stat.st_size
                if left < 0 or now_ns - stat.st_mtime_ns > KEPT_S * NS_PER_S:
                    path.unlink()
            except OSError:
                continue


class DecisionKeeper:
    """Writes what one gateway process decides, and finds what any of them has."""

    def __init__(self, files: DecisionFiles, log: Log, *, has_peers: bool = True) -> None:
        """`has_peers`: other processes write to the same directory."""
        self._files, self._log, self._has_peers = files, log, has_peers
        self._pending: deque[Decision | DecisionEntry] = deque(maxlen=PENDING_MAX)
        """Decisions; the entry of a decision is made when it is written, by that thread."""
        self._one_writer = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._num_failures = 0

    def decided(self, decision: Decision) -> None:
        """A worker was chosen, or none."""
        self._pending.append(decision)

    def chose(self, request_id: RequestId, choice: ComplexityChoice) -> None:
        """A model was chosen."""
        self._pending.append(DecisionEntry(request_id, choice=choice))

    def failed(self, request_id: RequestId, failure: Failure) -> None:
        """A request was refused, or failed."""
        if self._num_failures < FAILURES_MAX:
            self._num_failures += 1
            self._pending.append(DecisionEntry(request_id, failure=failure))

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run(), name="write decisions")

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await asyncio.to_thread(self._write)
            await asyncio.to_thread(self._files.close)

    async def find(self, *names: RequestId) -> list[DecisionEntry]:
        """The decisions about a request, in whichever process; another one may have yet to write it, which
        takes it twice `FLUSH_S` at most.
        """
        await asyncio.to_thread(self._write)
        found = await asyncio.to_thread(self._files.find, *names)
        for _ in range(LOOKS if self._has_peers else 0):
            if found:
                break
            await sleep(2 * FLUSH_S / LOOKS)
            found = await asyncio.to_thread(self._files.find, *names)
        return found

    async def _run(self) -> None:
        while True:
            await sleep(FLUSH_S)
            if self._pending:
                await asyncio.to_thread(self._write)

    def _write(self) -> None:
        """Write what is pending. Returns only when what another thread took from there is written, too."""
        with self._one_writer:
            self._write_pending()

    def _write_pending(self) -> None:
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        if not pending:
            return
        self._num_failures = 0
        try:
            self._files.append([_entry_of(each) for each in pending])
        except OSError as error:
            if not self._is_failing:
                self._log.warning(
                    "decisions cannot be written down, so they cannot be explained", error=error
                )
            self._is_failing = True
        else:
            self._is_failing = False


def _entry_of(decided: Decision | DecisionEntry) -> DecisionEntry:
    return (
        decided if isinstance(decided, DecisionEntry) else DecisionEntry(decided.request_id, decision=decided)
    )


def _matching(path: Path, wanted: AbstractSet[bytes]) -> list[DecisionEntry]:
    """The entries of those batches that may have the request."""
    found = list[DecisionEntry]()
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, count = _HEAD.unpack(head)
            hashes = file.read(count * _HASH_BYTES)
            places = range(0, len(hashes), _HASH_BYTES)
            if any(hashes[i : i + _HASH_BYTES] in wanted for i in places):
                try:
                    found += _entries_of(_decode(zlib.decompress(file.read(size - len(hashes)))))
                except (zlib.error, msgspec.MsgspecError):  # Half written, or by another version.
                    return found
            else:
                file.seek(size - len(hashes), os.SEEK_CUR)
    return found


def _batch_of(entries: list[DecisionEntry]) -> _Batch:
    """As it is written."""
    configs, places, items = list[PlacementTerms](), dict[int, int](), list[_Item]()
    for entry in entries:
        written = None
        if (made := entry.decision) is not None:
            place = places.get(id(made.config))
            if place is None:
                place = places[id(made.config)] = len(configs)
                configs.append(made.config)
            written = _Written(
                made.route, made.at_ns, place, made.request, made.candidates, made.draws, made.choice,
                made.looked_up,
            )  # fmt: skip
        items.append(_Item(entry.request_id, written, entry.choice, entry.failure))
    return _Batch(configs, items)


def _entries_of(batch: _Batch) -> list[DecisionEntry]:
    """As it was given to `append`."""
    found = list[DecisionEntry]()
    for item in batch.items:
        decision = None
        if (made := item.decision) is not None:
            decision = Decision(
                request_id=item.request_id,
                route=made.route,
                at_ns=made.at_ns,
                config=batch.configs[made.config],
                request=made.request,
                candidates=made.candidates,
                draws=made.draws,
                choice=made.choice,
                looked_up=made.looked_up,
            )
        found.append(DecisionEntry(item.request_id, decision, item.choice, item.failure))
    return found


def _hash(request_id: RequestId) -> bytes:
    return blake2b(request_id.encode(), digest_size=_HASH_BYTES).digest()
