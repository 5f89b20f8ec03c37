"""One model that scales: its pools and autoscaler, what came since the last look, and how that is told."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.scale import ScaleConfig
from penstock.errors import InvalidRequest
from penstock.fleet.scale_pools import ScalePool, SharedPool
from penstock.fleet.scale_report import PoolReport, ScaleOrder, ScalePoint, ScaleReport
from penstock.policy.capacity.autoscaler import Autoscaler, ScaleDecision, ScaleState, pool_config
from penstock.policy.capacity.signals import Override, PoolState, Signals, work_of
from penstock.telemetry.counts import Counts
from penstock.types import WorkerId

KEPT_MAX, MOVES_MAX = 180, 50
"""Looks (a quarter of an hour), and decisions that changed something, which are told."""
FOR_S_MAX = 30 * 24 * 3600.0
RECEIVED_S = 5.0
"""Requests that wait at another server count for so long after it told them."""
_NOT_LOAD = frozenset({"rejected", "limited"})
"""Outcomes of requests that no worker would have had to answer."""


class KeptScale(msgspec.Struct, kw_only=True):
    """The state of one model, as it is kept over a restart or handed to another server."""

    state: ScaleState
    override: Override | None = None


class AtWorkers(NamedTuple):
    """The load of a model's workers, as they report it."""

    running: int
    kv_use: float
    """Share of the ready ones' KV blocks that is in use."""
    memory_headroom: float = 1.0


