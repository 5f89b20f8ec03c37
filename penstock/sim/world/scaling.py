"""The autoscaler over a simulated fleet: what it sees every five seconds, and carrying out what it decides.

The same `Autoscaler` as in `penstock serve`, or, for comparisons, any other `Decider`. Workers take their
cold start, drawn between two bounds; who leaves is drained, the least loaded first. Failures of
machines are data: a pool that is revoked or lost at some time, and gets no new machines for a while.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.config.scale import ScaleConfig
from penstock.policy.admission.admit import Promises
from penstock.policy.capacity.autoscaler import Autoscaler, ScaleDecision, ScaleState
from penstock.policy.capacity.forecast import Demand
from penstock.policy.capacity.opinions import Learned
from penstock.policy.capacity.signals import PoolState, Signals, work_of
from penstock.policy.flow import Outcome
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.terms import queue_terms
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.world.facts import Member
from penstock.sim.world.messages import Rank
from penstock.sim.world.run import PoolSpec
from penstock.sim.world.world import WORLD, World
from penstock.types import WorkerId

LOOK_NS = 5 * NS_PER_S
_CRASH_NS = 1


class Decider(Protocol):
    """Decides how many workers there are."""

    def decide(self, seen: Signals) -> ScaleDecision:
        """Called every five seconds."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Outage:
    """All machines of a pool are taken away at once."""

    pool: str
    at_s: float
    notice_s: float = 0.0
    """They are told so much before, and drain; 0: they are gone at once."""
    lasts_s: float = 0.0
    """So long nothing starts there."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ScalingSpec:
    """The scaling of a world's pools."""

    scale: ScaleConfig
    pools: tuple[str, ...] = ("",)
    """Names of the world's pools, in their order."""
    cold_start_s: tuple[float, float] = (30.0, 120.0)
    """Each worker's is drawn between the two."""
    outages: tuple[Outage, ...] = ()
    season_s: float = 86_400.0
    """The length of a day."""
    decider: Callable[[str, ScaleConfig], Decider] | None = None
    """Instead of the product's."""


def autoscaler(model: str, spec: ScalingSpec) -> Autoscaler:
    """The product's, whose days are as long as the simulation's."""
    demand = Demand(season_s=spec.season_s)
    return Autoscaler(model, spec.scale, ScaleState(learned=Learned(demand=demand)))


@dataclass(slots=True)
class _Ended:
    """Since the last look."""

    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    cold_starts_s: list[float] = field(default_factory=list[float])


