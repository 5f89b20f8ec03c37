"""The adapters of one worker: which it knows, which are in memory, and which requests wait for one.

    load ──> reading ──> known ──────────────> in memory ──> in use: pinned, and has a slot
                │          ^ evicted: who is not kept, then the least wanted │
                └─> failed └──────────────────────────────────────────────────┘

An adapter is named by requests and told apart by its digest: what was evicted must come back with the same
one. Adapters are read one at a time: first those that requests wait for, then those that were never read,
then those that are to be kept in memory and are not; such a read is given up when a request comes that waits
for another. Pure: the reader calls `take`: the engine's thread or the simulator's clock.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from penstock.clock import NS_PER_S, Clock
from penstock.errors import WorkerUnavailable

R = TypeVar("R")

KNOWN_MAX = 1024
PATIENCE_NS = NS_PER_S
"""A request that has waited for a slot for so long holds back those behind it, or adapters in steady use
would keep all slots for ever."""
_LEARNED = 0.2
"""Weight of the last read in the mean time of a read."""


class InMemory(Protocol):
    """An adapter as its worker computes with it."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...


@dataclass(slots=True, eq=False)
class PooledAdapter:
    """An adapter that this worker was told of."""

    name: str
    path: str
    digest: str = ""
    """Empty until it was read for the first time, unless it was demanded."""
    packed: InMemory | None = None
    num_bytes: int = 0
    """When it was read last; 0: never."""
    error: str = ""
    in_use: int = 0
    """Requests that the scheduler has."""
    is_gone: bool = False
    """It was unloaded: those that have it continue."""

    @property
    def was_read(self) -> bool:
        """Whether it ever could be read."""
        return self.num_bytes > 0

    def is_what(self, path: str, digest: str) -> bool:
        """Whether this is the adapter that is asked for."""
        is_same = not digest or not self.digest or digest == self.digest
        return is_same and self.path == path and not self.error


@dataclass(slots=True, frozen=True)
class Waiting(Generic[R]):
    """A request whose adapter is not there, or has no slot."""

    key: Hashable
    request: R
    arrived_ns: int
    entry: PooledAdapter


@dataclass(slots=True, frozen=True)
class Released(Generic[R]):
    """Requests that may start, and those that end."""

    ready: Sequence[Waiting[R]] = ()
    failed: Sequence[tuple[Waiting[R], str]] = ()
    """With why."""


