"""One model's queue and the capacity of its workers, and which request starts where, next.

Knows requests only as `Work`.
"""

import math
from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.errors import Overloaded
from penstock.policy.contracts import Health, IsolatedStarts, RouteLoad
from penstock.policy.flow import RequestFacts
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import (
    CapacityTable,
    Hold,
    Placement,
    WorkerCapacity,
    WorkerView,
)
from penstock.policy.queueing.cells import PeerCells
from penstock.policy.queueing.deployments import Deployments
from penstock.policy.queueing.fair_queue import FairQueue, Full
from penstock.policy.queueing.pace import Pace
from penstock.policy.terms import queue_terms
from penstock.types import RequestId, Usage, WorkerId

_HEADROOM_ROWS = 8  # With fewer rows one row is too much to leave free.
_OVER = 1.5  # Times its part: more is over it. A tenant near its part is not held back.
_PACE = 8  # The mean time between two starts follows the last so many.
_LOST_WAIT_S = 30.0
"""With `queue.no_worker_wait_s` 0 new requests do not wait for a worker; one whose worker was lost does."""
_NOBODY: Collection[WorkerId] = ()


class ModelQueue:
    """The requests that wait for one model, and the workers that could run them."""

    __slots__ = (
        "_config", "_deployments", "_down_ns", "_few_ns", "_found", "_health", "_holds", "_last_ns",
        "_no_worker_ns", "_now_ns", "apart", "avoid", "gap_ns", "held", "leaving", "pace", "peers",
        "placement", "queue", "route", "timer_ns", "workers",
    )  # fmt: skip

    def __init__(
        self,
        config: QueueConfig,
        route: str,
        now_ns: int,
        placement: Placement,
        health: Health,
        pace: Pace | None = None,
        apart: IsolatedStarts | None = None,
    ) -> None:
        """`apart` knows the requests that must start apart from others; None: there are none."""
        self.apart = apart
        config = self._config = queue_terms(config)
        self.route, self.placement, self._health = route, placement, health
        self.pace = pace or Pace()
        self.queue, self.workers = FairQueue(config), CapacityTable(config, self.pace.is_busy)
        self.held: Work | None = None
        """Too large for the room there was for too long: a worker is kept free for it."""
        self.avoid: dict[RequestId, set[WorkerId]] = {}
        """Requests that were tried before -> the workers where that failed."""
        self._deployments: Deployments | None = None
        """None until a worker has terms of its own."""
        self.peers = PeerCells(self.queue, self.workers, lambda now: health.blocked(now, route, strict=True))
        self.leaving: set[RequestId] = set()
        """Requests whose prompt is being made for another model: they are started nowhere meanwhile."""
        self.timer_ns: int | None = None
        """The owner's: when it looks at this lane next."""
        self.gap_ns = 0
        """Mean time between two starts while something waited."""
        self._last_ns: int | None = None
        self._down_ns = now_ns
        self._no_worker_ns = int((config.no_worker_wait_s or _LOST_WAIT_S) * NS_PER_S)
        self._now_ns = now_ns
        self._found: WorkerCapacity | None = None
        self._few_ns = 0  # When a request was late, after none was for a while, and few were here.
        self._holds: list[tuple[int, int, Work]] = []
        """When what is held for a warm worker is released to all."""

    @property
    def down_ns(self) -> int | None:
        """Since when it has no worker that is ready; None: it has."""
        return None if self.workers.num_ready else self._down_ns

    @property
    def wake_ns(self) -> int:
        """It is asleep, and waking takes so long; 0: it is not. O(workers) while none is ready."""
        if self.workers.num_ready:
            return 0
        return min((worker.view.wake_ns for worker in self.workers if worker.view.wake_ns), default=0)

    def waiting(self) -> Iterator[Work]:
        """The waiting requests, band by band, in the order in which they came."""
        for band in self.queue.bands:
            yield from band.waiting.values()

    def set_worker(self, now_ns: int, worker_id: WorkerId, view: WorkerView | None) -> None:
        """Take a worker's report, or that it is gone."""
        before = self.workers.num_ready
        self.workers.set(worker_id, view)
        if self._deployments is None and view is not None and view.terms is not None:
            self._deployments = Deployments()
        if self._deployments is not None:
            self._deployments.set(worker_id, view)
        if view is None or view.cell is not None:
            self.peers.set(worker_id, view)
        if before and not self.workers.num_ready:
            self._down_ns = now_ns
        self.queue.set_slots(self.workers.num_slots)

    @property
    def needs_look(self) -> bool:
        """Whether `next_start` has something to do: a request waits, or the last one left otherwise."""
        return self.queue.num_waiting > 0 or self._last_ns is not None or self.held is not None

    def next_start(self, now_ns: int) -> tuple[Work, WorkerCapacity] | None:
        """The next request to start and where, taken from the queue and booked; None when nothing can
        start.
        """
        queue, workers = self.queue, self.workers
        self._now_ns = now_ns
        if self._deployments is not None:
            self._deployments.due_ns = None
        for overdue in self.pace.overdue(now_ns):
            workers.look_again(overdue)
        if not queue.num_waiting:
            self._last_ns = None
            if self.held is not None:
                self._unhold()
            return None
        work, worker = self._held_fits(now_ns)
        if work is None and (self.peers.has_room(now_ns) if self.peers.ids else workers.has_room()):
            work = queue.pop(now_ns, self._finds_place, share=self._share())
            worker = self._found
        if work is None and self.held is not None:
            work, worker = self._pass_held(now_ns, self.held)
        if work is None and workers.has_room_beyond():
            work = queue.pop(now_ns, self._fits_beyond, sets_aside=False)
            worker = self._found
        if work is None:
            return None
        assert worker is not None, "what fits has a place"
        self.book(now_ns, work, worker)
        self._pace(now_ns)
        return work, worker

    def book(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """It is started there."""
        line = self.queue.bands[work.level].line(work.tenant)
        work.takes_row = line is not None and line.num_running == work.streams
        self.workers.book(worker, work)
        if self.peers.ids:
            self.peers.started(now_ns, work, worker)
        self.pace.started(now_ns, work, worker)
        self.placement.started(now_ns, work, worker)
        if self._deployments is not None:
            self._deployments.started(now_ns, work, worker)

    def place_hedge(self, now_ns: int, work: Work, worker: WorkerId) -> WorkerCapacity | None:
        """Where a request that runs at `worker` could be started a second time: only if no request waits, and
        there is room for it in another worker's batch. Books nothing.
        """
        if self.queue.num_waiting:
            return None
        taken = self.apart.taken(self.route) if self.apart is not None else ()
        blocked = self._blocked(now_ns, work).union((worker,), taken, self.peers.ids)
        capacity = self._place(now_ns, work, _NOBODY, blocked)
        if capacity is None or isinstance(capacity, Hold):
            return None
        rows = capacity.view.max_running or capacity.slots
        return capacity if capacity.booked + capacity.others + work.streams <= rows else None

    def failed(self, worker_id: WorkerId, work: Work) -> None:
        """It failed there, and will wait for another attempt."""
        self.avoid.setdefault(work.id, set()).add(worker_id)
        work.hold_ns, work.takes_row = 0, False

    def has_other(
        self,
        now_ns: int,
        work: Work,
        *,
        besides: WorkerId | None = None,
        now: bool = False,
        identity: str = "",
    ) -> bool:
        """Whether a worker where it has not failed, and not this one, could have it: in time, or `now`;
        `identity`: one that computes the same.
        """
        blocked = self._blocked(now_ns, work, strict=True)
        avoid = self.avoid.get(work.id, _NOBODY)
        return any(
            worker.view.ready
            and worker.id not in blocked
            and worker.id not in avoid
            and worker.id != besides
            and identity in ("", worker.view.identity)
            and (worker.fits(work) if now else worker.is_able(work))
            for worker in self.workers
        )

    def is_apart(self, work: Work) -> bool:
        """Whether it must start apart from others."""
        return self.apart is not None and self.apart.is_apart(work.id)

    def forget(self, work: Work) -> None:
        """It has ended."""
        if self.avoid:
            self.avoid.pop(work.id, None)
        if self.leaving:
            self.leaving.discard(work.id)

    def begin(self, now_ns: int, worker_id: WorkerId, work: Work) -> None:
        """Its first output was seen."""
        worker = self.workers.get(worker_id)
        assert worker is not None, f"{worker_id} is not known"
        self.pace.began(now_ns, work, worker)  # Before the room is looked at, which asks whether it is busy.
        self.workers.begin(worker, work)
        self.placement.began(now_ns, work, worker)

    def release(self, now_ns: int, worker_id: WorkerId, work: Work, usage: Usage | None = None) -> None:
        """It holds nothing of its worker any more, and used so much there, if that is known."""
        worker = self.workers.get(worker_id)
        assert worker is not None, f"{worker_id} is not known"
        self.pace.ended(work, worker)
        if self.peers.ids:
            self.peers.ended(now_ns, work, worker)
        self.workers.release(worker, work)
        self.placement.ended(now_ns, work, worker, usage)
        if self._deployments is not None:
            self._deployments.ended(now_ns, work, worker, usage)

    def next_expired(self, now_ns: int) -> tuple[Work, str] | None:
        """One whose wait is over, still in the queue, and why."""
        while (work := self.queue.expired(now_ns)) is not None:
            is_kept = self.wake_ns and not work.max_wait_ns
            if is_kept and (until_ns := self._no_worker_until(work)) > now_ns:
                self.queue.keep(work, until_ns)  # A worker comes, whatever its band says.
            elif not work.start_by_ns or now_ns < work.queued_ns + work.start_by_ns:
                return work, "timeout"
            elif not self.workers.num_ready:
                self.queue.wait_on(work)  # Promises are those of workers that are there.
            elif work.deadline_ns > now_ns and work.aside:
                self.queue.wait_on(work, work.deadline_ns - work.queued_ns)  # For memory, not for others.
            else:
                return work, "late"
        oldest = None if self.workers.num_ready else self._oldest()
        if oldest is not None and self._no_worker_until(oldest) <= now_ns:
            return oldest, "no_worker"
        return None

    def waits_on(self, now_ns: int, work: Work, *, is_bound: bool) -> bool:
        """Whether one that is late waits on, unless its client set a bound: few were here at the first."""
        num = self.queue.num_waiting + self.workers.num_running
        if num <= self._config.late_kept and not self.pace.is_any_late(now_ns):
            self._few_ns = now_ns
        self.pace.too_late(now_ns, work)
        if is_bound or work.queued_ns >= self._few_ns:
            return False
        self.queue.wait_on(work)
        return True

    def due_ns(self, now_ns: int) -> int | None:
        """When the lane must be looked at next, if nothing happens until then."""
        times = [self.queue.next_ns()]
        overdue_ns = self.queue.next_overdue_ns() if self.held is None else None
        if overdue_ns is not None and overdue_ns > now_ns:  # Else its report will tell.
            times.append(overdue_ns)
        oldest = None if self.workers.num_ready else self._oldest()
        if oldest is not None:
            times.append(self._no_worker_until(oldest))
        holds = self._holds
        while holds and not (holds[0][0] > now_ns and self.queue.waits(holds[0][2])):
            heappop(holds)
        if holds:
            times.append(holds[0][0])
        if self.queue.num_waiting:
            # Deadlines that are over have been looked at: they would be asked for again and again.
            again = [self._health.due_ns(self.route), self.pace.next_overdue_ns()]
            again += [self._deployments.due_ns] if self._deployments is not None else []
            again += [self.peers.due_ns(now_ns)] if self.peers.ids else []
            times += [time for time in again if time is not None and time > now_ns]
        return min((time for time in times if time is not None), default=None)

    def retry_after_s(self) -> float:
        """When a refused request may come back: the time that what waits takes to start, from 1 s to 60 s."""
        return min(60.0, max(1.0, self.queue.num_waiting * self.gap_ns / NS_PER_S))

    def overloaded(self, full: Full) -> Overloaded:
        """The error of whom the queue did not take."""
        whose = {"tenant": "your share of the queue", "band": "the queue of your band", "queue": "the queue"}
        why = f"{whose[full.bound]} is full: {full.limit} {full.unit} at most"
        return Overloaded(why, retry_after_s=self.retry_after_s())

    def load(self, now_ns: int, facts: RequestFacts) -> RouteLoad:
        """How the model stands for a request that does not wait here yet."""
        queue, workers, pace, tenant = self.queue, self.workers, self.pace, facts.tenant
        level = queue.level_of(tenant.band)
        band = queue.bands[level]
        line = band.line(tenant.id)
        requests_ahead = ahead = 0
        # Else it is started beyond the slots.
        if not workers.has_room_beyond() or (line is not None and line.num_running + line.num_waiting):
            ahead = requests_ahead = band.ahead_of(tenant.id, tenant.weight)
            for higher in queue.bands[:level]:
                ahead += len(higher.waiting)
        prompt, num_ready, gap_ns = facts.prompt_tokens, workers.num_ready, self.gap_ns
        streams = workers.num_running / (num_ready or 1)
        start_ns, idle_ttft_ns = pace.expected_ns(prompt - facts.cached_tokens, prompt, streams)
        # A protected band goes first, at the model's pace; others have the rest, which is seen in their own.
        each_ns = gap_ns if band.config.protected else band.gap_ns(now_ns)
        return RouteLoad(  # In the order of its fields: one is made for each request.
            self.route,
            num_ready,
            ahead,
            queue.would_refuse(level, tenant.id, facts.num_bytes),
            max((requests_ahead + 1) * each_ns, ahead * gap_ns) if ahead else 0,
            max(gap_ns, each_ns),
            start_ns,
            idle_ttft_ns,
            pace.backlog_ns,
            pace.is_late(now_ns, level),
            self._health.trouble(now_ns, self.route),
            0 if num_ready else self.wake_ns,
        )

    def _share(self) -> float | None:
        """The streams one tenant may run of the last rows; None: more are free, or no other tenant is here.

        A tenant that runs much more than its part leaves `headroom` (and the credit, which is no row yet) to
        the others: their next request starts at once, and not when a stream of that tenant happens to end.
        """
        workers = self.workers
        rows = workers.num_slots - workers.num_spare
        headroom = math.ceil(self._config.headroom * rows) if rows >= _HEADROOM_ROWS else 0
        reserve = max(0, workers.num_spare + headroom)  # Rows that are kept free are headroom already.
        if workers.num_slots - workers.num_running > reserve:
            return None
        num_active = sum([band.num_active for band in self.queue.bands])
        return _OVER * workers.num_slots / num_active if num_active > 1 else None

    def _fits_beyond(self, work: Work) -> bool:
        """Whether it could be started although all slots are taken: its tenant runs nothing, so it never
        waits for streams of others to end.
        """
        line = self.queue.band_of(work).line(work.tenant)
        if (line is not None and line.num_running) or work.hold_ns > self._now_ns:
            return False  # In the latter case it waits for a warm worker by choice.
        was_held_ns, work.takes_row = work.hold_ns, True
        work.hold_ns = was_held_ns or 1  # It is not held now.
        if self._finds_place(work):
            return True
        work.takes_row, work.hold_ns = False, was_held_ns
        return False

    def _finds_place(self, work: Work) -> bool:
        now_ns = self._now_ns
        blocked = self._blocked(now_ns, work)
        if work.hold_ns > now_ns and self._is_held(work, blocked):
            return False
        avoid = self.avoid.get(work.id, _NOBODY) if self.avoid else _NOBODY
        found = self._place(now_ns, work, avoid, blocked)
        if isinstance(found, Hold):
            has_time = not work.start_by_ns or found.until_ns < work.expires_ns
            if has_time and (work.aside or len(self.queue.band_of(work).aside) < self._config.aside_max):
                work.hold_ns, work.hold_for = found.until_ns, found.worker_id
                heappush(self._holds, (found.until_ns, work.number, work))
                return False
            # It has no time for that, or aside is full, so it would be in the way of its tenant's others: it
            # goes where there is room.
            work.hold_ns = max(now_ns, 1)
            found = self._place(now_ns, work, avoid, blocked)
            assert not isinstance(found, Hold), "no request is held twice"
        self._found = found
        return found is not None

    def _blocked(self, now_ns: int, work: Work, *, strict: bool = False) -> frozenset[WorkerId]:
        """Workers that this request must not be given to now; `strict`: by their breakers alone."""
        if self.leaving and work.id in self.leaving:
            assert not work.goes_on, "nothing leaves that has given output"
            return frozenset(worker.id for worker in self.workers)
        blocked = self._health.blocked(now_ns, self.route, strict=strict or work.is_strict)
        if self.peers.ids:
            blocked = self.peers.blocked(now_ns, work, blocked)
        if self._deployments:
            blocked |= self._deployments.spent(now_ns, work)
        if self.apart is not None:
            blocked |= self.apart.barred(self.route, work.id)
        return blocked

    def _place(
        self, now_ns: int, work: Work, avoid: Collection[WorkerId], blocked: frozenset[WorkerId]
    ) -> WorkerCapacity | Hold | None:
        """Where it could start now: here, or in a peer cell."""
        if not self.peers.ids:
            return self._place_here(now_ns, work, avoid, blocked)
        found = self._place_here(now_ns, work, avoid, blocked | self.peers.ids)
        if isinstance(found, Hold) or (found is not None and found.id not in avoid):
            return found
        peer = self.peers.place(now_ns, work, avoid, blocked)
        if peer is None:
            return found
        others = frozenset(worker.id for worker in self.workers if worker is not peer)
        self.placement.place(now_ns, work, self.workers, avoid, others)  # For `explain`.
        return peer

    def _place_here(
        self, now_ns: int, work: Work, avoid: Collection[WorkerId], blocked: frozenset[WorkerId]
    ) -> WorkerCapacity | Hold | None:
        """By the placement, among those whose turn it is."""
        if not self._deployments:
            return self.placement.place(now_ns, work, self.workers, avoid, blocked)
        everybody = frozenset(worker.id for worker in self.workers)
        # One where it failed comes behind those of every order where it did not.
        for without in (blocked.union(avoid), blocked) if avoid else (blocked,):
            for group in self._deployments.groups(work, self.workers, without):
                found = self.placement.place(now_ns, work, self.workers, avoid, everybody - group)
                if found is not None:
                    return found
        return None

    def _is_held(self, work: Work, blocked: Collection[WorkerId]) -> bool:
        """Whether it continues to wait for the warm worker: that is still there, and still has no room."""
        worker = self.workers.get(work.hold_for)
        return worker is not None and worker.view.ready and worker.id not in blocked and not worker.fits(work)

    def _held_fits(self, now_ns: int) -> tuple[Work | None, WorkerCapacity | None]:
        """Keep a worker free for the request that was passed over too long, until it fits there."""
        if self.held is not None:
            kept = self.workers.held
            if not self.queue.waits(self.held) or kept is None or kept.id in self._blocked(now_ns, self.held):
                self._unhold()
        if self.held is None:
            work = self.queue.overdue(now_ns)
            if work is None or self.workers.hold(work, self._blocked(now_ns, work) | self.peers.ids) is None:
                return None, None
            self.held = work
        held, worker = self.held, self.workers.held
        if worker is None or not worker.fits(held):
            return None, None
        self.queue.start(now_ns, held)
        self._start_on(now_ns, held, worker)
        return held, worker

    def _start_on(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        """The placement decides as ever, where one worker is all that there is: so it knows what is cached
        there, and can explain why the request went there.
        """
        self._unhold()
        work.hold_ns, work.matched_tokens = max(1, work.hold_ns), 0
        others = frozenset(each.id for each in self.workers if each is not worker)
        self.placement.place(now_ns, work, self.workers, _NOBODY, others)

    def _pass_held(self, now_ns: int, held: Work) -> tuple[Work | None, WorkerCapacity | None]:
        """No request of its band or below takes the worker that is kept free; those above may, until its band
        is starved.
        """
        worker, band = self.workers.held, self.queue.band_of(held)
        if worker is None or worker.num_free < 1 or now_ns - held.aside_ns >= band.starvation_ns:
            return None, None
        work = self.queue.pop(
            now_ns,
            lambda each: worker.fits(each) and worker.id not in self._blocked(now_ns, each),
            above=held.level,
        )
        if work is not None:
            self._start_on(now_ns, work, worker)  # A worker is kept free again at the next look.
        return work, worker

    def _unhold(self) -> None:
        self.held = None
        self.workers.unhold()

    def _oldest(self) -> Work | None:
        """The request that has waited longest, for when there is no worker to wait for."""
        firsts = [next(iter(band.waiting.values())) for band in self.queue.bands if band.waiting]
        return min(firsts, key=lambda work: (work.queued_ns, work.number), default=None)

    def _no_worker_until(self, oldest: Work) -> int:
        # A model that is asleep may take twice the expected time.
        return max(self._down_ns, oldest.queued_ns) + self._no_worker_ns + 2 * self.wake_ns

    def _pace(self, now_ns: int) -> None:
        if not self.queue.num_waiting:
            self._last_ns = None
            return
        if self._last_ns is not None:
            self.gap_ns += (now_ns - self._last_ns - self.gap_ns) // _PACE
        self._last_ns = now_ns

    def check_invariants(self) -> None:
        """Assert that the parts agree. O(n): for tests."""
        self.queue.check_invariants()
        self.workers.check_invariants()
        assert self.held is not None or self.workers.held is None
