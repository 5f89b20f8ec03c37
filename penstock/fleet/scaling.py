"""Carries capacity decisions out: hears what came and how workers are, decides every five seconds.

One for each server: in the gateway that is alone, or in the parent of several gateway processes. Every
decision, with all that it was made from, is on record (scale_trail.py); changes are in the audit trail too.
The learned state (the rate of a worker, its cold start, the times at which work comes) is kept over a
restart.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.scale import ScaleConfig
from penstock.config.tree import Config
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.registry import Registry
from penstock.fleet.scale_pools import ScalePool
from penstock.fleet.scale_report import (
    PoolReport,
    ScaleAsk,
    ScaleOrder,
    ScalePoint,
    ScaleReport,
    ScaleReports,
    point_of,
)
from penstock.fleet.scale_trail import Trail
from penstock.policy.capacity.allot import per_hour, pool_config
from penstock.policy.capacity.autoscaler import Autoscaler, Decision, Room, ScaleState
from penstock.policy.capacity.signals import Override, PoolState, Signals, work_of
from penstock.telemetry.audit import Notes
from penstock.telemetry.catalog import CATALOG
from penstock.telemetry.counts import Counts, Series
from penstock.telemetry.instruments import Gauge, Instruments, MetricFamily
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log

LOOK_S, TICK_S = 5.0, 0.5
"""Decisions, and looks for requests that wait for a model without workers."""
SAVE_S = 60.0
KEPT_MAX, MOVES_MAX = 180, 50
"""Looks (a quarter of an hour), and decisions that changed something, which are told."""
WANTED = "penstock_scale_wanted_workers"
FOR_S_MAX = 30 * 24 * 3600.0
FILE_BYTES_MAX = 16 * 1024 * 1024
_NOT_LOAD = frozenset({"rejected", "limited"})
"""Outcomes of requests that no worker would have had to answer."""


class ModelScale:
    """All that belongs to one model."""

    def __init__(self, model: str, scale: ScaleConfig, pools: Sequence[ScalePool]) -> None:
        self.model, self.scale, self.pools = model, scale, tuple(pools)
        self.scaler = Autoscaler(model, scale)
        self.override: Override | None = None
        self.counts, self.protected_work = Counts(), 0.0
        self.in_system, self.looked_ns = 0, 0
        self.decision: Decision | None = None
        self.seen: Signals | None = None
        self.moves: deque[Decision] = deque(maxlen=MOVES_MAX)
        self.points: deque[ScalePoint] = deque(maxlen=KEPT_MAX)

    def states(self) -> tuple[PoolState, ...]:
        """How the pools are now."""
        return tuple(pool.state() for pool in self.pools)


class Kept(msgspec.Struct, kw_only=True):
    """The state of one model, as it is in the file."""

    state: ScaleState
    override: Override | None = None


def scaling_files(config: Config) -> tuple[Path, Path] | None:
    """Where what was learned and what was decided are kept: beside the ledger; None: an operator who keeps no
    records does not want these.
    """
    if not config.ledger.enabled:
        return None
    place = ledger_directory(config.ledger)
    return place / "scaling.json", place / "scaling-decisions.jsonl"


class ScaleLeader:
    """See the module."""

    def __init__(
        self,
        models: Sequence[ModelScale],
        config: Config,
        registry: Registry,
        clock: Clock,
        log: Log,
    ) -> None:
        """`config` has budgets and bands."""
        self._models = {each.model: each for each in models}
        self._registry, self._clock, self._log = registry, clock, log
        self._accelerators_max, self._per_hour_max = config.fleet.accelerators_max, config.fleet.per_hour_max
        self._protected = {band.name for band in config.queue.bands if band.order < 0}
        files = scaling_files(config)
        self._path = files and files[0]
        self._trail = Trail(files and files[1], log)
        self.notes: Notes | None = None
        """For the audit trail; set before `start`."""
        self.waiting: Callable[[], Mapping[str, int]] = dict
        """Requests in the queues of all gateway processes, by model."""
        self.publish: Callable[[Mapping[str, float]], None] = lambda _: None
        """Told which models requests may wait for although they have no worker, and for how many seconds."""
        self._told: dict[str, float] | None = None
        self._saved_ns = clock.now_ns()
        self._task: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._models)

    async def start(self) -> None:
        """Take over what was learned before, and begin to decide."""
        await self._load()
        now_ns = self._clock.now_ns()
        for each in self._models.values():
            each.looked_ns = now_ns
        self._task = asyncio.create_task(self._run(), name="scaling")

    async def stop(self) -> None:
        """Decide nothing more, and keep what was learned. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            await self._save()

    def heard(self, rows: Iterable[tuple[Series, Counts]]) -> None:
        """Requests have ended."""
        for series, counts in rows:
            if (model := self._models.get(series.model)) is None:
                continue
            model.counts.add(counts)
            if series.band in self._protected:
                model.protected_work += _work(counts)

    def report(self, model: str = "") -> ScaleReports:
        """How things are: of one model, or of all that scale.

        Raises:
            NotFound: it does not scale.
        """
        if model and model not in self._models:
            known = ", ".join(f"'{name}'" for name in self._models) or "none"
            raise NotFound(
                f"The model '{model[:64]}' does not scale (models[].scale.max). Models that do: {known}.",
                param="model",
                code="model_not_found",
            )
        return ScaleReports(
            [self._report(each) for each in self._models.values() if model in ("", each.model)]
        )

    async def ask(self, ask: ScaleAsk) -> ScaleReports:
        """Carry out what an operator wants, if anything, and say how things are then.

        Raises:
            InvalidRequest: the order contradicts the bounds.
            NotFound: the model does not scale.
        """
        if (order := ask.order) is None:
            return self.report(ask.model)
        if not order.model and len(self._models) > 1:
            raise InvalidRequest("'model' is needed: several models scale.", param="model")
        self.report(order.model)
        model = self._models[order.model] if order.model else next(iter(self._models.values()), None)
        if model is None:
            raise NotFound("No model scales (models[].scale.max).", code="model_not_found")
        if order.workers is None:
            model.override = None
            self._note("scaling by load", model.model, "an operator's order is taken back", ask.by)
        else:
            model.override = self._override(model, order, order.workers, ask.by)
            why = f"{order.workers} workers for {order.for_s:g} s"
            self._note("scaling by hand", model.model, why, ask.by)
        await self._look(model, self._room(model))
        await self._save()
        return self.report(model.model)

    def measure(self, wanted: MetricFamily[Gauge]) -> None:
        """Tell how many workers there are to be, by model and pool."""
        for each in self._models.values():
            for pool in self._report(each).pools:
                wanted.labels(each.model, pool.name).set(pool.workers)

    def page(self) -> bytes:
        """The same as a page of metrics, where no gateway is in this process."""
        table = Instruments(CATALOG)
        self.measure(table.gauge(WANTED))
        return table.page([WANTED])

    # --- deciding -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._tick()
            except Exception as error:  # noqa: BLE001 - a bug at one look must not end scaling.
                self._log.bug("capacity could not be decided", error)
            await sleep(TICK_S)

    async def _tick(self) -> None:
        now_ns, waiting = self._clock.now_ns(), self.waiting()
        due = [
            each
            for each in self._models.values()
            if now_ns - each.looked_ns >= LOOK_S * NS_PER_S or self._has_nobody(each, waiting)
        ]
        if not due:
            return
        for model in sorted(due, key=lambda each: -self._urgency(each, waiting)):
            for pool in model.pools:
                await pool.look()
            await self._look(model, self._room(model))
        self._publish()
        if self._trail.has_news:
            await asyncio.to_thread(self._trail.write)
        if now_ns - self._saved_ns >= SAVE_S * NS_PER_S:
            await self._save()

    def _has_nobody(self, model: ModelScale, waiting: Mapping[str, int]) -> bool:
        """Whether requests wait for a model for which nothing is on its way: that cannot wait."""
        if not waiting.get(model.model) or self._clock.now_ns() - model.looked_ns < TICK_S * NS_PER_S:
            return False
        return not any(state.ready or state.pending for state in model.states())

    def _urgency(self, model: ModelScale, waiting: Mapping[str, int]) -> float:
        """The order in which models share a budget that does not suffice: the latest answers come first."""
        counts = model.counts
        late = counts.ttft_late / counts.ttft_due if counts.ttft_due else 0.0
        return late + counts.outcomes.get("shed", 0) + waiting.get(model.model, 0) / 100

    def _room(self, model: ModelScale) -> Room:
        """The smallest one that a budget leaves. Money is counted in workers of the model's dearest pool."""
        states = {name: each.states() for name, each in self._models.items()}
        rooms = [Room()]
        if self._accelerators_max:
            used = sum(p.ready + p.pending + p.draining for found in states.values() for p in found)
            by = f"fleet.accelerators_max is {self._accelerators_max}"
            rooms.append(Room(workers=max(0, self._accelerators_max - used), by=by))
        price = max((pool_config(model.scale, p.name).price for p in model.pools), default=0.0)
        if self._per_hour_max and price:
            spent = sum(per_hour(self._models[name].scale, found) for name, found in states.items())
            left = max(0.0, self._per_hour_max - spent)
            by = f"fleet.per_hour_max is {self._per_hour_max:g}"
            rooms.append(Room(workers=int((left + 1e-9) / price), by=by))
        return min(rooms, key=lambda room: room.workers)

    async def _look(self, model: ModelScale, room: Room) -> None:
        seen = self._signals(model)
        self._trail.begin(model.scaler)
        decision = model.scaler.decide(seen, room)
        self._trail.keep(seen, room, decision)
        before, model.decision, model.seen = model.decision, decision, seen
        model.points.append(point_of(seen, decision))
        if decision.move != "hold":
            model.moves.appendleft(decision)
            if decision.acts:
                self._note(f"scaled {decision.move}", model.model, _said(decision), "")
            self._log.info(
                f"scaling {decision.move}" if decision.acts else f"scaling would go {decision.move}",
                model=model.model,
                workers=decision.workers,
                ready=decision.ready,
                why=decision.why,
            )
        if decision.held_by and (before is None or before.held_by != decision.held_by):
            self._log.warning("scaling is held back", model=model.model, by=decision.held_by)
            self._note("scaling held back", model.model, decision.held_by, "")
        if decision.acts:
            for pool in model.pools:
                await pool.resize(decision.pools[pool.name])

    def _signals(self, model: ModelScale) -> Signals:
        now_ns, wall_ns = self._clock.now_ns(), self._clock.wall_ns()
        counts, model.counts = model.counts, Counts()
        protected, model.protected_work = model.protected_work, 0.0
        states = model.states()
        cold = tuple(each for pool in model.pools for each in pool.take_cold_starts())
        window_s = max(1e-3, (now_ns - model.looked_ns) / NS_PER_S)
        model.looked_ns = now_ns
        waiting, work = self.waiting().get(model.model, 0), _work(counts)
        running, kv_use = self._workers_say(model.model)
        ended = sum(count for name, count in counts.outcomes.items() if name not in _NOT_LOAD)
        arrived = max(0, ended + waiting + running - model.in_system)
        model.in_system = waiting + running
        if model.override is not None and wall_ns >= model.override.until_ns:
            self._note("scaling by load", model.model, "an operator's order has expired", "")
            model.override = None
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
            running=running,
            kv_use=kv_use,
            cold_starts_s=cold,
            override=model.override,
        )

    def _workers_say(self, model: str) -> tuple[int, float]:
        """Requests at the workers, and the share of the ready ones' KV blocks that is in use."""
        running = total = used = 0
        for worker in self._registry.of(model):
            if worker.cell is None and (stats := worker.backend.status.stats) is not None:
                running += stats.running + stats.waiting
                if worker.is_ready:
                    total += stats.blocks_total
                    used += stats.blocks_used
        return running, used / total if total else 0.0

    def _override(self, model: ModelScale, order: ScaleOrder, workers: int, by: str) -> Override:
        if not 0 <= workers <= model.scale.max:
            raise InvalidRequest(
                f"Invalid 'workers': expected 0 to {model.scale.max} (models[].scale.max), got {workers}.",
                param="workers",
                code="invalid_value",
            )
        if not 0 < order.for_s <= FOR_S_MAX:
            raise InvalidRequest(
                f"Invalid 'for_s': expected more than 0 and at most {FOR_S_MAX:.0f} seconds.",
                param="for_s",
                code="invalid_value",
            )
        until_ns = self._clock.wall_ns() + int(order.for_s * NS_PER_S)
        return Override(workers=workers, until_ns=until_ns, by=by)

    def _publish(self) -> None:
        told = {
            each.model: each.scaler.state.learned.cold.expected_s
            for each in self._models.values()
            if _comes(each)
        }
        if told != self._told:
            self._told = told
            self.publish(told)

    def _report(self, each: ModelScale) -> ScaleReport:
        states, decision = each.states(), each.decision
        targets = {state.name: state.ready + state.pending for state in states}
        if decision is not None and not decision.is_frozen:
            targets |= decision.pools
        pools = [
            PoolReport(
                name=state.name, ready=state.ready, pending=state.pending, draining=state.draining,
                asleep=state.asleep, workers=targets[state.name],
                max=min(each.scale.max, (pool := pool_config(each.scale, state.name)).max),
                spot=pool.spot, price=pool.price, trouble=state.trouble,
            )
            for state in states
        ]  # fmt: skip
        return ScaleReport(
            model=each.model, mode=each.scale.mode, min=each.scale.min, max=each.scale.max,
            standby=each.scale.standby, workers=sum(targets.values()),
            ready=sum(state.ready for state in states), pools=pools,
            override=each.override, decision=decision, signals=each.seen, moves=list(each.moves),
            points=list(each.points),
        )  # fmt: skip

    def _note(self, what: str, model: str, why: str, by: str) -> None:
        if self.notes is not None:
            self.notes.note("admin" if by else "server", what, model, why=why, by=by)

    # --- over a restart -----------------------------------------------------------------------------

    async def _load(self) -> None:
        if self._path is None:
            return
        try:
            body = await asyncio.to_thread(_read, self._path)
            kept = msgspec.json.decode(body, type=dict[str, Kept]) if body else {}
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("what was learned about capacity cannot be read", error=error)
            return
        for name, found in kept.items():
            if (model := self._models.get(name)) is not None:
                state = found.state  # Times of a clock that began anew mean nothing.
                state.wanted, state.out_ns, state.in_ns, state.learned.asked_ns = [], 0, 0, 0
                state.begun_ns = None
                model.scaler.state, model.override = state, found.override

    async def _save(self) -> None:
        self._saved_ns = self._clock.now_ns()
        await asyncio.to_thread(self._trail.write)
        if self._path is None or not self._models:
            return
        kept = {n: Kept(state=each.scaler.state, override=each.override) for n, each in self._models.items()}
        body = msgspec.json.encode(kept)
        try:
            await asyncio.to_thread(_write, self._path, body)
        except OSError as error:
            self._log.warning("what was learned about capacity cannot be kept", error=error)


def _comes(model: ModelScale) -> bool:
    """Whether it has no worker, and will have one: one is on its way, or a request may start one."""
    states, decision = model.states(), model.decision
    if any(state.ready for state in states):
        return False
    if any(state.pending or state.asleep for state in states):
        return True
    is_kept_off = model.override is not None and not model.override.workers
    return not is_kept_off and (model.scale.mode == "act" if decision is None else decision.acts)


def _work(counts: Counts) -> float:
    return work_of(counts.prompt_tokens, counts.cached_tokens, counts.generated_tokens)


def _seconds(found_ms: float | None) -> float:
    return 0.0 if found_ms is None else found_ms / 1000


def _said(decision: Decision) -> str:
    return f"{decision.ready} ready and {decision.pending} starting -> {decision.workers}: {decision.why}"


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(FILE_BYTES_MAX)
    return b""


def _write(path: Path, body: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(body)
    new.replace(path)
