"""Where parts of prompts are cached, as a placement asks for it; and where sessions and adapters were
last.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from penstock.clock import NS_PER_S
from penstock.kv.index.prefix_index import NOTHING_HELD, Held
from penstock.types import WorkerId


class Located(Protocol):
    """Which workers have how much of one prompt."""

    def of(self, worker: WorkerId) -> Held:
        """What this worker has, in blocks."""
        ...

    def holders(self, limit: int) -> Sequence[tuple[WorkerId, Held]]:
        """Up to `most` workers that have something, longest prefix first."""
        ...


class Locality(Protocol):
    """Who has what: `kv.locality.KVLocality`.

    `keys` is what `Arrival.keys` holds: `kv.prompt_keys.PromptKeys`.
    """

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

    def holders(self, limit: int) -> Sequence[tuple[WorkerId, Held]]:
        del limit
        return ()


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
    """By name (of a session, of an adapter) the worker that had it last, for a while.

    Bounded: the oldest are forgotten.
    """

    __slots__ = ("_last", "_limit", "_ttl_ns")

    def __init__(self, *, ttl_s: float, limit: int) -> None:
        self._last: OrderedDict[str, tuple[WorkerId, int]] = OrderedDict()
        self._ttl_ns, self._limit = int(ttl_s * NS_PER_S), limit

    def of(self, now_ns: int, name: str) -> WorkerId | None:
        """None: nobody, or too long ago."""
        found = self._last.get(name)
        return found[0] if found is not None and found[1] > now_ns else None

    def put(self, now_ns: int, name: str, worker: WorkerId) -> None:
        """This worker has it now."""
        self._last.pop(name, None)
        if len(self._last) >= self._limit:
            self._last.popitem(last=False)
        self._last[name] = (worker, now_ns + self._ttl_ns)

    def __len__(self) -> int:
        return len(self._last)
