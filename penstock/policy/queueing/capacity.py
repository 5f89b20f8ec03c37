"""Capacity of the workers of one model: who could start something now.

A request that this gateway started and has not seen the end of is counted here at once; what a worker reports
puts right what cannot be known otherwise: streams of other gateways, and KV blocks that are really free.
Blocks of a request that has shown no output are counted here: it may not be in the last report.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from penstock.config.flow import QueueConfig
from penstock.policy.queueing.band import Work
from penstock.policy.terms import CellView, DeploymentTerms, queue_terms, slots_of
from penstock.types import RequestId, Usage, WorkerId

_LOOKS_MAX = 8
"""Workers that are asked whether a request fits, least loaded first."""
_LOAD_UNIT = 1 << 20
_SLOTS_PER_WAITING = 8
"""Of those of an engine of ours that other gateways use too: for one in so many a gateway may always have a
request there that has shown no output.
"""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last report of itself."""

    ready: bool = True
    max_running: int = 0
    """Streams in one batch; 0: it does not tell, and is given `QueueTerms.external_concurrency`."""
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    """0: it does not tell, and only streams are counted."""
    kv_blocks_used: int = 0
    """By requests that run; blocks that are only cached are free."""
    kind: str = ""
    """The kind of hardware: workers of one kind are equally fast."""
    max_model_len: int = 0
    """Tokens of a prompt and its answer; 0: it does not tell."""
    adapters: frozenset[str] | None = None  # Those that are loaded now; None: it does not tell.
    adapters_max: int = 0
    """Adapters that it can hold, and so load; 0: only those that it has."""
    adapter_load_ns: int = 0  # The time that one takes; 0: it does not tell.
    resumes: bool = True  # It can continue what another worker began.
    identity: str = ""  # Of its computation (kv/hashing.py); empty: it does not tell.
    terms: DeploymentTerms | None = None
    """None: all workers of the model are alike, or this one is as they are."""
    is_external: bool = False  # It does not run our engine.
    adapters_served: frozenset[str] | None = None
    """Adapters that it takes requests for, loaded or not; None: those that it has or can load."""
    capabilities: frozenset[str] = frozenset()  # Those beyond plain text.
    wake_ns: int = 0  # It is asleep, or wakes, which takes so long; 0: it is not.
    cell: CellView | None = None  # It is a peer cell; None: a worker of this one.


