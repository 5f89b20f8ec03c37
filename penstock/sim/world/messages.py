"""Messages between gateways and workers of a simulation, and the channel on which a worker tells what its KV
cache holds: some of it is lost on the way and comes again.

`WorldSpec.kv_kept` says which channel:

0   Between a gateway and our own workers: one connection, in order (backends/engine/backend.py,
    engine/kv_event_publisher.py). A gap ends with a message of all that can be hit, sent when the connection
    is there again.
n   Between a gateway and a publisher over lossy messages (fleet/kv_watch.py,
    engine/kv_event_publisher.py). The next batch shows a gap. The gateway asks for the missing batches and
    receives them, or, if they are no longer among the last n, forgets everything from before.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.events import AllBlocksCleared, KVEvent, Numbered, encode_batch, stored_event
from penstock.sim.traffic.request import Segment
from penstock.types import RequestId, Usage


class Submission(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request as it is sent to a worker: what `protocol.worker.Submit` carries, with contents in place of
    tokens.
    """

    id: RequestId
    gateway: int
    attempt: int
    prompt: tuple[Segment, ...]
    answer: int
    """The content of the answer."""
    output_tokens: int
    """When the model stops by itself."""
    max_tokens: int
    num_resumed: int = 0
    """The first so many tokens of the answer were given by workers that are lost: it goes on behind them."""
    salt: bytes = b""
    adapter: str = ""
    public_tokens: int = 0
    priority: int = 0
    fairness_key: str = ""
    fairness_weight: float = 1.0
    takes_row: bool = False
    poison: bool = False


class Began(msgspec.Struct, frozen=True, gc=False):
    """The answer's first token came."""

    id: RequestId
    attempt: int
    cached_tokens: int
    prefill_ns: int


class Sliced(msgspec.Struct, frozen=True, gc=False):
    """Another slice of the answer is full."""

    id: RequestId
    attempt: int
    num_tokens: int
    """All that there are by now."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The last word."""

    id: RequestId
    attempt: int
    reason: str
    usage: Usage
    error: str = ""


class Failed(msgspec.Struct, frozen=True):
    """The request was refused, or its worker is gone."""

    id: RequestId
    attempt: int
    error: PenstockError


WorkerMessage = Began | Sliced | Finished | Failed


class WorkerLoadReport(msgspec.Struct, frozen=True, gc=False):
    """What a worker says of itself: see `WorkerView`."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    rows_max: int
    timed: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """As `protocol.worker.Stats.timed`."""
    adapters: frozenset[str] | None = None
    """Those in memory; None: it does not tell."""


KVUpdate = tuple[KVEvent, ...] | Numbered
"""Events of a connection that keeps them in order, or one numbered batch of a publisher's."""


class KVEventChannel:
    """Of one worker."""

    __slots__ = ("_history", "_next", "_pool", "is_lost")

    def __init__(self, pool: BlockPool, *, kept: int) -> None:
        """`kept`: see the module."""
        self._pool = pool
        self._history: deque[Numbered] | None = deque(maxlen=kept) if kept else None
        self._next = 0
        self.is_lost = False
        """Nothing of it arrives."""

    def said(self, events: tuple[KVEvent, ...]) -> KVUpdate | None:
        """How it goes out; None if it is lost."""
        if self._history is None:
            return None if self.is_lost else events
        batch = Numbered(self._next, encode_batch(events, wall_ns=0))
        self._history.append(batch)
        self._next += 1
        return None if self.is_lost else batch

    def anew(self) -> KVUpdate | None:
        """What a gateway hears first on a new connection; None of a publisher, which says nothing by
        itself.
        """
        if self._history is not None:
            return None
        names = self._pool.names()
        return (AllBlocksCleared(), stored_event(names)) if names else (AllBlocksCleared(),)

    def again(self, first: int) -> Sequence[Numbered]:
        """Every batch from this number on that is still kept."""
        return [batch for batch in self._history or () if batch.sequence >= first]
