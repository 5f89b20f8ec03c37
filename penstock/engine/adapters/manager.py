"""The adapters of one worker: which it knows, which are in memory, and which requests wait for one.

    LoadAdapter ──> reading, on a thread ──> known ──────> in memory ──> in use: pinned, and has a slot
                            │                   ^ evicted, least recently used first │
                            └─> failed          └────────────────────────────────────┘

Everything but the reading happens on the step thread, so nothing here locks. An adapter is named by requests
and told apart by its digest: what was evicted must come back with the same one. On a CPU the kernels read an
adapter where it lies, so that a slot is a place in the count and no memory.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from penstock.clock import NS_PER_S, Clock
from penstock.errors import PenstockError, WorkerUnavailable
from penstock.protocol.adapters import AdapterState, LoadAdapter, UnloadAdapter
from penstock.protocol.worker import Submit
from penstock.types import RequestId

if TYPE_CHECKING:  # It is torch's, which the worker loads only once it blocks its signals.
    from penstock.engine.adapters.files import Packed

POOL_BYTES_MAX = 4 << 30
"""Of adapters in memory; those in use may be more."""
KNOWN_MAX = 1024
PATIENCE_NS = NS_PER_S
"""A request that has waited for a slot for so long holds back those behind it, or adapters in steady use
would keep all slots for ever."""

_log = logging.getLogger(__name__)


class Reads(Protocol):
    """What reads an adapter's files: `files.AdapterReader`."""

    def read(self, directory: Path, digest: str = "") -> "tuple[str, Packed]":
        """The digest, and the adapter, ready."""
        ...


