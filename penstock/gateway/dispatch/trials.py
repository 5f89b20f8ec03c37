"""The requests of this gateway that a rollout learns from: those of its cohorts, when they end, and copies of
requests, which are shadow traffic.

    accepted ──> has the candidate rows to spare?  ──no──> it is not copied, and counts nothing
                   │ yes: its prompt is made for the candidate, and sent past queue, limits and ledger
                   └──> both have ended ──> both count: the copy for the canary, the request for the control

A copy's answer goes nowhere. It is the tenant `platform`'s, whose time on a worker no request pays for, as of
a probe (prober.py). It runs where nobody needs the row, and ends where somebody begins to
(policy/queueing/spare.py). A request whose client leaves is not compared: its copy ends then, too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from penstock.backends.base import Delta, Finish, GenerateRequest, Generation
from penstock.clock import NS_PER_S, Clock
from penstock.errors import PenstockError, WorkerError
from penstock.fleet.registry import Worker
from penstock.gateway.dispatch.dispatcher import Dispatcher
from penstock.gateway.http.exchange import Exchange, Served
from penstock.gateway.models.rollouts import RolloutTable, observed
from penstock.policy.flow import RequestFacts
from penstock.policy.queueing.spare import (
    PRIORITY,
    ShadowCopies,
    blocks_of,
    num_in_the_way,
    rows_for_copies,
    spare_worker,
)
from penstock.policy.rollout.cohorts import Cohort
from penstock.policy.rollout.dealing import Assigned
from penstock.policy.rollout.evidence import Observation
from penstock.telemetry.counts import RequestMeasurement
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import PLATFORM, FinishReason, RequestId, Usage, WorkerId

COPIES_MAX = 256
"""At once, in one gateway process."""
LATER_S = 120.0
"""A copy that gave nothing for so long, since its request has ended, has failed: its version may answer
nothing at all."""
_COUNTS = {FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH, FinishReason.CONTENT_FILTER}
_CUT_OFF = {FinishReason.LENGTH, FinishReason.CONTENT_FILTER}

Make = Callable[[], Awaitable[tuple[GenerateRequest, frozenset[str]]]]
"""Makes a request's prompt for the candidate, and says what its worker must be able to do. Raises what the
candidate refuses."""
End = Literal["compared", "no_room", "made_room", "refused", "dropped"]
"""The fate of a copy, for metrics: `dropped` if its request is not compared, or its worker was not
ready."""


@dataclass(slots=True, eq=False)
class _Copy:
    """One copy, and its stream's sink."""

    trials: "Trials"
    assigned: Assigned
    facts: RequestFacts
    name: str
    """The id of its request's exchange."""
    blocks: int
    lead_ns: int
    """How long its request took until its prompt was made, which the copy does not."""
    worker: Worker | None = None
    stream: Generation | None = None
    began_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    """When it last gave something."""
    num_tokens: int = 0
    own: Observation | None = None
    """Of the copy, since it has ended."""
    other: Observation | None = None
    """Of its request, since that has ended."""
    answered_ns: int = 0
    is_running: bool = False
    is_over: bool = False

    def on_delta(self, delta: Delta) -> None:
        """See `Sink`: its time counts, and nobody reads it."""
        self.last_ns = self.trials.clock.now_ns()
        self.first_ns = self.first_ns or self.last_ns
        self.num_tokens += len(delta.token_ids)

    def on_finish(self, finish: Finish) -> None:
        """See `Sink`."""
        # It may end other streams: not inside of the backend's own work.
        now_ns = self.trials.clock.now_ns()
        asyncio.get_running_loop().call_soon(self.trials.copy_ended, self, finish, now_ns)


class _Running(ShadowCopies):
    """Those at one worker, the newest last."""

    route: str = ""
    copies: dict[str, _Copy] = field(default_factory=dict[str, _Copy])


