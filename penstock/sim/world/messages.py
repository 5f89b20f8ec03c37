"""Virtual time, one heap of events, in an order that no machine, hash seed or shortcut changes; and the
messages that gateways and workers of a simulation send each other in it.

At one instant events are in the order of their actors' numbers, then of their rank, then of their entry. So
what happens at one actor does not depend on how many events another one needed to get there: a worker may
leap over steps in which nothing is sent (worker.py) without moving anything that another actor sees.

Of the messages that tell what a worker's KV cache holds some are lost on the way and come again.
`WorldSpec.kv_kept` says which channel they have:

0   Between a gateway and our own workers: one connection, in order (backends/engine/backend.py,
    engine/kv_event_publisher.py). A gap ends with a message of all that can be hit, sent when the connection
    is there again.
n   Between a gateway and a publisher over lossy messages (fleet/kv_watch.py,
    engine/kv_event_publisher.py). The next batch shows a gap. The gateway asks for the missing batches and
    receives them, or, if they are no longer among the last n, forgets everything from before.
"""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

import msgspec

from penstock.errors import PenstockError
from penstock.kv.cache.block_pool import BlockPool
from penstock.kv.events import AllBlocksCleared, KVEvent, Numbered, encode_batch, stored_event
from penstock.schedule.request import Request
from penstock.sim.traffic.prompts import EOS, Segment, content_tokens
from penstock.types import RequestId, Usage

_What = TypeVar("_What")


class Rank(enum.IntEnum):
    """The order of several events of one actor at one instant."""

    FAULT = 0
    STEP = 1
    """A step of an engine ends: blocks that it frees are there for arrivals at the same time."""
    MESSAGE = 2
    TIMER = 3


_RANKS = 4


class Timeline:
    """The one heap of a simulation, and its clock. Fulfils `penstock.clock.Clock`."""

    __slots__ = ("_entered", "_heap", "_now_ns", "_wall_offset_ns", "num_events")

    def __init__(self, *, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        """`wall_ns` is the date at virtual time 0."""
        self._heap: list[tuple[int, int, int, Callable[[int, Any], None], Any]] = []
        self._entered = self._now_ns = 0
        self._wall_offset_ns = wall_ns
        self.num_events = 0
        """Events that have happened."""

    def now_ns(self) -> int:
        """The time of the event that happens now."""
        return self._now_ns

    def wall_ns(self) -> int:
        """The same as a date."""
        return self._now_ns + self._wall_offset_ns

    def at(
        self, when_ns: int, actor: int, rank: Rank, handler: Callable[[int, _What], None], what: _What
    ) -> None:
        """Let `handler(when_ns, what)` be called; not before now."""
        assert when_ns >= self._now_ns, f"{when_ns} is over: it is {self._now_ns}"
        self._entered = entered = self._entered + 1
        heappush(self._heap, (when_ns, actor * _RANKS + rank, entered, handler, what))

    def run(self) -> None:
        """Let events happen until there are none."""
        heap = self._heap
        while heap:
            self._now_ns, _, _, handler, what = heappop(heap)
            self.num_events += 1
            handler(self._now_ns, what)

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._heap:
            return False
        self._now_ns, _, _, handler, what = heappop(self._heap)
        self.num_events += 1
        handler(self._now_ns, what)
        return True

    @property
    def next_ns(self) -> int | None:
        """When the next event is; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        """Events that are still to happen."""
        return len(self._heap)


class LocalClock:
    """One actor's clock: set by the actor before it calls what reads it."""

    __slots__ = ("_wall_offset_ns", "time_ns")

    def __init__(self, *, wall_offset_ns: int = 0) -> None:
        self.time_ns = 0
        """Virtual time."""
        self._wall_offset_ns = wall_offset_ns

    def now_ns(self) -> int:
        """Monotonic time."""
        return self.time_ns

    def wall_ns(self) -> int:
        """The date, as this actor sees it."""
        return self.time_ns + self._wall_offset_ns


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
    """The first so many tokens of the answer were given by workers that are lost: it continues behind
    them."""
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
    """A worker's report of itself: see `WorkerView`."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    rows_max: int
    timed: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """As `protocol.worker.Stats.timed`."""
    adapters: frozenset[str] | None = None
    """Those in memory; None: it does not tell."""


class AnswerStream:
    """One request at a worker, and how far its answer was told."""

    __slots__ = ("answer", "due", "first", "is_stuck", "num_answer", "num_prompt", "request", "submission")

    def __init__(self, submission: Submission, request: Request, *, is_stuck: bool) -> None:
        self.submission, self.request, self.is_stuck = submission, request, is_stuck
        self.num_prompt = request.num_prompt
        self.first = self.due = submission.num_resumed + 1
        """Its answer's length with the first token that is made here, and that at which the next message is
        due."""
        stops = submission.output_tokens < submission.max_tokens
        self.num_answer = min(submission.output_tokens, submission.max_tokens)
        self.answer = content_tokens(submission.answer, 0, self.num_answer)
        if stops:
            self.answer[-1] = EOS


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
        """The first message to a gateway on a new connection; None of a publisher, which says nothing by
        itself.
        """
        if self._history is not None:
            return None
        names = self._pool.names()
        return (AllBlocksCleared(), stored_event(names)) if names else (AllBlocksCleared(),)

    def again(self, first: int) -> Sequence[Numbered]:
        """Every batch from this number on that is still kept."""
        return [batch for batch in self._history or () if batch.sequence >= first]