class Scaling:
    """Over one world, whose pools are of one model."""

    def __init__(self, world: World, spec: ScalingSpec) -> None:
        self.spec, self._world = spec, world
        self.model = world.spec.pools[0].model
        self._pools: Mapping[str, PoolSpec] = dict(zip(spec.pools, world.spec.pools, strict=True))
        assert all(pool.model == self.model for pool in self._pools.values()), "one model is scaled"
        make = spec.decider
        self.decider: Decider = autoscaler(self.model, spec) if make is None else make(self.model, spec.scale)
        self.decisions: list[ScaleDecision] = []
        self.seen: list[Signals] = []
        self._draw = rng.stream(world.spec.seed, "sim/scaling")
        self._promises = Promises(world.spec.config.admission)
        bands = queue_terms(world.spec.config.queue).bands
        self._protected = {band.name for band in bands if band.order < 0}
        self._ended, self._in_system = _Ended(), 0
        self._asked_ns: dict[WorkerId, int] = {}
        self._closed_until: dict[str, int] = {}
        self._tell_record, world.on_record = world.on_record, self._on_record
        for outage in spec.outages:
            world.timeline.at(int(outage.at_s * NS_PER_S), WORLD, Rank.FAULT, self._on_outage, outage)
        world.timeline.at(LOOK_NS, WORLD, Rank.TIMER, self._look, None)

    def _on_record(self, record: RequestRecord) -> None:
        self._ended.records.append(record)
        self._tell_record(record)

    def _look(self, now_ns: int, _: None) -> None:
        if self._world.is_over:
            return
        seen = self._signals(now_ns)
        decision = self.decider.decide(seen)
        self.seen.append(seen)
        self.decisions.append(decision)
        if decision.acts:
            for name, count in decision.pools.items():
                self._resize(now_ns, name, count)
        self._expect(now_ns, decision.cold_start_s)
        self._world.timeline.at(now_ns + LOOK_NS, WORLD, Rank.TIMER, self._look, None)

    # --- what it sees -------------------------------------------------------------------------------

    def _signals(self, now_ns: int) -> Signals:
        ended, self._ended = self._ended, _Ended()
        waiting, running = self._load()
        in_system, before = waiting + running, self._in_system
        self._in_system = in_system
        for member in self._members():
            asked_ns = self._asked_ns.get(member.worker.id)
            if member.ready and asked_ns is not None:
                del self._asked_ns[member.worker.id]
                ended.cold_starts_s.append((now_ns - asked_ns) / NS_PER_S)
        answered = [each for each in ended.records if each.outcome is Outcome.FINISHED and each.first_ns >= 0]
        shed = sum(each.outcome in (Outcome.REJECTED, Outcome.EVICTED) for each in ended.records)
        work = [work_of(each.prompt_tokens, each.cached_tokens, each.completion_tokens) for each in answered]
        protected = sum(
            amount for each, amount in zip(answered, work, strict=True) if each.band in self._protected
        )
        blocks, used = self._kv()
        return Signals(
            now_ns=now_ns,
            wall_ns=now_ns,
            window_s=LOOK_NS / NS_PER_S,
            pools=tuple(self._state(now_ns, name) for name in self._pools),
            arrived=max(0, len(ended.records) + in_system - before),
            answered=len(answered),
            shed=shed,
            work=sum(work),
            protected_share=protected / sum(work) if work else 0.0,
            due=len(answered),
            late=sum(not self._is_kept(each) for each in answered),
            ttft_p95_s=_quantile([each.ttft_ns for each in answered], 0.95),
            ttft_p99_s=_quantile([each.ttft_ns for each in answered], 0.99),
            tpot_p95_s=_quantile([each.tpot_ns for each in answered], 0.95),
            wait_p95_s=_quantile([each.queue_ns for each in answered], 0.95),
            waiting=waiting,
            running=running,
            kv_use=used / blocks if blocks else 0.0,
            cold_starts_s=tuple(ended.cold_starts_s),
        )

    def _load(self) -> tuple[int, int]:
        waiting = running = 0
        for gateway in self._world.gateways:
            model_queue = None if gateway.is_gone else gateway.control.model_queue(self.model)
            if model_queue is not None:
                waiting += model_queue.queue.num_waiting
                running += model_queue.workers.num_running
        return waiting, running

    def _kv(self) -> tuple[int, int]:
        reports = [
            each.worker.report(self._world.timeline.now_ns()) for each in self._members() if each.ready
        ]
        return sum(each.blocks_total for each in reports), sum(each.blocks_used for each in reports)

    def _is_kept(self, record: RequestRecord) -> bool:
        return self._promises.of(tier="", band=record.band).is_kept(record.ttft_ns, record.tpot_ns)

    def _state(self, now_ns: int, name: str) -> PoolState:
        members = self._members(name)
        ready = [each for each in members if each.ready and not each.draining]
        return PoolState(
            name=name,
            ready=len(ready),
            pending=sum(not each.ready and not each.draining for each in members),
            draining=sum(each.draining for each in members),
            slots=sum(each.worker.spec.engine.max_running for each in ready),
            trouble="no machines are to be had" if now_ns < self._closed_until.get(name, 0) else "",
        )

    def _members(self, name: str | None = None) -> list[Member]:
        pools = self._pools.values() if name is None else (self._pools[name],)
        return [
            each
            for each in self._world.members.values()
            if not each.worker.is_gone and any(each.pool is pool for pool in pools)
        ]

    # --- what it does -------------------------------------------------------------------------------

    def _resize(self, now_ns: int, name: str, count: int) -> None:
        there = [each for each in self._members(name) if not each.draining]
        for _ in range(count - len(there)):
            low, high = self.spec.cold_start_s
            before = set(self._world.members)
            self._world.start(
                now_ns, self._pools[name], int((low + self._draw.random() * (high - low)) * NS_PER_S)
            )
            self._asked_ns |= dict.fromkeys(self._world.members.keys() - before, now_ns)
        leaving: Sequence[Member] = sorted(
            (each for each in there if each.ready), key=lambda each: (each.worker.num_streams, each.worker.id)
        )
        for member in leaving[: max(0, len(there) - count)]:
            self._world.drain(now_ns, member)

    def _expect(self, now_ns: int, cold_start_s: float) -> None:
        """While there is no worker at all, requests wait for one that will come."""
        to_come = WorkerId(f"{self.model}-to-come")
        is_needed = not any(each.ready and not each.draining for each in self._members())
        view = WorkerView(ready=False, wake_ns=int(cold_start_s * NS_PER_S)) if is_needed else None
        for gateway in self._world.gateways:
            if not gateway.is_gone:
                gateway.control.set_worker(now_ns, self.model, to_come, view)

    def _on_outage(self, now_ns: int, outage: Outage) -> None:
        self._closed_until[outage.pool] = now_ns + int(outage.lasts_s * NS_PER_S)
        notice_ns = int(outage.notice_s * NS_PER_S)
        for member in self._members(outage.pool):
            if notice_ns:
                self._world.drain(now_ns, member)
            self._world.timeline.at(now_ns + notice_ns + _CRASH_NS, WORLD, Rank.FAULT, self._on_taken, member)

    def _on_taken(self, now_ns: int, member: Member) -> None:
        if not member.worker.is_gone:
            self._world.crash(now_ns, member)


def _quantile(times_ns: Sequence[int], share: float) -> float:
    """Seconds."""
    ordered = sorted(times_ns)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / NS_PER_S if ordered else 0.0