class Fetches(Protocol):
    """What brings an adapter's files here: `fetch.AdapterFetcher`."""

    def fetch(self, path: str, *, again: bool = False) -> Path:
        """The directory that they are in now. `again`: what was brought before will do."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """An adapter that this worker was told of."""

    name: str
    path: str
    digest: str = ""
    """Empty until it was read for the first time, unless it was demanded."""
    packed: "Packed | None" = None
    error: str = ""
    was_read: bool = False
    is_reading: bool = False
    in_use: int = 0
    """Requests that the scheduler has."""
    is_gone: bool = False
    """It was unloaded: those that have it go on."""

    def is_what(self, message: LoadAdapter) -> bool:
        """Whether this is the adapter that is asked for."""
        is_same = not message.digest or not self.digest or message.digest == self.digest
        return is_same and self.path == message.path and not self.error


@dataclass(slots=True, frozen=True)
class AdapterRead:
    """Mail from the thread that reads."""

    entry: Entry
    digest: str = ""
    packed: "Packed | None" = None
    error: str = ""


@dataclass(slots=True, frozen=True)
class Waiting:
    """A request whose adapter is not there, or has no slot."""

    owner: int
    message: Submit
    arrived_ns: int
    grammar: object
    entry: Entry


@dataclass(slots=True, frozen=True)
class Released:
    """Requests that may go on, and those that end."""

    ready: list[Waiting] = field(default_factory=list[Waiting])
    failed: list[tuple[Waiting, str]] = field(default_factory=list[tuple[Waiting, str]])


class AdapterManager:
    """Call it on the step thread; `post` is called on the thread that reads."""

    def __init__(
        self,
        reader: Reads,
        fetcher: Fetches,
        clock: Clock,
        *,
        slots: int,
        post: Callable[[AdapterRead], None],
        pool_bytes_max: int = POOL_BYTES_MAX,
    ) -> None:
        self._clock, self._slots, self._pool_bytes_max = clock, slots, pool_bytes_max
        self._known: dict[str, Entry] = {}
        self._used: set[Entry] = set()
        self._in_memory: OrderedDict[Entry, int] = OrderedDict()  # Bytes; the least recently used first.
        self._waiting: deque[Waiting] = deque()  # Bounded by the server's `requests_max`.
        self._jobs: SimpleQueue[Entry | None] = SimpleQueue()  # Of each known entry at most one.
        self._thread = Thread(
            target=_read_all, args=(self._jobs, reader, fetcher, post), name="worker-adapters", daemon=True
        )
        self._thread.start()
        self.changed = False
        """Whether `states` says something new."""

    def close(self) -> None:
        """Read nothing more; what is being read is for nobody."""
        self._jobs.put(None)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an adapter."""
        return len(self._waiting)

    def states(self) -> tuple[AdapterState, ...]:
        """Every adapter that this worker was told of."""
        self.changed = False
        return tuple(
            AdapterState(each.name, each.path, each.digest, each.packed is not None, each.error)
            for each in self._known.values()
            if each.error or each.was_read
        )

    def load(self, message: LoadAdapter) -> None:
        """Read an adapter, unless it is known already."""
        known = self._known.get(message.name)
        if known is not None and known.is_what(message):
            self.changed = True  # Whoever asks again wants to hear.
            return
        if known is not None:
            self._forget(known)
        entry = Entry(message.name, message.path, message.digest)
        if len(self._known) >= KNOWN_MAX:
            entry.error = f"this worker knows {KNOWN_MAX} adapters already"
            _log.warning("adapter %s: %s", entry.name, entry.error)
            self.changed = True
            return
        self._known[entry.name] = entry
        self._read(entry)

    def unload(self, message: UnloadAdapter) -> Released:
        """Forget an adapter; requests that have it go on."""
        if (entry := self._known.get(message.name)) is not None:
            self._forget(entry)
        return self.release()

    def submit(self, owner: int, message: Submit, arrived_ns: int, grammar: object) -> Released:
        """A request that names an adapter. It goes on at once, or waits.

        Raises:
            WorkerUnavailable: there is no such adapter here, or it is another one than the gateway means.
        """
        entry = self._known.get(message.adapter)
        if entry is None or entry.error:
            why = "" if entry is None else f": {entry.error}"
            raise WorkerUnavailable(f"the worker does not serve the adapter '{message.adapter[:64]}'{why}")
        if message.adapter_digest and entry.digest and message.adapter_digest != entry.digest:
            raise WorkerUnavailable(f"the worker's adapter '{message.adapter[:64]}' is another one")
        self._waiting.append(Waiting(owner, message, arrived_ns, grammar, entry))
        if entry.packed is None:
            self._read(entry)
        return self.release()

    def abort(self, owner: int, request_id: RequestId) -> bool:
        """A request is gone; False: it does not wait here."""
        for waiting in self._waiting:
            if waiting.owner == owner and waiting.message.request_id == request_id:
                self._waiting.remove(waiting)
                return True
        return False

    def finished(self, entry: Entry) -> Released:
        """A request that had the adapter has ended."""
        entry.in_use -= 1
        assert entry.in_use >= 0, entry.name
        if not entry.in_use:
            self._used.discard(entry)
            if entry.is_gone:
                self._drop(entry)
            self._evict()
        return self.release() if self._waiting else Released()

    def take(self, news: AdapterRead) -> Released:
        """The thread has read an adapter, or could not."""
        entry = news.entry
        entry.is_reading = False
        self.changed = True
        if news.error:
            entry.error = news.error
            _log.warning("adapter %s cannot be loaded: %s", entry.name, news.error)
        elif not entry.is_gone or any(each.entry is entry for each in self._waiting):
            entry.digest, entry.packed, entry.was_read = news.digest, news.packed, True
            assert news.packed is not None
            self._in_memory[entry] = news.packed.num_bytes
            _log.info(
                "adapter %s is loaded: %d bytes, digest %s", entry.name, news.packed.num_bytes, news.digest
            )
            self._evict()
        return self.release()

    def release(self) -> Released:
        """Let those go on whose adapter is there and has a slot, in the order of their arrival."""
        found, left, closed = Released(), deque[Waiting](), False
        for each in self._waiting:
            entry = each.entry
            if entry.error or (entry.is_gone and entry.packed is None):
                found.failed.append((each, entry.error or "it was unloaded"))
            elif entry.packed is None:
                left.append(each)
            elif not closed and (entry.in_use or len(self._used) < self._slots):
                entry.in_use += 1
                self._used.add(entry)
                self._in_memory.move_to_end(entry)
                found.ready.append(each)
            else:
                closed |= self._clock.now_ns() - each.arrived_ns > PATIENCE_NS
                left.append(each)
        self._waiting = left
        return found

    def check_invariants(self) -> None:
        """What always holds."""
        assert {entry for entry in self._in_memory if entry.in_use} == self._used
        assert len(self._used) <= self._slots
        assert all(entry.packed is not None for entry in self._in_memory)

    def _read(self, entry: Entry) -> None:
        if not entry.is_reading:
            entry.is_reading = True
            self._jobs.put(entry)

    def _forget(self, entry: Entry) -> None:
        del self._known[entry.name]
        entry.is_gone = self.changed = True
        if not entry.in_use:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        entry.packed = None
        self._in_memory.pop(entry, None)
        self.changed = True

    def _evict(self) -> None:
        """Drop what was not used for longest while there is too much."""
        total = sum(self._in_memory.values())
        wanted = {each.entry for each in self._waiting}
        for entry, num_bytes in list(self._in_memory.items()):
            if total <= self._pool_bytes_max:
                return
            if not entry.in_use and entry not in wanted:
                self._drop(entry)
                total -= num_bytes


def _read_all(
    jobs: "SimpleQueue[Entry | None]", reader: Reads, fetcher: Fetches, post: Callable[[AdapterRead], None]
) -> None:
    """The thread's life: one adapter after the other."""
    while (entry := jobs.get()) is not None:
        try:
            digest, packed = reader.read(fetcher.fetch(entry.path, again=entry.was_read), entry.digest)
            post(AdapterRead(entry, digest, packed))
        except PenstockError as error:
            post(AdapterRead(entry, error=str(error)))
        except MemoryError:
            post(AdapterRead(entry, error="there is no memory for it"))
        except Exception as error:  # noqa: BLE001 - one file must not end the worker.
            _log.exception("adapter %s", entry.name)
            post(AdapterRead(entry, error=f"reading it failed: {type(error).__name__}"))
