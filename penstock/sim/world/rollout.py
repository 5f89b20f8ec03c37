"""A rollout in a simulated fleet: conversations are dealt to two versions of a model, what ends is held
against each other, and every second it is judged, by the product's own policy (policy/rollout/).

The versions are two pools of workers, "model@1" and "model@2". The faults of the new one are data
(`Version`). Shadow traffic is that of gateway/dispatch/trials.py: copies go to workers that have rows to
spare (policy/queueing/spare.py), past queues, limits and the ledger.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.planning.step_time import StepTime
from penstock.policy.flow import Outcome, Start
from penstock.policy.queueing.spare import PRIORITY, ShadowCopies, blocks_of, num_in_the_way, spare_worker
from penstock.policy.rollout.cohorts import Cohort
from penstock.policy.rollout.dealing import Assigned, active_of
from penstock.policy.rollout.evidence import Observation
from penstock.policy.rollout.rollout import Rollout, RolloutPlan
from penstock.schedule.step import StepShape
from penstock.sim.traffic.prompts import RequestRecord, SimRequest
from penstock.sim.world.facts import Member, Ticket
from penstock.sim.world.gateway import NOWHERE
from penstock.sim.world.messages import Began, Failed, Finished, Rank, WorkerMessage
from penstock.sim.world.world import WORLD, World
from penstock.types import PLATFORM, FinishReason, RequestId, WorkerId, without_version

LOOK_NS = NS_PER_S
_COPY = "copy-"


class Slower(NamedTuple):
    """Steps that take so many times as long as those of `law`."""

    law: StepTime
    times: float

    def step_ns(self, shape: StepShape) -> int:
        """See `StepTime`."""
        return max(1, int(self.law.step_ns(shape) * self.times))

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        """See `StepTime`."""
        return [max(1, int(each_ns * self.times)) for each_ns in self.law.decode_ns(rows, kv_tokens)]


@dataclass(slots=True, frozen=True, kw_only=True)
class Version:
    """The faults of the new version, beside the speed of its workers (`Slower`)."""

    fails: bool = False
    """Its workers refuse every request."""
    garbage: bool = False
    """They compute what is not numbers."""
    babbles: float = 0.0
    """Of this share its answers do not end by themselves."""
    cold_s: float = 0.0
    """So long from the start its steps take `COLD_TIMES` as long."""


COLD_TIMES = 1.8
BABBLE_TOKENS = 256


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutSpec:
    """One rollout, which begins with the run."""

    plan: RolloutPlan
    baseline: str
    version: Version = Version()


@dataclass(slots=True, eq=False)
class _Copy:
    request: SimRequest
    assigned: Assigned
    gateway: int
    worker: WorkerId
    blocks: int
    cached_tokens: int = 0
    first_ns: int = 0
    own: Observation | None = None
    other: Observation | None = None


class SimRollout:
    """In one world; see `Dealer`."""

    def __init__(self, world: World, spec: RolloutSpec) -> None:
        self.spec, self._world = spec, world
        self.rollout = Rollout.begin("simulated", spec.plan, spec.baseline, 0)
        self.got: dict[str, list[str]] = {}
        """By conversation, the versions that it got, one after the other."""
        self.num_copies = 0
        self.ended_ns = 0
        """When it was decided; 0: it is not."""
        self._active = active_of(self.rollout)
        self._dealt: dict[str, Assigned] = {}
        self._copies: dict[RequestId, _Copy] = {}
        self._at: dict[WorkerId, ShadowCopies] = {}
        self._draw = rng.stream(world.spec.seed, "sim/rollout")
        self._tell_record, world.on_record = world.on_record, self._on_record
        world.dealer = self
        for gateway in world.gateways:
            gateway.dealer = self
        for member in world.members.values():
            if member.pool.model == spec.plan.candidate:
                self._spoil(member)
        world.timeline.at(LOOK_NS, WORLD, Rank.TIMER, self._look, None)

    def _spoil(self, member: Member) -> None:
        version, worker = self.spec.version, member.worker
        worker.fails = version.fails
        if version.garbage:
            worker.change_pace(0, 1.0, garbage=True)
        if version.cold_s:
            worker.change_pace(0, COLD_TIMES)
            at_ns = int(version.cold_s * NS_PER_S)
            self._world.timeline.at(at_ns, WORLD, Rank.FAULT, lambda now, _: worker.change_pace(now, 1.0), 0)

    # --- see `Dealer` -------------------------------------------------------------------------------

    def deal(self, request: SimRequest) -> SimRequest:
        """The version that a conversation gets now."""
        plan = self.spec.plan
        if without_version(request.model) != plan.model:
            return request
        tenant = self._world.facts.tenant(request.tenant, request.band)
        conversation = f"{request.tenant}\0{request.session or request.id}"
        version = self.spec.baseline
        if self._active is not None:
            assigned = self._active.assign(lambda: conversation, tenant)
            self._dealt[request.id], version = assigned, assigned.version
        seen = self.got.setdefault(conversation, [])
        if seen[-1:] != [version]:
            seen.append(version)
        request = msgspec.structs.replace(request, model=version)
        if version == plan.candidate and self._draw.random() < self.spec.version.babbles:
            request = msgspec.structs.replace(request, output_tokens=BABBLE_TOKENS)
        return request

    def accepted(self, now_ns: int, gateway: int, request: SimRequest, number: int) -> None:
        """Copy it, if its conversation is in the shadow and there is room."""
        assigned = self._dealt.get(request.id)
        if assigned is None or not assigned.candidate:
            return
        front = self._world.gateways[gateway]
        model_queue = front.control.model_queue(assigned.candidate)
        original = front.control.request(RequestId(request.id))
        assert original is not None, f"{request.id} was just accepted"
        blocks = blocks_of(original.facts.prompt_tokens, original.facts.max_tokens)
        worker = None if model_queue is None else spare_worker(model_queue, self._at, blocks, NOWHERE)
        if worker is None:
            return
        copy_id = RequestId(f"{_COPY}{request.id}")
        start = Start(copy_id, assigned.candidate, worker.id, PRIORITY, 1)
        submission = front.submission(original.facts, Ticket(request, number), start)
        submission = msgspec.structs.replace(submission, fairness_key=PLATFORM, fairness_weight=1.0)
        self._copies[copy_id] = _Copy(request, assigned, gateway, worker.id, blocks)
        there = self._at.setdefault(worker.id, ShadowCopies())
        there.num, there.blocks = there.num + 1, there.blocks + blocks
        self.num_copies += 1
        self._world.submit(now_ns, worker.id, submission)

    def received(self, now_ns: int, message: WorkerMessage) -> None:
        """Of a copy: its answer goes nowhere."""
        copy = self._copies.get(message.id)
        if copy is None:
            return
        if isinstance(message, Began):
            copy.first_ns, copy.cached_tokens = now_ns + self._world.spec.link_ns, message.cached_tokens
        elif isinstance(message, Finished):
            self._finished(now_ns, copy, message)
        elif isinstance(message, Failed):
            self._leave(copy)
            copy.own = self._of_copy(copy, failed=True)
            self._compare(copy)

    def gone(self, worker_id: WorkerId) -> None:
        """Its copies are lost, and count nothing."""
        for copy_id, copy in list(self._copies.items()):
            if copy.worker == worker_id and copy.own is None:
                self._leave(copy)
                del self._copies[copy_id]

    def dispatched(self, now_ns: int, gateway: int) -> None:
        """End the copies that are in the way of requests."""
        if not self._at or self._active is None:
            return
        model_queue = self._world.gateways[gateway].control.model_queue(self._active.candidate)
        for worker_id, there in list(self._at.items()):
            if num := num_in_the_way(model_queue, worker_id, there):
                running = [each for each in self._copies.items() if each[1].worker == worker_id]
                for copy_id, copy in [each for each in running if each[1].own is None][-num:]:
                    self._world.abort(now_ns, gateway, worker_id, copy_id)
                    self._leave(copy)
                    del self._copies[copy_id]

    # --- what is held against each other ------------------------------------------------------------

    def _on_record(self, record: RequestRecord) -> None:
        self._tell_record(record)
        assigned = self._dealt.pop(record.id, None)
        if assigned is None or assigned.cohort is Cohort.REST:
            return
        seen = self._observed(assigned, record)
        if assigned.cohort is not Cohort.SHADOW:
            if seen is not None:
                self.rollout.take(seen)
        elif (copy := self._copies.get(copy_id := RequestId(f"{_COPY}{record.id}"))) is not None:
            copy.other = seen
            if seen is None and copy.own is None:  # Its client has left.
                self._world.abort(self._world.timeline.now_ns(), copy.gateway, copy.worker, copy_id)
                self._leave(copy)
            if seen is None:
                del self._copies[copy_id]
            self._compare(copy)

    def _observed(self, assigned: Assigned, record: RequestRecord) -> Observation | None:
        failed = record.outcome in (Outcome.FAILED, Outcome.EVICTED, Outcome.REJECTED)
        if not failed and record.outcome is not Outcome.FINISHED:
            return None
        return Observation(
            assigned.rollout,
            is_canary=assigned.cohort is Cohort.CANARY,
            group=assigned.group,
            failed=failed,
            cut_off=record.completion_tokens >= BABBLE_TOKENS,
            tokens=record.completion_tokens,
            tpot_ns=record.tpot_ns,
            rows=self._rows_at(WorkerId(record.worker)),
            prefill_ns=max(0, record.ttft_ns - record.queue_ns) if record.first_ns >= 0 else 0,
            uncached_tokens=record.prompt_tokens - record.cached_tokens,
        )

    def _finished(self, now_ns: int, copy: _Copy, message: Finished) -> None:
        self._leave(copy)
        failed = message.reason == FinishReason.ERROR
        own = self._of_copy(copy, failed=failed)
        tokens, end_ns = message.usage.completion_tokens, now_ns + self._world.spec.link_ns
        copy.own = msgspec.structs.replace(
            own,
            tokens=tokens,
            cut_off=tokens >= BABBLE_TOKENS,
            tpot_ns=(end_ns - copy.first_ns) // (tokens - 1) if copy.first_ns and tokens > 1 else 0,
        )
        self._compare(copy)

    def _of_copy(self, copy: _Copy, *, failed: bool) -> Observation:
        request = copy.request
        return Observation(
            copy.assigned.rollout,
            is_canary=True,
            group=copy.assigned.group,
            failed=failed,
            rows=self._rows_at(copy.worker),
            prefill_ns=copy.first_ns - request.at_ns if copy.first_ns else 0,
            uncached_tokens=request.prompt_tokens - copy.cached_tokens,
        )

    def _compare(self, copy: _Copy) -> None:
        """Both have ended: the two count."""
        if copy.own is None or copy.other is None:
            return
        self._copies.pop(RequestId(f"{_COPY}{copy.request.id}"), None)
        self.rollout.take(copy.own)
        self.rollout.take(copy.other)

    def _leave(self, copy: _Copy) -> None:
        there = self._at[copy.worker]
        there.num, there.blocks = there.num - 1, there.blocks - copy.blocks
        assert there.num >= 0, "no more leave than came"
        if not there.num:
            del self._at[copy.worker]

    def _rows_at(self, worker_id: WorkerId) -> int:
        member = self._world.members.get(worker_id)
        return 0 if member is None else member.worker.report(self._world.timeline.now_ns()).running

    # --- every second -------------------------------------------------------------------------------

    def _look(self, now_ns: int, _: None) -> None:
        if self._world.is_over:
            return
        if self.rollout.judge(now_ns):
            self._active = active_of(self.rollout)
            if not self.rollout.is_live:
                self.ended_ns = now_ns
        self._world.timeline.at(now_ns + LOOK_NS, WORLD, Rank.TIMER, self._look, None)

    def changes(self) -> int:
        """The most changes of version that a conversation has seen."""
        return max((len(each) - 1 for each in self.got.values()), default=0)

    def versions_of(self, records: Sequence[RequestRecord]) -> dict[str, int]:
        """How many of these requests each version answered."""
        found: dict[str, int] = {}
        for each in records:
            found[each.model] = found.get(each.model, 0) + 1
        return found