class ModelScale:
    """See the module."""

    def __init__(self, model: str, scale: ScaleConfig, pools: Sequence[ScalePool]) -> None:
        self.model, self.scale, self.pools = model, scale, tuple(pools)
        self.scaler = Autoscaler(model, scale)
        self.override: Override | None = None
        self.counts, self.protected_work = Counts(), 0.0
        self.in_system, self.looked_ns = 0, 0
        self.decision: ScaleDecision | None = None
        self.seen: Signals | None = None
        self.moves: deque[ScaleDecision] = deque(maxlen=MOVES_MAX)
        self.points: deque[ScalePoint] = deque(maxlen=KEPT_MAX)
        self._elsewhere: dict[str, tuple[int, int]] = {}
        """Requests that wait at other servers, and when that was heard."""
        self.shared = tuple(pool for pool in self.pools if isinstance(pool, SharedPool))
        """Pools whose workers are there for several servers."""
        self.reported: ScaleReport | None = None
        """As the server that decides has it; None: that is this one."""
        self.leaving: tuple[WorkerId, ...] = ()
        """Workers that leave, by the server that decides."""
        self.busy: tuple[WorkerId, ...] = ()
        """Of them, those that have streams of this server."""

    @property
    def is_shared(self) -> bool:
        """Whether another server may decide for it."""
        return bool(self.shared)

    async def follow(self) -> None:
        """Do as the server that decides says."""
        found = [await pool.follow(self.leaving) for pool in self.shared]
        self.busy = tuple(each for busy in found for each in busy)

    @property
    def kept(self) -> KeptScale:
        """All that is remembered."""
        return KeptScale(state=self.scaler.state, override=self.override)

    def take_up(self, kept: KeptScale) -> None:
        """Take over what was learned: times of a clock that began anew, or of another machine, mean
        nothing.
        """
        state = kept.state
        state.wanted, state.out_ns, state.in_ns, state.learned.asked_ns = [], 0, 0, 0
        state.begun_ns = None
        self.scaler.state, self.override = state, kept.override

    def states(self) -> tuple[PoolState, ...]:
        """How the pools are now."""
        return tuple(pool.state() for pool in self.pools)

    def count(self, counts: Counts, protected_work: float) -> None:
        """Requests have ended."""
        self.counts.add(counts)
        self.protected_work += protected_work

    def take_counts(self) -> tuple[Counts, float]:
        """Requests that have ended since this was last asked, and the work in bands that go first."""
        counts, self.counts = self.counts, Counts()
        protected, self.protected_work = self.protected_work, 0.0
        return counts, protected

    def hear_waiting(self, now_ns: int, who: str, waiting: int) -> None:
        """So many wait at another server."""
        self._elsewhere[who] = now_ns, waiting

    def waits_elsewhere(self, now_ns: int) -> int:
        """Requests in the queues of other servers, by what these told of late."""
        oldest_ns = now_ns - int(RECEIVED_S * NS_PER_S)
        self._elsewhere = {who: each for who, each in self._elsewhere.items() if each[0] >= oldest_ns}
        return sum(waiting for _, waiting in self._elsewhere.values())

    def comes(self) -> bool:
        """Whether it has no worker, and will have one: one is on its way, or a request may start one."""
        states, decision = self.states(), self.decision
        if any(state.ready for state in states):
            return False
        if any(state.pending or state.asleep for state in states):
            return True
        is_kept_off = self.override is not None and not self.override.workers
        return not is_kept_off and (self.scale.mode == "act" if decision is None else decision.acts)

    def signals(self, now_ns: int, wall_ns: int, waiting: int, workers: AtWorkers) -> Signals:
        """The facts since the last look, and of now; `waiting` in the queues of all servers."""
        counts, protected = self.take_counts()
        states = self.states()
        cold = tuple(each for pool in self.pools for each in pool.take_cold_starts())
        window_s = max(1e-3, (now_ns - self.looked_ns) / NS_PER_S)
        self.looked_ns, work = now_ns, work_in(counts)
        ended = sum(count for name, count in counts.outcomes.items() if name not in _NOT_LOAD)
        arrived = max(0, ended + waiting + workers.running - self.in_system)
        self.in_system = waiting + workers.running
        return Signals(
            now_ns=now_ns,
            wall_ns=wall_ns,
            window_s=window_s,
            pools=states,
            arrived=arrived,
            answered=counts.ttft.count,
            shed=counts.outcomes.get("shed", 0),
            work=work,
            protected_share=protected / work if work else 0.0,
            due=counts.ttft_due,
            late=min(counts.ttft_due, counts.ttft_late + counts.tpot_late),
            ttft_p95_s=_seconds(counts.ttft.quantile_ms(0.95)),
            ttft_p99_s=_seconds(counts.ttft.quantile_ms(0.99)),
            tpot_p95_s=_seconds(counts.tpot.quantile_ms(0.95)),
            wait_p95_s=_seconds(counts.queue.quantile_ms(0.95)),
            waiting=waiting,
            running=workers.running,
            kv_use=workers.kv_use,
            memory_headroom=workers.memory_headroom,
            cold_starts_s=cold,
            override=self.override,
        )

    def order(self, wall_ns: int, order: ScaleOrder, workers: int, by: str) -> None:
        """So many workers for a while.

        Raises:
            InvalidRequest: the order contradicts the bounds.
        """
        if not 0 <= workers <= self.scale.max:
            raise InvalidRequest(
                f"Invalid 'workers': expected 0 to {self.scale.max} (models[].scale.max), got {workers}.",
                param="workers",
                code="invalid_value",
            )
        if not 0 < order.for_s <= FOR_S_MAX:
            raise InvalidRequest(
                f"Invalid 'for_s': expected more than 0 and at most {FOR_S_MAX:.0f} seconds.",
                param="for_s",
                code="invalid_value",
            )
        until_ns = wall_ns + int(order.for_s * NS_PER_S)
        self.override = Override(workers=workers, until_ns=until_ns, by=by)

    def report(self, *, decides: bool, leader: str) -> ScaleReport:
        """How things are, as operators see them."""
        if self.reported is not None and not decides:
            return msgspec.structs.replace(self.reported, leads=False, leader=leader)
        states, decision, scale = self.states(), self.decision, self.scale
        targets = {state.name: state.ready + state.pending for state in states}
        if decision is not None and not decision.is_frozen:
            targets |= decision.pools
        pools = [
            PoolReport(
                name=state.name, ready=state.ready, pending=state.pending, draining=state.draining,
                asleep=state.asleep, workers=targets[state.name],
                max=min(scale.max, (pool := pool_config(scale, state.name)).max),
                spot=pool.spot, price=pool.price, trouble=state.trouble,
            )
            for state in states
        ]  # fmt: skip
        return ScaleReport(
            model=self.model, mode=scale.mode, min=scale.min, max=scale.max, standby=scale.standby,
            workers=sum(targets.values()), ready=sum(state.ready for state in states), pools=pools,
            override=self.override, decision=decision, signals=self.seen, moves=list(self.moves),
            points=list(self.points), leads=decides, leader=leader,
        )  # fmt: skip


def work_in(counts: Counts) -> float:
    """Of the requests that ended."""
    return work_of(counts.prompt_tokens, counts.cached_tokens, counts.generated_tokens)


def _seconds(found_ms: float | None) -> float:
    return 0.0 if found_ms is None else found_ms / 1000
