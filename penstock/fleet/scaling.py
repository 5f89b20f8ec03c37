"""Carries capacity decisions out: hears what came and how workers are, decides every five seconds.

One for each server: in the gateway that is alone, or in the parent of several gateway processes. A server
decides for the workers that it launches. Replicas of a Kubernetes workload are there for all servers that
share a store: one of these decides (leadership.py), and the others tell it what came to them. Every
decision, with all that it was made from, is on record (scale_report.py); changes are in the audit trail too.
The learned state (the rate of a worker, its cold start, the times at which work comes) is kept over a
restart.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.tree import Config
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.kept_file import KeptFile
from penstock.fleet.leadership import Leadership
from penstock.fleet.registry import Registry
from penstock.fleet.scale_model import AtWorkers, KeptScale, ModelScale, work_in
from penstock.fleet.scale_report import ScaleAsk, ScaleReport, ScaleReports, Trail, point_of
from penstock.policy.capacity.autoscaler import ScaleBudget, ScaleDecision, per_hour, pool_config
from penstock.telemetry.audit import Notes
from penstock.telemetry.catalog import CATALOG
from penstock.telemetry.counts import Counts, Series
from penstock.telemetry.instruments import Gauge, Instruments, MetricFamily
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.log import Log
from penstock.types import WorkerId

LOOK_S, TICK_S = 5.0, 0.5
"""Decisions, and looks for requests that wait for a model without workers."""
SAVE_S = 60.0
WANTED = "penstock_scale_wanted_workers"
PART = "scaling"


class _Seen(msgspec.Struct, array_like=True):
    """The load of one model at a server that does not decide."""

    model: str
    waiting: int
    counts: Counts
    protected_work: float
    busy: tuple[WorkerId, ...] = ()


class _Led(msgspec.Struct, array_like=True):
    """One model, from the server that decides."""

    kept: KeptScale
    report: ScaleReport
    to_come_s: float | None
    leaving: tuple[WorkerId, ...] = ()


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
        leadership: Leadership | None = None,
    ) -> None:
        """`config` has budgets and bands; without `leadership` this server decides alone."""
        self._models = {each.model: each for each in models}
        self._registry, self._clock, self._log = registry, clock, log
        self._accelerators_max, self._per_hour_max = config.fleet.accelerators_max, config.fleet.per_hour_max
        self._protected = {band.name for band in config.queue.bands if band.order < 0}
        files = scaling_files(config)
        self._file = KeptFile(files and files[0], "what was learned about capacity", log)
        self._leadership = leadership if any(each.is_shared for each in models) else None
        if self._leadership is not None:
            self._leadership.parts[PART] = self
        self._trail = Trail(files and files[1], log)
        self.notes: Notes | None = None
        """For the audit trail; set before `start`."""
        self.waiting: Callable[[], Mapping[str, int]] = dict
        """Requests in the queues of all gateway processes, by model."""
        self.publish: Callable[[Mapping[str, float]], None] = lambda _: None
        """Told which models requests may wait for although they have no worker, and for how many seconds."""
        self._reported: dict[str, float] | None = None
        self._to_come: dict[str, float] = {}
        """The same of models for which another server decides."""
        self._saved_ns = clock.now_ns()
        self._task: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._models)

    async def start(self) -> None:
        """Take over what was learned before, and begin to decide, if any model scales."""
        if not self._models:
            return
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

    def received(self, rows: Iterable[tuple[Series, Counts]]) -> None:
        """Requests have ended."""
        for series, counts in rows:
            if (model := self._models.get(series.model)) is None:
                continue
            model.count(counts, work_in(counts) if series.band in self._protected else 0.0)

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
            Overloaded: another server decides, and does not answer.
        """
        if (order := ask.order) is None:
            return self.report(ask.model)
        if not order.model and len(self._models) > 1:
            raise InvalidRequest("'model' is needed: several models scale.", param="model")
        self.report(order.model)
        model = self._models[order.model] if order.model else next(iter(self._models.values()), None)
        if model is None:
            raise NotFound("No model scales (models[].scale.max).", code="model_not_found")
        if not self._decides(model):
            assert self._leadership is not None, "else this server decides"
            return msgspec.json.decode(await self._leadership.ask(PART, _encode(ask)), type=ScaleReports)
        if order.workers is None:
            model.override = None
            self._note("scaling by load", model.model, "an operator's order is taken back", ask.by)
        else:
            model.order(self._wall_ns(model), order, order.workers, ask.by)
            why = f"{order.workers} workers for {order.for_s:g} s"
            self._note("scaling by hand", model.model, why, ask.by)
        await self._look(model, self._budget(model))
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
        for model in self._models.values():
            if not self._decides(model):
                await model.follow()
        due = [
            each
            for each in self._models.values()
            if self._decides(each)
            and (now_ns - each.looked_ns >= LOOK_S * NS_PER_S or self._has_nobody(each, waiting))
        ]
        if not due:
            return
        for model in sorted(due, key=lambda each: -self._urgency(each, waiting)):
            for pool in model.pools:
                await pool.look()
            if self._decides(model):  # That may have taken a while.
                await self._look(model, self._budget(model))
        self._publish()
        if self._trail.has_changes:
            await asyncio.to_thread(self._trail.write)
        if now_ns - self._saved_ns >= SAVE_S * NS_PER_S:
            await self._save()

    def _decides(self, model: ModelScale) -> bool:
        """Whether it is this server that decides for a model, surely."""
        return self._leadership is None or not model.is_shared or self._leadership.token > 0

    def _wall_ns(self, model: ModelScale) -> int:
        """The date: of the store, for workers that several servers share."""
        shared = self._leadership if model.is_shared else None
        return self._clock.wall_ns() if shared is None else shared.wall_ns()

    def _has_nobody(self, model: ModelScale, waiting: Mapping[str, int]) -> bool:
        """Whether requests wait for a model for which nothing is on its way: that cannot wait."""
        now_ns = self._clock.now_ns()
        if not waiting.get(model.model) and not model.waits_elsewhere(now_ns):
            return False
        if now_ns - model.looked_ns < TICK_S * NS_PER_S:
            return False
        return not any(state.ready or state.pending for state in model.states())

    def _urgency(self, model: ModelScale, waiting: Mapping[str, int]) -> float:
        """The order in which models share a budget that does not suffice: the latest answers come first."""
        counts = model.counts
        late = counts.ttft_late / counts.ttft_due if counts.ttft_due else 0.0
        return late + counts.outcomes.get("shed", 0) + waiting.get(model.model, 0) / 100

    def _budget(self, model: ModelScale) -> ScaleBudget:
        """The smallest one that a budget leaves. Money is counted in workers of the model's dearest pool."""
        states = {name: each.states() for name, each in self._models.items()}
        budgets = [ScaleBudget()]
        if self._accelerators_max:
            used = sum(p.ready + p.pending + p.draining for found in states.values() for p in found)
            by = f"fleet.accelerators_max is {self._accelerators_max}"
            budgets.append(ScaleBudget(workers=max(0, self._accelerators_max - used), by=by))
        price = max((pool_config(model.scale, p.name).price for p in model.pools), default=0.0)
        if self._per_hour_max and price:
            spent = sum(per_hour(self._models[name].scale, found) for name, found in states.items())
            left = max(0.0, self._per_hour_max - spent)
            by = f"fleet.per_hour_max is {self._per_hour_max:g}"
            budgets.append(ScaleBudget(workers=int((left + 1e-9) / price), by=by))
        return min(budgets, key=lambda budget: budget.workers)

    async def _look(self, model: ModelScale, budget: ScaleBudget) -> None:
        now_ns, wall_ns = self._clock.now_ns(), self._wall_ns(model)
        if model.override is not None and wall_ns >= model.override.until_ns:
            self._note("scaling by load", model.model, "an operator's order has expired", "")
            model.override = None
        waiting = self.waiting().get(model.model, 0) + model.waits_elsewhere(now_ns)
        seen = model.signals(now_ns, wall_ns, waiting, self._at_workers(model.model))
        self._trail.begin(model.scaler)
        decision = model.scaler.decide(seen, budget)
        self._trail.keep(seen, budget, decision)
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

    def _at_workers(self, model: str) -> AtWorkers:
        running = total = used = 0
        headroom = 1.0
        for worker in self._registry.of(model):
            if worker.cell is None and (stats := worker.backend.status.stats) is not None:
                running += stats.running + stats.waiting
                if worker.is_ready:
                    total += stats.blocks_total
                    used += stats.blocks_used
                    if (memory := stats.readings) is not None and memory.cgroup_limit_bytes:
                        headroom = min(headroom, 1 - memory.cgroup_bytes / memory.cgroup_limit_bytes)
        return AtWorkers(running, used / total if total else 0.0, headroom)

    def _publish(self) -> None:
        reported = {
            each.model: each.scaler.state.learned.cold.expected_s
            for each in self._models.values()
            if self._decides(each) and each.comes()
        } | self._to_come
        if reported != self._reported:
            self._reported = reported
            self.publish(reported)

    def _report(self, each: ModelScale) -> ScaleReport:
        leader = self._leadership.holder if self._leadership is not None and each.is_shared else ""
        return each.report(decides=self._decides(each), leader=leader)

    def _note(self, what: str, model: str, why: str, by: str) -> None:
        if self.notes is not None:
            self.notes.note("admin" if by else "server", what, model, why=why, by=by)

    # --- several servers ----------------------------------------------------------------------------

    def state(self) -> bytes:
        """See `LedPart`."""
        led = {
            each.model: _Led(
                each.kept, self._report(each),
                each.scaler.state.learned.cold.expected_s if each.comes() else None,
                tuple(worker_id for pool in each.shared for worker_id in pool.leaving()),
            )
            for each in self._models.values()
            if each.is_shared
        }  # fmt: skip
        return _encode(led)

    def adopt(self, state: bytes, *, leads: bool) -> None:
        """See `LedPart`."""
        led = msgspec.json.decode(state, type=dict[str, _Led]) if state else {}
        for name, found in led.items():
            if (model := self._models.get(name)) is None or not model.is_shared:
                continue
            model.reported, model.leaving = found.report, found.leaving
            if leads:
                self._take_up(model, found.kept)
        for model in self._models.values():
            if leads and model.is_shared:
                model.looked_ns = self._clock.now_ns()
        self._to_come = {} if leads else {n: each.to_come_s for n, each in led.items() if each.to_come_s}
        self._publish()

    def seen(self) -> bytes:
        """See `LedPart`."""
        waiting, found = self.waiting(), list[_Seen]()
        for each in self._models.values():
            if each.is_shared:
                found.append(_Seen(each.model, waiting.get(each.model, 0), *each.take_counts(), each.busy))
        return _encode(found)

    def hear(self, who: str, body: bytes) -> None:
        """See `LedPart`."""
        for seen in msgspec.json.decode(body, type=list[_Seen]):
            if (model := self._models.get(seen.model)) is not None:
                model.count(seen.counts, seen.protected_work)
                model.hear_waiting(self._clock.now_ns(), who, seen.waiting)
                for pool in model.shared:
                    pool.hear_busy(who, seen.busy)

    async def answer(self, body: bytes) -> bytes:
        """See `LedPart`."""
        return _encode(await self.ask(msgspec.json.decode(body, type=ScaleAsk)))

    # --- over a restart -----------------------------------------------------------------------------

    async def _load(self) -> None:
        if not (body := await self._file.load()):
            return
        try:
            kept = msgspec.json.decode(body, type=dict[str, KeptScale])
        except msgspec.DecodeError as error:
            self._file.damaged(error)
            return
        for name, found in kept.items():
            if (model := self._models.get(name)) is not None:
                self._take_up(model, found)

    async def _save(self) -> None:
        self._saved_ns = self._clock.now_ns()
        await asyncio.to_thread(self._trail.write)
        if self._models:
            kept = {name: each.kept for name, each in self._models.items()}
            await self._file.save(_encode(kept))

    def _take_up(self, model: ModelScale, kept: KeptScale) -> None:
        model.take_up(kept)
        self._trail.restart(model.model)


_encode = msgspec.json.Encoder().encode


def _said(decision: ScaleDecision) -> str:
    return f"{decision.ready} ready and {decision.pending} starting -> {decision.workers}: {decision.why}"