class WorkerCapacity:
    """One worker's."""

    __slots__ = (
        "alone", "begun", "booked", "busy", "gone", "held", "id", "limit", "num_pending", "number",
        "others", "pending_blocks", "pending_tokens", "rank", "slots", "spare", "turn", "view",
    )  # fmt: skip

    def __init__(self, worker_id: WorkerId, number: int) -> None:
        self.id, self.number = worker_id, number
        self.view = WorkerView(ready=False)
        self.slots = self.limit = self.spare = 0  # See `Slots`.
        self.booked = 0
        """Streams given by us and not ended."""
        self.others = 0
        """Streams that it runs for others, as of its last report."""
        self.num_pending = self.pending_blocks = 0
        """Requests that were started and have shown no output, and their blocks."""
        self.pending_tokens = 0
        """Prompt tokens to compute of what was started and has shown no output."""
        self.begun: dict[RequestId, bool] = {}
        """Requests here -> whether output was seen."""
        self.gone = False  # No reports come for it any more.
        self.held = False  # Kept free for a large request.
        self.busy = False  # It has prompts enough for now.
        self.alone = False  # Its model has no other worker: there is nothing to choose.
        self.rank: _Rank | None = None
        """Where it stands among those that could start a stream, within or beyond its slots; None: it could
        not, or is kept free."""
        self.turn = 0
        """When it was last given something, as a count of starts: of equally loaded workers the one that
        waited longest is next, so that the caches of all fill."""

    @property
    def num_free(self) -> int:
        """Streams that could be started."""
        return self._num_left if self.view.ready and not self.busy else 0

    @property
    def _num_left(self) -> int:
        """Slots that are left. Others cannot fill those that wait in the queue of an engine of ours: it gives
        its next row to the tenant that was served least, whichever gateway filled the slots first.
        """
        left = self.slots - self.booked - self.others
        if self.others and self.spare > 0:
            always = max(self.spare, self.slots // _SLOTS_PER_WAITING) - self.num_pending
            return max(left, min(always, self.limit - self.booked - self.others))
        return left

    @property
    def is_open(self) -> bool:
        """Whether some stream could be started."""
        return self.view.ready and not self.held and self.booked + self.others < self.limit

    def is_able(self, work: Work) -> bool:
        """Whether it can do what the request needs."""
        return not work.needs or work.needs <= self.view.capabilities

    def fits(self, work: Work) -> bool:
        """Whether it could be started now.

        An idle worker takes anything: what it cannot do at all it refuses itself.
        """
        view, taken = self.view, self.booked + self.others
        if not view.ready or (work.goes_on and not can_resume_at(work, view)):
            return False
        if work.needs and not self.is_able(work):
            return False
        if not taken:
            return True
        if self.busy and not work.takes_row:
            return False
        free = self.limit - taken if work.takes_row else self._num_left
        if free < work.streams and free < self.slots:
            return False
        total = view.kv_blocks_total
        return not total or work.blocks <= total - view.kv_blocks_used - self.pending_blocks


_Rank = tuple[int, int, int, WorkerCapacity]
"""Load, turn and number: who is least loaded, then waited longest; of equals the one that came first."""


class CapacityTable:
    """The workers of one model, least loaded first.

    O(log n) for all but `hold`, which is rare, and joining when there was one.
    """

    __slots__ = (
        "_adapters", "_beyond", "_config", "_fresh", "_is_busy", "_next", "_open", "_starts", "_workers",
        "get", "held", "num_ready", "num_running", "num_slots", "num_spare", "only",
    )  # fmt: skip

    def __init__(
        self, config: QueueConfig, is_busy: Callable[[WorkerCapacity], bool] = lambda _: False
    ) -> None:
        """`is_busy`: whether a worker has prompts enough for now."""
        self._config, self._is_busy = queue_terms(config), is_busy
        self._workers: dict[WorkerId, WorkerCapacity] = {}
        self.get = self._workers.get
        """A worker's room; None if it is not known."""
        # Sorted. Moving one in a list of a thousand takes less than one comparison of tuples, and the first
        # ones are a slice.
        self._open: list[_Rank] = []
        self._beyond: list[_Rank] = []  # With those that could start one only beyond their slots.
        self._next = self._starts = 0
        self._adapters: dict[str, dict[WorkerId, None]] = {}
        self._fresh: dict[WorkerId, WorkerCapacity] = {}
        self.held: WorkerCapacity | None = None
        self.only: WorkerCapacity | None = None
        """The only worker, ready or not; None if there are several, or none."""
        self.num_ready = self.num_slots = self.num_spare = 0
        self.num_running = 0
        """Streams given by us and not ended, and those of others."""

    def set(self, worker_id: WorkerId, view: WorkerView | None) -> WorkerCapacity | None:
        """Take a worker's report; None if it is gone, or will be given nothing more."""
        worker = self._workers.get(worker_id)
        if worker is None:
            if view is None:
                return None
            worker = self._workers[worker_id] = WorkerCapacity(worker_id, self._next)
            self._next += 1
            self._count_alone()
        had, worker.view, worker.gone = worker.view, view or WorkerView(ready=False), view is None
        now = worker.view
        if now.adapters != had.adapters:
            self._reside(worker.id, had.adapters or frozenset(), now.adapters or frozenset())
        self._fresh[worker.id] = worker
        if not worker.limit or (now.ready, now.max_running, now.is_external) != (
            had.ready, had.max_running, had.is_external,
        ):  # fmt: skip
            self._resize(worker, had.ready)
        others = max(0, now.running + now.waiting - worker.booked)
        self.num_running += others - worker.others
        worker.others = others
        assert self.num_running >= others, "the sum counts every worker's streams"
        if not now.ready and worker.held:
            self.unhold()
        if worker.gone and not worker.begun:
            self._drop(worker)
        else:
            self._enter(worker)
        return worker

    def _resize(self, worker: WorkerCapacity, was_ready: bool) -> None:
        """It came or went, or runs more or fewer streams at once."""
        before, view = (worker.slots, worker.spare) if was_ready else (0, 0), worker.view
        is_foreign = view.is_external or view.cell is not None  # It is given no more than runs at once.
        terms = slots_of(view.max_running, is_external=is_foreign, terms=self._config)
        worker.slots, worker.limit, worker.spare = terms
        self.num_ready += view.ready - was_ready
        self.num_slots += (worker.slots if view.ready else 0) - before[0]
        self.num_spare += (worker.spare if view.ready else 0) - before[1]

    def look_again(self, worker_id: WorkerId) -> None:
        """Whether this worker is busy may have changed."""
        if (worker := self._workers.get(worker_id)) is not None:
            self._enter(worker)

    def has_room(self) -> bool:
        """Whether any worker, but one that is held, could start a stream."""
        return bool(self._open)

    def has_room_besides(self, others: Collection[WorkerId]) -> bool:
        """Whether any worker could that is not among these."""
        return any(rank[3].id not in others for rank in self._open[: len(others) + 1])

    def has_room_beyond(self) -> bool:
        """Whether any worker, but one that is held, could start a stream beyond its slots."""
        return bool(self._beyond)

    def residents(self, adapter: str, count: int) -> list[WorkerId]:
        """Up to `count` workers that have the adapter loaded, as they told."""
        return list(islice(self._adapters.get(adapter, ()), count))

    def place(
        self, work: Work, avoid: Collection[WorkerId] = (), blocked: Collection[WorkerId] = ()
    ) -> WorkerCapacity | None:
        """The least loaded worker on which a request fits now: never one that is `blocked`, if possible none
        to `avoid`.
        """
        other: WorkerCapacity | None = None
        # Of workers that can do what few can, none may be among the first.
        found = self._open_to(work)
        looks = _LOOKS_MAX + len(avoid) + len(blocked) if not work.needs else len(found)
        for *_, worker in found[:looks]:
            if worker.id not in blocked and worker.fits(work):
                if worker.id not in avoid:
                    return worker
                other = other or worker
        return other

    def least_loaded(self, count: int, work: Work) -> list[WorkerCapacity]:
        """Up to `count` workers that could start a stream like this one, least loaded first."""
        return [rank[3] for rank in self._open_to(work)[:count]]

    def all_open(self, work: Work) -> Iterator[WorkerCapacity]:
        """All workers that could start a stream like this one, least loaded first."""
        return (rank[3] for rank in self._open_to(work))

    def _open_to(self, work: Work) -> "list[_Rank]":
        return self._beyond if work.takes_row else self._open

    def book(self, worker: WorkerCapacity, work: Work) -> None:
        """It was started there."""
        work.identity = worker.view.identity
        assert work.id not in worker.begun, f"{work.id} is booked there already"
        worker.booked += work.streams
        self.num_running += work.streams
        worker.num_pending += 1
        worker.pending_blocks += work.blocks
        worker.pending_tokens += uncached_tokens(work)
        worker.begun[work.id] = False
        self._starts += 1
        worker.turn = self._starts
        self._enter(worker)

    def begin(self, worker: WorkerCapacity, work: Work) -> None:
        """Its first output was seen: its blocks are in what the worker reports from here on."""
        if worker.begun.get(work.id) is False:
            worker.begun[work.id] = True
            worker.num_pending -= 1
            worker.pending_blocks -= work.blocks
            worker.pending_tokens -= uncached_tokens(work)
            assert worker.pending_blocks >= 0 <= worker.pending_tokens, (
                f"{worker.id}: more begun than was booked"
            )
            if (worker.busy or worker.others) and self._workers.get(worker.id) is worker:
                self._enter(worker)

    def release(self, worker: WorkerCapacity, work: Work) -> None:
        """It holds nothing there any more."""
        self.begin(worker, work)
        del worker.begun[work.id]
        worker.booked -= work.streams
        self.num_running -= work.streams
        assert worker.booked >= 0 <= self.num_running, f"{worker.id}: more released than was booked"
        if self._workers.get(worker.id) is not worker:
            return
        if worker.gone and not worker.begun:
            self._drop(worker)
        else:
            self._enter(worker)

    def hold(self, work: Work, blocked: Collection[WorkerId] = ()) -> WorkerCapacity | None:
        """Keep one worker free for a large request: the one with the most free KV memory, then the least
        loaded.
        """
        assert self.held is None, "one at a time"
        ready = [
            worker
            for worker in self._workers.values()
            if worker.view.ready and worker.id not in blocked and worker.is_able(work)
            if not work.goes_on or can_resume_at(work, worker.view)
        ]
        if not ready:
            return None
        best = min(
            ready,
            key=lambda worker: (
                worker.slots < work.streams,
                _blocks_short(worker, work),
                _load(worker),
                worker.number,
            ),
        )
        best.held, self.held = True, best
        self._enter(best)
        return best

    def unhold(self) -> None:
        """The request that it was held for has started, or left."""
        worker, self.held = self.held, None
        if worker is not None:
            worker.held = False
            self._enter(worker)

    def take_fresh(self) -> list[WorkerCapacity]:
        """Workers that reported since this was last asked, if they tell of KV blocks."""
        fresh, self._fresh = self._fresh, {}
        return [worker for worker in fresh.values() if worker.view.kv_blocks_total and worker.view.ready]

    def __iter__(self) -> Iterator[WorkerCapacity]:
        """All workers, also those that are not ready."""
        return iter(self._workers.values())

    def _enter(self, worker: WorkerCapacity) -> None:
        """Put it where it belongs now: its load, its turn or whether it has room may have changed."""
        self._leave(worker)
        worker.busy = worker.pending_tokens > 0 and self._is_busy(worker)
        taken = worker.booked + worker.others
        if worker.view.ready and not worker.held and taken < worker.limit:  # `is_open`.
            worker.rank = (taken * _LOAD_UNIT // (worker.slots or 1), worker.turn, worker.number, worker)
            insort(self._beyond, worker.rank)
            if not worker.busy and (worker.slots > taken if not worker.others else worker.num_free >= 1):
                insort(self._open, worker.rank)

    def _leave(self, worker: WorkerCapacity) -> None:
        if worker.rank is not None:
            index = bisect_left(self._beyond, worker.rank)
            assert self._beyond[index][3] is worker, f"{worker.id} stands where it was put"
            del self._beyond[index]
            index = bisect_left(self._open, worker.rank)
            if index < len(self._open) and self._open[index][3] is worker:
                del self._open[index]
            worker.rank = None

    def _count_alone(self) -> None:
        """A worker came or went. More than two need no look: none of them was alone, or is."""
        workers = self._workers
        self.only = next(iter(workers.values())) if len(workers) == 1 else None
        if len(workers) <= 2:
            for worker in workers.values():
                worker.alone = worker is self.only

    def _reside(self, worker: WorkerId, had: frozenset[str], has: frozenset[str]) -> None:
        """Keep the workers of each adapter."""
        for adapter in sorted(had - has):
            workers = self._adapters[adapter]
            del workers[worker]
            if not workers:
                del self._adapters[adapter]
        for adapter in sorted(has - had):
            self._adapters.setdefault(adapter, {})[worker] = None

    def _drop(self, worker: WorkerCapacity) -> None:
        assert not worker.begun, f"{worker.id} has requests"
        self._leave(worker)
        self.num_running -= worker.others
        del self._workers[worker.id]
        self._count_alone()
        self._fresh.pop(worker.id, None)

    def check_invariants(self) -> None:
        """Assert that the sums agree. O(n): for tests."""
        workers = list(self._workers.values())
        assert self.num_ready == sum(worker.view.ready for worker in workers)
        assert self.num_running == sum(worker.booked + worker.others for worker in workers)
        assert self.num_slots == sum(worker.slots for worker in workers if worker.view.ready)
        assert self.num_spare == sum(worker.spare for worker in workers if worker.view.ready)
        assert self._open == sorted(self._open)
        assert self._beyond == sorted(self._beyond)
        entered = {id(rank[3]) for rank in self._open}
        assert len(entered) == len(self._open)
        assert {id(rank[3]) for rank in self._beyond} == {id(worker) for worker in workers if worker.is_open}
        for worker in workers:
            assert min(worker.booked, worker.pending_blocks, worker.pending_tokens) >= 0, worker.id
            assert worker.num_pending == sum(not has_begun for has_begun in worker.begun.values()), worker.id
            assert bool(worker.begun) == bool(worker.booked), worker.id
            assert (id(worker) in entered) == (worker.num_free >= 1 and not worker.held), worker.id
            assert worker.held == (worker is self.held), worker.id
            assert worker.alone == (len(workers) == 1), worker.id
            assert worker.rank in (None, (_load(worker), worker.turn, worker.number, worker)), worker.id


def can_resume_at(work: Work, view: WorkerView) -> bool:
    """Whether what was begun elsewhere can be continued there. A stream with an identity gets the very tokens
    that would have followed, from a worker of the same one; a foreign engine has none, and promised no
    tokens.
    """
    return view.resumes and (not work.identity or view.identity == work.identity)


def uncached_tokens(work: Work) -> int:
    """Prompt tokens that the worker which was chosen has to compute, as far as is known."""
    left = work.prompt_tokens - work.matched_tokens
    return left if left > 0 else 0  # Asked several times for each placement: `max` costs as much again.


def _load(worker: WorkerCapacity) -> int:
    return (worker.booked + worker.others) * _LOAD_UNIT // max(1, worker.slots)


def _blocks_short(worker: WorkerCapacity, work: Work) -> int:
    """KV blocks that must become free before the request fits."""
    view = worker.view
    free = view.kv_blocks_total - view.kv_blocks_used - worker.pending_blocks
    return max(0, work.blocks - free) if view.kv_blocks_total else 0


class Hold(msgspec.Struct, frozen=True, gc=False):
    """It could start elsewhere, but is better off waiting for this worker, until then at most.

    Requests behind it are tried.
    """

    worker_id: WorkerId
    until_ns: int


class Placement(Protocol):
    """Which worker of one model a request goes to.

    It is informed of the results of its choices, and may learn from that.
    """

    def asked(self, now_ns: int, work: Work, workers: CapacityTable) -> None:
        """A request that names an adapter has come, and waits."""

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | Hold | None:
        """A worker that the request fits on now; None if there is none.

        Never one that is `blocked`; one to `avoid`, where the request failed, only if there is no other. Sets
        `work.matched_tokens`. A request whose `hold_ns` is set was held before and is not held again.
        """

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """It was sent there, and is booked in `worker`."""

    def began(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """Its first output came."""

    def ended(self, now_ns: int, work: Work, worker: WorkerCapacity, usage: Usage | None) -> None:
        """It runs there no more, and used so much; None: it failed, or nothing is known."""
