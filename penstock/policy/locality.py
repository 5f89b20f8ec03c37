"""Where parts of prompts are cached, as a placement asks for it; and where sessions and adapters were last."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

from penstock.clock import NS_PER_S
from penstock.kv.prefix_index import NOTHING_HELD, Held, Match, PrefixIndex
from penstock.kv.prompt_keys import PromptKeys
from penstock.types import WorkerId


class Located(Protocol):
    """Which workers have how much of one prompt."""

    def of(self, worker: WorkerId) -> Held:
        """What this worker has, in blocks."""
        ...

    def holders(self) -> Iterator[tuple[WorkerId, Held]]:
        """Every worker that has something, longest prefix first."""
        ...


class Locality(Protocol):
    """Who has what. `keys` is what `Arrival.keys` holds: `kv.prompt_keys.PromptKeys`."""

    def match(self, now_ns: int, keys: object) -> Located:
        """Look a prompt up."""
        ...

    def sent(self, now_ns: int, worker: WorkerId, keys: object) -> None:
        """The prompt was sent there, so the worker will soon have it."""
        ...

    def answered(self, now_ns: int, worker: WorkerId, keys: object, cached_tokens: int) -> None:
        """The prompt was computed there, and so many of its tokens were cached."""
        ...


class _NothingLocated:
    """Nobody has anything."""

    __slots__ = ()

    def of(self, worker: WorkerId) -> Held:
        del worker
        return NOTHING_HELD

    def holders(self) -> Iterator[tuple[WorkerId, Held]]:
        return iter(())


NOTHING_LOCATED: Located = _NothingLocated()


class NoLocality:
    """Knows of no caches: placement goes by load, sessions and adapters."""

    __slots__ = ()

    def match(self, now_ns: int, keys: object) -> Located:
        """Nothing."""
        del now_ns, keys
        return NOTHING_LOCATED

    def sent(self, now_ns: int, worker: WorkerId, keys: object) -> None:
        """Not remembered."""

    def answered(self, now_ns: int, worker: WorkerId, keys: object, cached_tokens: int) -> None:
        """Not remembered."""


class LastWorkers:
    """By name (of a session, of an adapter) the worker that had it last, for a while. Bounded: the oldest are forgotten."""

    __slots__ = ("_last", "_most", "_ttl_ns")

    def __init__(self, *, ttl_s: float, most: int) -> None:
        self._last: OrderedDict[str, tuple[WorkerId, int]] = OrderedDict()
        self._ttl_ns, self._most = int(ttl_s * NS_PER_S), most

    def of(self, now_ns: int, name: str) -> WorkerId | None:
        """None: nobody, or too long ago."""
        found = self._last.get(name)
        return found[0] if found is not None and found[1] > now_ns else None

    def put(self, now_ns: int, name: str, worker: WorkerId) -> None:
        """This worker has it now."""
        self._last.pop(name, None)
        if len(self._last) >= self._most:
            self._last.popitem(last=False)
        self._last[name] = (worker, now_ns + self._ttl_ns)

    def __len__(self) -> int:
        return len(self._last)


class _Named:
    """What an index found, with the workers' names in place of their numbers."""

    __slots__ = ("_match", "_names", "_numbers")

    def __init__(self, match: Match, numbers: Mapping[WorkerId, int], names: Mapping[int, WorkerId]) -> None:
        self._match, self._numbers, self._names = match, numbers, names

    def of(self, worker: WorkerId) -> Held:
        number = self._numbers.get(worker)
        return NOTHING_HELD if number is None else self._match.of(number)

    def holders(self) -> Iterator[tuple[WorkerId, Held]]:
        for number, held in self._match.holders():
            if (worker := self._names.get(number)) is not None:
                yield worker, held


class IndexedLocality:
    """A prefix index as a placement asks it: workers by name, and prompts by the keys that each worker's blocks go by.

    What is sent somewhere is predicted to be there for a while: until the worker's events say so, or say otherwise, or, of a
    worker that sends none, for `predicted_s`.
    """

    __slots__ = ("_canonical", "_index", "_names", "_num_own", "_numbers", "_predicted_ns", "_silent")

    def __init__(self, index: PrefixIndex, *, predicted_s: float) -> None:
        self._index, self._predicted_ns = index, int(predicted_s * NS_PER_S)
        self._numbers: dict[WorkerId, int] = {}
        self._names: dict[int, WorkerId] = {}
        self._canonical: set[WorkerId] = set()
        self._silent: set[WorkerId] = set()
        self._num_own = 0

    def enter(self, worker: WorkerId, *, canonical: bool = False, has_events: bool = True) -> int:
        """A worker has come: its number in the index. `canonical`: its blocks go by the router's own names.

        Without events what is predicted is all that is known of it.
        """
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = next(i for i in count() if i not in self._names)
            self._names[number] = worker
            if not has_events:
                self._silent.add(worker)
            if canonical:
                self._canonical.add(worker)
            else:
                self._num_own += 1
        return number

    def leave(self, worker: WorkerId) -> None:
        """A worker has gone, and all that it had."""
        number = self._numbers.pop(worker, None)
        if number is None:
            return
        del self._names[number]
        self._index.cleared(number)
        self._silent.discard(worker)
        if worker in self._canonical:
            self._canonical.discard(worker)
        else:
            self._num_own -= 1

    def match(self, now_ns: int, keys: object) -> Located:
        """See `Locality`."""
        assert isinstance(keys, PromptKeys)
        names: list[Sequence[int]] = []
        if self._num_own:
            names.append(keys.own)
        if self._canonical:
            names.append(keys.canonical)
        return _Named(self._index.match(now_ns, *names), self._numbers, self._names)

    def sent(self, now_ns: int, worker: WorkerId, keys: object) -> None:
        """See `Locality`."""
        assert isinstance(keys, PromptKeys)
        number = self._numbers.get(worker)
        if number is not None:
            mine = keys.canonical if worker in self._canonical else keys.own
            self._index.predict(number, mine, now_ns + self._predicted_ns)

    def answered(self, now_ns: int, worker: WorkerId, keys: object, cached_tokens: int) -> None:
        """See `Locality`: what was predicted beyond that did not come."""
        assert isinstance(keys, PromptKeys)
        number = self._numbers.get(worker)
        if number is not None and worker in self._silent:
            mine = keys.canonical if worker in self._canonical else keys.own
            self._index.predict(number, mine, now_ns + self._predicted_ns)
