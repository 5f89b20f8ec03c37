"""The order of starts, and whether a request waits for nothing: what docs/overload.md promises, looked at
from outside of the queue.

- *Priority inversion*: no request starts before one of a higher band that could have had its place, but by
  the rules that bound what a higher band takes: a band that is owed a start, one under its floor, and one
  that has started nothing for its `starvation_s`.
- *Work conservation*: nothing waits that a worker has room for, but while it waits by choice for a worker
  that has its prompt (no longer than `hold_ms_max`), while its tenant is over its part of the last rows, or
  as a suspect of quarantine, which is tried apart from others.
- *Caps*: no worker is given more streams than its rows and the credit, and no tenant runs more requests than
  it may.

Whether a request fits a worker is worked out here once more, from the worker's words and from what was
started there.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.branch import extended
from penstock.config.tree import Config
from penstock.policy.flow import State
from penstock.policy.queueing.band import Band, Work
from penstock.policy.queueing.capacity import WorkerCapacity, can_resume_at
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.request import blocks_of
from penstock.policy.terms import PlacementTerms, queue_terms
from penstock.sim.world.gateway import SimGateway
from penstock.sim.world.messages import Submission
from penstock.types import RequestId, WorkerId

_LOOKED_MAX = 64
"""Waiting requests of one band that are looked at, oldest first."""
_ROWS_MIN = 8
"""Fewer rows than this keep none free for others (docs/overload.md)."""
_RUNS = (State.STARTED, State.STREAMING, State.STOPPING)


class ObservedStart(NamedTuple):
    """A request that a gateway has sent to a worker during one event."""

    worker_id: WorkerId
    submission: Submission


class _Look(NamedTuple):
    """One lane at one time."""

    now_ns: int
    model_queue: ModelQueue
    blocked: Collection[WorkerId]
    """Workers that are left alone."""


class _Seen:
    """How a lane stood after the event before."""

    __slots__ = ("aside", "served_ns")

    def __init__(self) -> None:
        self.served_ns: dict[int, int] = {}
        """By level of the bands in which something waited: when they last started something."""
        self.aside: dict[RequestId, Work] = {}


class OrderChecks:
    """Of one world's gateways. Each method returns what is wrong; empty: nothing."""

    __slots__ = ("_config", "_seen")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._seen: dict[tuple[int, int, str], _Seen] = {}

    # --- after every event --------------------------------------------------------------------------

    def started(self, now_ns: int, gateway: SimGateway, route: str, starts: Sequence[ObservedStart]) -> str:
        """The starts of a gateway in one event of one model, in order; call it also if that is nothing."""
        model_queue = gateway.control.model_queue(route)
        if model_queue is None:
            return ""
        key = gateway.number, gateway.life, route
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen()
        look = _Look(now_ns, model_queue, gateway.policies.health.blocked(now_ns, route))
        why = self._inversion(look, gateway, seen, starts) if starts else ""
        seen.served_ns.clear()
        seen.aside.clear()
        if model_queue.queue.num_waiting:
            for band in model_queue.queue.bands:
                if band.waiting:
                    seen.served_ns[band.level] = band.served_ns
                    seen.aside.update((work.id, work) for work in band.aside)
        return why

    def _inversion(
        self, look: _Look, gateway: SimGateway, seen: _Seen, starts: Sequence[ObservedStart]
    ) -> str:
        now_ns, bands = look.now_ns, look.model_queue.queue.bands
        works = [_work_of(gateway, start) for start in starts]
        levels = [
            _level_of(bands, start) if work is None else work.level
            for start, work in zip(starts, works, strict=True)
        ]
        running = [band.num_running - levels.count(band.level) for band in bands]
        for index, (start, level) in enumerate(zip(starts, levels, strict=True)):
            band = bands[level]
            since_ns = seen.served_ns.pop(level, None)
            is_starved = since_ns is not None and now_ns - since_ns >= band.starvation_ns
            aside = seen.aside.get(start.submission.id)
            is_overdue = aside is not None and self._is_overdue(now_ns, aside)
            is_under = running[level] < band.floor
            running[level] += 1
            work = works[index]
            if is_starved or is_overdue or (work is not None and work.owed):
                continue
            for higher in bands[:level]:
                if is_under and running[higher.level] >= higher.floor:
                    continue
                passed = self._passed_over(look, gateway, higher, starts[index:])
                if passed is not None:
                    return (
                        f"{start.submission.id} ({band.config.name}) starts on {start.worker_id} before "
                        f"{passed.id} ({higher.config.name}), which has waited "
                        f"{(now_ns - passed.queued_ns) / NS_PER_MS:.0f} ms and fits"
                    )
        return ""

    def _passed_over(
        self, look: _Look, gateway: SimGateway, band: Band, starts: Sequence[ObservedStart]
    ) -> Work | None:
        """A request of the band that still waits, and could have been started in place of the first of the
        starts.
        """
        worker = look.model_queue.workers.get(starts[0].worker_id)
        if worker is None or not band.waiting:
            return None
        here = [start for start in starts if start.worker_id == worker.id]
        flows = [gateway.control.request(start.submission.id) for start in here]
        blocks = sum(blocks_of(flow) for flow in flows if flow is not None)
        for work in self._looked_at(band):
            if self._could_start(look, work, worker, given=len(here), blocks=blocks):
                return work
        return None

    def _is_overdue(self, now_ns: int, work: Work) -> bool:
        queue = queue_terms(self._config.queue)
        return work.skips >= queue.skips_max or now_ns - work.aside_ns >= queue.skip_s * NS_PER_S

    # --- now and then -------------------------------------------------------------------------------

    def waits_for_nothing(self, now_ns: int, gateway: SimGateway, route: str) -> str:
        """Work conservation.

        Between two events; not while the gateway has something to do at this very time.
        """
        model_queue, due_ns = gateway.control.model_queue(route), gateway.control.next_ns(now_ns)
        if (
            model_queue is None
            or not model_queue.queue.num_waiting
            or (due_ns is not None and due_ns <= now_ns)
        ):
            return ""
        look = _Look(now_ns, model_queue, gateway.policies.health.blocked(now_ns, route))
        limit_ns = int(extended(self._config.routing.placement, PlacementTerms).hold_ms_max * NS_PER_MS) + 1
        workers = [worker for worker in model_queue.workers if worker.view.ready and not worker.held]
        for band in model_queue.queue.bands:
            for work in self._looked_at(band):
                if work.hold_ns > now_ns + limit_ns:
                    return f"{work.id} is held for {(work.hold_ns - now_ns) / NS_PER_MS:.0f} ms"
                for worker in workers:
                    if self._could_start(look, work, worker):
                        return (
                            f"{work.id} has waited {(now_ns - work.queued_ns) / NS_PER_MS:.0f} ms, and "
                            f"{worker.id} has room for it"
                        )
        return ""

    def over_cap(self, gateway: SimGateway, route: str) -> str:
        """In-flight caps: of workers, and of tenants. O(n)."""
        model_queue = gateway.control.model_queue(route)
        if model_queue is None:
            return ""
        credit, count = queue_terms(self._config.queue).worker_credit, dict[WorkerId, int]()
        live: dict[str, int] = {}
        for request in gateway.requests():
            tenant = request.facts.tenant
            live[tenant.id] = live.get(tenant.id, 0) + 1
            if 0 < tenant.concurrent_max < live[tenant.id]:
                return f"{tenant.id} has {live[tenant.id]} requests, and may have {tenant.concurrent_max}"
            if request.state in _RUNS and request.facts.route == route:
                count[request.worker] = count.get(request.worker, 0) + 1
                if (hedge := request.hedge) is not None:
                    count[hedge.worker] = count.get(hedge.worker, 0) + 1
        for worker in model_queue.workers:
            streams, limit = count.get(worker.id, 0), worker.view.max_running + credit
            if streams != worker.booked:
                return f"{worker.id} has {streams} streams of this gateway, {worker.booked} are booked"
            if worker.view.ready and streams > limit:
                return f"{worker.id} has {streams} streams of one gateway, and is to have {limit}"
        return ""

    # --- inside -------------------------------------------------------------------------------------

    def _looked_at(self, band: Band) -> list[Work]:
        """Those that the queue must look at: aside, or next in their tenant's line; all of a line's while
        aside has a place.
        """
        waiting = [work for work, _ in zip(band.waiting.values(), range(_LOOKED_MAX), strict=False)]
        if len(band.aside) < queue_terms(self._config.queue).aside_max:
            return waiting
        heads = {line.head() for work in waiting if (line := band.line(work.tenant)) is not None}
        return [work for work in waiting if work.aside or work in heads]

    def _could_start(
        self, look: _Look, work: Work, worker: WorkerCapacity, *, given: int = 0, blocks: int = 0
    ) -> bool:
        """Whether a request that waits could run there, were the last `given` starts with so many `blocks`
        not.
        """
        view, booked = worker.view, worker.booked - given
        if not view.ready or worker.busy or worker.held or 0 < view.max_model_len < work.context_tokens:
            return False
        if work.goes_on and not can_resume_at(work, view):
            return False
        avoided = worker.id in look.blocked or worker.id in look.model_queue.avoid.get(work.id, ())
        # A suspect of quarantine waits for a worker where no other one is being tried.
        if avoided or work.hold_ns > look.now_ns or look.model_queue.is_apart(work):
            return False
        if booked or worker.others:
            if (
                view.max_running + queue_terms(self._config.queue).worker_credit - booked - worker.others
                < work.streams
            ):
                return False
            free = view.kv_blocks_total - view.kv_blocks_used - (worker.pending_blocks - blocks)
            if view.kv_blocks_total and work.blocks > free:
                return False
        return not self._is_over_its_part(look.model_queue, work)

    def _is_over_its_part(self, model_queue: ModelQueue, work: Work) -> bool:
        """Whether its tenant leaves the last rows to others (`queue.headroom`)."""
        queue, workers, band = (
            queue_terms(self._config.queue),
            model_queue.workers,
            model_queue.queue.band_of(work),
        )
        line = band.line(work.tenant)
        if band.config.protected or line is None or not line.num_running:
            return False
        credit = workers.num_ready * queue.worker_credit
        rows = workers.num_slots - credit
        kept = credit + (math.ceil(queue.headroom * rows) if rows >= _ROWS_MIN else 0)
        active = sum(each.num_active for each in model_queue.queue.bands)
        if workers.num_slots - workers.num_running > kept or active < 2:
            return False
        return line.num_running + work.streams > 1.5 * workers.num_slots / active * work.weight


def _work_of(gateway: SimGateway, start: ObservedStart) -> Work | None:
    """The queue's facts of it; None: it has ended."""
    return gateway.control.request(start.submission.id)


def _level_of(bands: Sequence[Band], start: ObservedStart) -> int:
    return next(band.level for band in bands if band.config.order == start.submission.priority)