class Trials:
    """One for a gateway process."""

    def __init__(
        self,
        table: RolloutTable,
        dispatcher: Dispatcher,
        *,
        metrics: Metrics,
        clock: Clock,
        log: Log,
    ) -> None:
        self.clock = clock
        self._table, self._dispatcher, self._registry = table, dispatcher, dispatcher.registry
        self._metrics, self._log = metrics, log
        self._copies: dict[str, _Copy] = {}
        self._at: dict[WorkerId, _Running] = {}
        self._looked_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        dispatcher.on_dispatched = self.look

    @property
    def num_copies(self) -> int:
        """Those that run, or wait for their request's end."""
        return len(self._copies)

    def copy(self, exchange: Exchange, assigned: Assigned, facts: RequestFacts, make: Make) -> None:
        """A request in the shadow was accepted: let the candidate have a copy of it, if it has room."""
        assert assigned.cohort is Cohort.SHADOW, assigned
        if not exchange.is_open:
            return  # Its client left while its prompt was made: nothing would tell of its end.
        blocks = blocks_of(facts.prompt_tokens, facts.max_tokens)
        lead_ns = max(0, (exchange.limits_ns or exchange.started_ns) - exchange.started_ns)
        copy = _Copy(self, assigned, facts, exchange.id, blocks, lead_ns)
        if len(self._copies) >= COPIES_MAX or self._spare(copy, facts.needs) is None:
            self._metrics.shadowed(assigned.candidate, "no_room")
            return
        self._copies[copy.name] = copy
        task = asyncio.get_running_loop().create_task(self._start(copy, make), name="shadow")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self, exchange: Exchange, served: Served, record: RequestMeasurement) -> None:
        """A request of a rollout has ended."""
        assigned, seen = served.assigned, None
        assert isinstance(assigned, Assigned), "a rollout has assigned its version"
        if served.downgrade is None:
            seen = observed(assigned, record, self._rows_at(record.worker))
        if assigned.cohort is not Cohort.SHADOW:
            if seen is not None:
                self._table.count(seen)
        elif (copy := self._copies.get(exchange.id)) is not None:
            copy.other, copy.answered_ns = seen, self.clock.now_ns()
            if seen is None:
                self._end(copy, "dropped")
            else:
                self._compare(copy)

    def copy_ended(self, copy: _Copy, finish: Finish, now_ns: int) -> None:
        """For a copy: its stream has ended, at that time."""
        self._leave(copy, finish.usage)
        if copy.is_over:
            return
        failed = isinstance(
            finish.error, WorkerError
        )  # As a request would; a worker that leaves ends its copies.
        if not failed and finish.reason not in _COUNTS:
            self._end(copy, "dropped")
            return
        copy.own = self._seen(copy, finish, now_ns, failed=failed)
        self._compare(copy)

    def look(self) -> None:
        """Make room for requests, and end what is of no use any more. Called whenever something may have
        begun to wait, and every second or so.
        """
        if not self._copies:
            return
        for worker_id, there in list(self._at.items()):
            model_queue = self._dispatcher.control.model_queue(there.route)
            if num := num_in_the_way(model_queue, worker_id, there):
                for copy in list(there.copies.values())[-num:]:
                    self._end(copy, "made_room")
        now_ns = self.clock.now_ns()
        if now_ns - self._looked_ns >= NS_PER_S:
            self._looked_ns = now_ns
            self._end_useless(now_ns)

    def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        for copy in list(self._copies.values()):
            self._end(copy, "dropped")

    # --- inside ----------------------------------------------------------------------------------

    def _end_useless(self, now_ns: int) -> None:
        for copy in list(self._copies.values()):
            if not self._table.copies(copy.assigned.rollout):
                self._end(copy, "dropped")
            elif copy.own is None and copy.other and _is_overdue(copy, now_ns):
                copy.own = replace(copy.other, is_canary=True, failed=True)
                self._compare(copy)

    def _spare(self, copy: _Copy, needs: frozenset[str]) -> Worker | None:
        model_queue = self._dispatcher.control.model_queue(copy.assigned.candidate)
        if model_queue is None:
            return None
        found = spare_worker(model_queue, self._at, copy.blocks, needs)
        # Another server may use the same worker: its streams are known by the worker's reports alone.
        if found is None or self._rows_at(found.id) >= rows_for_copies(found):
            return None
        return self._registry.get(found.id)

    async def _start(self, copy: _Copy, make: Make) -> None:
        try:
            request, needs = await make()
        except PenstockError as error:
            self._log.info("a request cannot be copied", model=copy.assigned.candidate, error=error)
            self._end(copy, "refused")
            return
        except Exception as error:  # noqa: BLE001 - a copy's bug must not end anything else.
            self._log.bug("a request could not be copied", error, request_id=copy.name)
            self._end(copy, "refused")
            return
        if copy.is_over:
            return
        if (worker := self._spare(copy, copy.facts.needs | needs)) is None:
            self._end(copy, "no_room")
            return
        self._send(copy, worker, request)

    def _send(self, copy: _Copy, worker: Worker, request: GenerateRequest) -> None:
        request = replace(
            request,
            request_id=_id_of(copy),
            priority=PRIORITY,
            fairness_key=PLATFORM,
            fairness_weight=1.0,
        )
        copy.worker, copy.began_ns = worker, self.clock.now_ns()
        there = self._at.setdefault(worker.id, _Running(route=worker.route))
        there.num, there.blocks = there.num + 1, there.blocks + copy.blocks
        there.copies[copy.name], copy.is_running = copy, True
        self._dispatcher.meters.copied(copy.began_ns, worker.id, request.request_id)
        try:
            copy.stream = worker.backend.generate(request, copy)
        except PenstockError as error:
            self._log.info("a copy was not taken", worker=worker.id, error=error)
            self._leave(copy, Usage())
            self._end(copy, "dropped")

    def _leave(self, copy: _Copy, usage: Usage) -> None:
        """It is no more at its worker."""
        assert copy.worker is not None, "it was sent there"
        there, copy.is_running = self._at[copy.worker.id], False
        there.num, there.blocks = there.num - 1, there.blocks - copy.blocks
        del there.copies[copy.name]
        assert there.num == len(there.copies), "no more leave than came"
        if not there.num:
            del self._at[copy.worker.id]
        self._dispatcher.meters.copy_ended(self.clock.now_ns(), _id_of(copy), usage)

    def _seen(self, copy: _Copy, finish: Finish, now_ns: int, *, failed: bool) -> Observation:
        assert copy.worker is not None, "it was sent there"
        usage = finish.usage
        first_ns, tokens = copy.first_ns, usage.completion_tokens or copy.num_tokens
        return Observation(
            copy.assigned.rollout,
            is_canary=True,
            group=copy.assigned.group,
            failed=failed,
            cut_off=finish.reason in _CUT_OFF,
            tokens=tokens,
            tpot_ns=(now_ns - first_ns) // (tokens - 1) if first_ns and tokens > 1 else 0,
            rows=self._rows_at(copy.worker.id),
            prefill_ns=max(0, first_ns - copy.began_ns - usage.queue_ns) + copy.lead_ns if first_ns else 0,
            uncached_tokens=usage.prompt_tokens - usage.cached_tokens,
        )

    def _compare(self, copy: _Copy) -> None:
        """Both have ended: the two count, or neither."""
        if copy.own is None or copy.other is None or copy.is_over:
            return
        self._table.count(copy.own)
        self._table.count(copy.other)
        self._end(copy, "compared")

    def _end(self, copy: _Copy, how: End) -> None:
        if copy.is_over:
            return
        copy.is_over = True
        self._copies.pop(copy.name, None)
        self._metrics.shadowed(copy.assigned.candidate, how)
        if copy.stream is not None and copy.is_running:
            copy.stream.abort()

    def _rows_at(self, worker_id: str) -> int:
        """A worker's last report of how many requests it computes together."""
        worker = self._registry.get(WorkerId(worker_id))
        stats = None if worker is None else worker.backend.status.stats
        return 0 if stats is None else stats.running


def _is_overdue(copy: _Copy, now_ns: int) -> bool:
    return now_ns - max(copy.answered_ns, copy.last_ns) > LATER_S * NS_PER_S


def _id_of(copy: _Copy) -> RequestId:
    """At its worker."""
    return RequestId(f"copy-{copy.name}")