class AdapterPool(Generic[R]):
    """See the module. `R` is a request as its owner knows it."""

    def __init__(
        self,
        clock: Clock,
        *,
        slots: int,
        bytes_max: int,
        read: Callable[[PooledAdapter], None],
        give_up: Callable[[PooledAdapter], None],
    ) -> None:
        """At most `slots` adapters are in use at once, and `bytes_max` in memory, beside one that is read for
        the first time. `read` begins to read an adapter; one at a time. `give_up` asks that the end of that
        come early: `given_up` is called, or `take`, if it is too late.
        """
        assert slots > 0, "a worker without places has no pool"
        self._clock, self._slots, self._bytes_max = clock, slots, bytes_max
        self._begin, self._give_up = read, give_up
        self._known: dict[str, PooledAdapter] = {}
        self._used: set[PooledAdapter] = set()
        self._in_memory: OrderedDict[PooledAdapter, None] = OrderedDict()  # The least recently used first.
        self._num_bytes = 0
        self._waiting: deque[Waiting[R]] = deque()  # Bounded by the worker's `requests_max`.
        self._wanted: dict[PooledAdapter, None] = {}
        """To be read for requests that are here, or will be."""
        self._unread: dict[PooledAdapter, None] = {}
        """To be read for the first time, so that it is known whether they can be."""
        self.reading: PooledAdapter | None = None
        """The one that is being read."""
        self._is_first = False
        self._is_urgent = False
        self._is_spare = False
        """Nobody waits for what is being read, which was read before."""
        self._coming_bytes = 0
        """Of what is read because requests wait for it."""
        self._began_ns = 0
        self._kept: dict[str, int] = {}
        """The adapters to be kept in memory -> their place in the order of demand."""
        self.read_ns = 0
        """The time to read one; 0: not known."""
        self.changed = False
        """Whether `entries` says something new."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an adapter."""
        return len(self._waiting)

    @property
    def is_awaited(self) -> bool:
        """Whether requests, here or on their way, wait for the end of what is being read, or for what is read
        after it.
        """
        return self.reading is not None and (self._is_urgent or bool(self._wanted))

    @property
    def room(self) -> int:
        """How many adapters, as large as those that are known, can be in memory at once; 0: not known."""
        sizes = [entry.num_bytes for entry in self._known.values() if entry.was_read]
        return min(KNOWN_MAX, max(1, self._bytes_max * len(sizes) // sum(sizes))) if sizes else 0

    def entries(self) -> Iterator[PooledAdapter]:
        """Every adapter that was read, or that could not be."""
        return (each for each in self._known.values() if each.error or each.was_read)

    def load(self, name: str, path: str, digest: str = "", *, is_wanted: bool = False) -> PooledAdapter:
        """Know an adapter, and read it, unless it is known already. `is_wanted`: a request for it will come,
        so it is read again if it is not in memory.
        """
        known = self._known.get(name)
        if known is not None and known.is_what(path, digest):
            self.changed = True  # A caller that asks again wants an answer.
            if is_wanted and known.packed is None:
                self._want(known)
            return known
        if known is not None:
            self._forget(known)
        entry = PooledAdapter(name, path, digest)
        if len(self._known) >= KNOWN_MAX:
            entry.error = f"this worker knows {KNOWN_MAX} adapters already"
            self.changed = True
            return entry
        self._known[name] = entry
        self._unread[entry] = None
        if is_wanted:
            self._want(entry)
        self._read_next()
        return entry

    def unload(self, name: str) -> Released[R]:
        """Forget an adapter; requests that have it continue."""
        if (entry := self._known.get(name)) is not None:
            self._forget(entry)
        return self.release()

    def keep(self, names: Sequence[str]) -> None:
        """Keep these in memory rather than others, the first one longest. Those that are not there are read
        when there is nothing more urgent, as far as there is room beside what is in use.
        """
        self._kept = {name: place for place, name in enumerate(names[:KNOWN_MAX])}
        self._read_next()

    def submit(self, key: Hashable, request: R, name: str, digest: str, arrived_ns: int) -> Released[R]:
        """A request that names an adapter. It is submitted at once, or waits.

        Raises:
            WorkerUnavailable: there is no such adapter here, or it is another one than the gateway means.
        """
        entry = self._known.get(name)
        if entry is None or entry.error:
            raise WorkerUnavailable(f"the worker does not serve the adapter '{name[:64]}'")
        if digest and entry.digest and digest != entry.digest:
            raise WorkerUnavailable(f"the worker's adapter '{name[:64]}' is another one")
        self._waiting.append(Waiting(key, request, arrived_ns, entry))
        if entry.packed is None:
            self._want(entry)
        return self.release()

    def abort(self, key: Hashable) -> bool:
        """A request is gone; False: it does not wait here."""
        for waiting in self._waiting:
            if waiting.key == key:
                self._waiting.remove(waiting)
                return True
        return False

    def finished(self, entry: PooledAdapter) -> Released[R]:
        """A request that had the adapter has ended."""
        entry.in_use -= 1
        assert entry.in_use >= 0, entry.name
        if not entry.in_use:
            self._used.discard(entry)
            if entry.is_gone:
                self._drop(entry)
            self._evict()
            self._read_next()  # An adapter that is to be kept may have room now.
        return self.release()

    def take(
        self, entry: PooledAdapter, packed: InMemory | None, digest: str = "", error: str = ""
    ) -> Released[R]:
        """An adapter was read, or could not be."""
        assert entry is self.reading, f"{entry.name} is not the one that is read"
        assert not (packed is not None and error), f"{entry.name} was read, or could not be"
        self.reading, self._coming_bytes = None, 0
        took_ns = self._clock.now_ns() - self._began_ns
        self.read_ns += int((took_ns - self.read_ns) * (_LEARNED if self.read_ns else 1.0))
        self.changed = True
        if error:
            entry.error = error
        elif not entry.is_gone or any(each.entry is entry for each in self._waiting):
            assert packed is not None, "what has no error was read"
            self._bring(entry, digest, packed)
        self._read_next()
        return self.release()

    def given_up(self, entry: PooledAdapter) -> None:
        """The reading has ended without a result, as `give_up` has asked."""
        assert entry is self.reading, f"{entry.name} is not the one that is read"
        self.reading, self._coming_bytes = None, 0
        if self._is_urgent:  # It came to be wanted meanwhile.
            self._wanted[entry] = None
        self._read_next()

    def _bring(self, entry: PooledAdapter, digest: str, packed: InMemory) -> None:
        """It is in memory, if there can be room for it."""
        if packed.num_bytes > self._bytes_max:
            entry.error = f"it takes {packed.num_bytes} bytes, and all adapters have {self._bytes_max}"
            return
        entry.digest, entry.packed, entry.num_bytes = digest, packed, max(1, packed.num_bytes)
        self._in_memory[entry] = None
        if self._is_first:  # Read to see whether it can be: others were asked for.
            self._in_memory.move_to_end(entry, last=False)
        self._num_bytes += entry.num_bytes
        self._evict(entry)

    def release(self) -> Released[R]:
        """Submit those whose adapter is there and has a slot, in the order of their arrival."""
        if not self._waiting:
            return Released()
        ready, failed = list[Waiting[R]](), list[tuple[Waiting[R], str]]()
        left, closed = deque[Waiting[R]](), False
        for each in self._waiting:
            entry = each.entry
            if entry.error or (entry.is_gone and entry.packed is None):
                failed.append((each, entry.error or "it was unloaded"))
            elif entry.packed is None:
                closed |= self._lacks_room(entry) and self._is_patient(each)
                left.append(each)
            elif not closed and (entry.in_use or self._may_use(entry)):
                entry.in_use += 1
                self._used.add(entry)
                self._in_memory.move_to_end(entry)
                ready.append(each)
            else:
                closed |= self._is_patient(each)
                left.append(each)
        self._waiting = left
        return Released(ready, failed)

    def check_invariants(self) -> None:
        """The invariants."""
        assert {entry for entry in self._in_memory if entry.in_use} == self._used
        assert len(self._used) <= self._slots
        assert all(entry.packed is not None for entry in self._in_memory)
        assert self._num_bytes == sum(entry.num_bytes for entry in self._in_memory)
        assert self.reading is not None or not self._unread
        assert self.reading is not None or all(self._lacks_room(entry) for entry in self._wanted)

    def _is_patient(self, waiting: Waiting[R]) -> bool:
        return self._clock.now_ns() - waiting.arrived_ns > PATIENCE_NS

    def _lacks_room(self, entry: PooledAdapter) -> bool:
        """Whether those in use must end before it can be in memory."""
        firm = self._used.union(self._awaited_before(entry))
        return entry.was_read and sum(each.num_bytes for each in firm) + entry.num_bytes > self._bytes_max

    def _awaited_before(self, entry: PooledAdapter | None) -> list[PooledAdapter]:
        """The adapters in memory for requests that came before those for this one."""
        awaited = takewhile(lambda each: each is not entry, (each.entry for each in self._waiting))
        return [each for each in awaited if each.packed is not None]

    def _may_use(self, entry: PooledAdapter) -> bool:
        """Whether one that is in memory and idle may be pinned, with what is read for others on its way."""
        has_slot = len(self._used) < self._slots
        pinned = sum(each.num_bytes for each in self._used)
        return has_slot and pinned + entry.num_bytes + self._coming_bytes <= self._bytes_max

    def _want(self, entry: PooledAdapter) -> None:
        if entry is self.reading:
            self._is_urgent = True
            return
        self._wanted[entry] = None
        self._read_next()
        if self._is_spare and not self._is_urgent and self.reading is not None:
            self._is_spare = False
            self._give_up(self.reading)

    def _read_next(self) -> None:
        """Begin to read what is most urgent, unless something is being read."""
        if self.reading is not None:
            return
        awaited = (each.entry for each in self._waiting if each.entry in self._wanted)
        urgent = next((each for each in (*awaited, *self._wanted) if not self._lacks_room(each)), None)
        entry = urgent or next(iter(self._unread), None) or self._next_kept()
        if entry is None:
            return
        assert entry.packed is None, f"{entry.name} is in memory"
        self.reading, self._is_urgent = entry, urgent is not None
        self._is_first = urgent is None and entry in self._unread
        self._is_spare = urgent is None and not self._is_first
        self._began_ns = self._clock.now_ns()
        self._coming_bytes = entry.num_bytes if urgent is not None else 0
        self._wanted.pop(entry, None)
        self._unread.pop(entry, None)
        self._begin(entry)

    def _next_kept(self) -> PooledAdapter | None:
        """The next adapter that is to be kept, is not in memory, and has room beside those that are in use or
        kept already.
        """
        if not self._kept:
            return None
        firm = sum(each.num_bytes for each in self._in_memory if each.in_use or each.name in self._kept)
        for name in self._kept:
            entry = self._known.get(name)
            if entry is not None and entry.packed is None and entry.was_read and not entry.error:
                return entry if firm + entry.num_bytes <= self._bytes_max else None
        return None

    def _forget(self, entry: PooledAdapter) -> None:
        del self._known[entry.name]
        entry.is_gone = self.changed = True
        if not any(each.entry is entry for each in self._waiting):
            self._wanted.pop(entry, None)
            self._unread.pop(entry, None)
        if not entry.in_use:
            self._drop(entry)

    def _drop(self, entry: PooledAdapter) -> None:
        if entry.packed is not None:
            entry.packed = None
            del self._in_memory[entry]
            self._num_bytes -= entry.num_bytes
        self.changed = True

    def _evict(self, came: PooledAdapter | None = None) -> None:
        """While there is too much, drop what is not to be kept, the least recently used first; then what is
        least wanted of the rest; then what is awaited by those behind the ones for which another `came`.
        """
        if self._num_bytes <= self._bytes_max:
            return
        firm, awaited = self._awaited_before(came), {each.entry for each in self._waiting}
        idle = [entry for entry in self._in_memory if not entry.in_use and entry not in firm]
        # Stable: equals by last use.
        idle.sort(key=lambda entry: (entry in awaited, -self._kept.get(entry.name, KNOWN_MAX)))
        for entry in idle:
            if self._num_bytes <= self._bytes_max:
                return
            if entry is came and not self._is_first:
                continue
            self._drop(entry)
            if entry in awaited:
                self._wanted[entry] = None
