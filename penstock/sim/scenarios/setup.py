"""All of a simulation but its seed (`Setup`: a world, its traffic, its promises and prices), and playing it.

`Judge` says which requests of a run were answered as promised, which is what goodput counts. A promise is
made by band and tier (policy/admission/admit.py), and is never less than `idle_factor` times the time of an
idle worker for the request: its uncached prompt in steps of its own, and one row's step for each further
token. That time comes from what the workers really take, not from what gateways learned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import yaml

from penstock.config.load import convert_config
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config, Scheduling
from penstock.errors import ConfigError
from penstock.planning.step_time import StepTime
from penstock.policy.admission.admit import IDLE_FACTOR, Promise, Promises
from penstock.policy.flow import Outcome
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.schedule.step import StepShape
from penstock.sim.report.figures import Figures, Objective, Run, WorkerUse, figures, wanted_of
from penstock.sim.traffic.prompts import RequestRecord, SimRequest
from penstock.sim.traffic.workload import TrafficSource, merged
from penstock.sim.world.cells import Cells, CellsSpec
from penstock.sim.world.faults import Chaos, InjectedFault
from penstock.sim.world.rollout import RolloutSpec, SimRollout
from penstock.sim.world.run import PoolSpec, SimResult, SimWorkerSpec, WorldSpec
from penstock.sim.world.scaling import Scaling, ScalingSpec
from penstock.sim.world.world import World

_CONTEXT = 512
"""Tokens of the row whose step is the idle worker's time per token."""


class Judge:
    """Of one setup's records."""

    def __init__(
        self, promised: AdmissionConfig, pools: Iterable[PoolSpec], tenants: Mapping[str, Tenant]
    ) -> None:
        """`promised` is what the requests are held against, whatever the gateways were told."""
        self._factor, self._promises, self._tenants = IDLE_FACTOR, Promises(promised), tenants
        self._workers = {pool.model: pool.worker for pool in pools}
        self._tpots = {
            model: worker.step_time.step_ns(StepShape(1, 0, 0, _CONTEXT, 0))
            for model, worker in self._workers.items()
        }

    def promise(self, record: RequestRecord) -> Promise:
        """The promise to a request that was answered."""
        tier = self._tenants.get(record.tenant, ANONYMOUS).tier
        promise = self._promises.of(tier=tier, band=record.band)
        idle_ns = idle_ttft_ns(self._workers[record.model], record.prompt_tokens, record.cached_tokens)
        return promise.on(self._factor, idle_ns, self._tpots[record.model])

    def good(self, record: RequestRecord) -> bool:
        """Whether it was answered as promised."""
        if record.outcome is not Outcome.FINISHED or record.first_ns < 0:
            return False
        return self.promise(record).is_kept(record.ttft_ns, record.tpot_ns)


def idle_ttft_ns(worker: SimWorkerSpec, prompt_tokens: int, cached_tokens: int) -> int:
    """The time of a worker without other work for a prompt."""
    law: StepTime = worker.step_time
    total, done = 0, cached_tokens
    while done < prompt_tokens:
        tokens = min(worker.engine.step_tokens, prompt_tokens - done)
        pairs = tokens * done + tokens * (tokens + 1) // 2
        total += law.step_ns(StepShape(0, 1, tokens, done + tokens, pairs))
        done += tokens
    return total


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """All that a run depends on, beside its seed."""

    world: WorldSpec
    sources: tuple[TrafficSource, ...]
    faults: tuple[InjectedFault, ...] = ()
    seconds: float
    """Of arrivals; the run continues until everything has ended."""
    objective: Objective = field(default_factory=Objective)
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per hour of a worker, by `WorkerSpec.kind`."""
    scaling: ScalingSpec | None = None
    """How the pools scale by their load; None: they do not."""
    rollout: RolloutSpec | None = None
    """A new version that is tried; None: there is none."""
    cells: CellsSpec | None = None
    """The regions are cells that help each other; None: they know nothing of each other."""


@dataclass(slots=True, kw_only=True)
class Played:
    """One run of a setup."""

    seed: int
    setup: Setup
    result: SimResult
    records: list[RequestRecord]
    figures: Figures
    judge: Judge
    scaling: Scaling | None = None
    rollout: SimRollout | None = None
    cells: Cells | None = None

    def good(self, record: RequestRecord) -> bool:
        """Whether it was answered as promised."""
        return self.judge.good(record)


def play(setup: Setup, seed: int, *, on_arrival: Callable[[int], None] | None = None) -> Played:
    """Run it. `on_arrival` gets the virtual time of every arrival, for a progress bar."""
    wanted: dict[str, float] = {}

    def arriving() -> Iterator[SimRequest]:
        for request in merged(setup.sources, seed, setup.seconds):
            wanted[request.tenant] = wanted.get(request.tenant, 0.0) + wanted_of(request)
            if on_arrival is not None:
                on_arrival(request.at_ns)
            yield request

    world = World(replace(setup.world, seed=seed), arriving())
    if setup.faults:
        Chaos(world, setup.faults)
    scaling = Scaling(world, setup.scaling) if setup.scaling is not None else None
    rollout = SimRollout(world, setup.rollout) if setup.rollout is not None else None
    cells = Cells(world, setup.cells) if setup.cells is not None else None
    result = world.run()
    judge = Judge(promised(setup.objective), setup.world.pools, setup.world.tenants)
    run = Run(
        is_good=judge.good,
        records=result.records,
        workers=[
            WorkerUse(
                id=kind, model=kind, kind=kind, paid_ns=paid_ns, busy_ns=busy_ns,
                price_per_hour=setup.prices.get(kind, 0.0),
            )
            for kind, (paid_ns, busy_ns) in sorted(world.use_by_kind.items())
        ],
        wanted=wanted,
        weights={name: tenant.weight for name, tenant in setup.world.tenants.items()},
    )  # fmt: skip
    found = figures(run, setup.objective)
    return Played(
        seed=seed, setup=setup, result=result, records=result.records, figures=found, judge=judge,
        scaling=scaling, rollout=rollout, cells=cells,
    )  # fmt: skip


def promised(objective: Objective) -> AdmissionConfig:
    """The objective as a gateway promises it, with the other bands' own promises."""
    return AdmissionConfig(ttft_target_ms=objective.ttft_ms, tpot_target_ms=objective.tpot_ms)


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of `--set` for any scenario, beside the gateway's configuration. 0 or empty: the scenario's
    own.
    """

    load: float = 1.0
    """Times the scenario's rates."""
    seconds: float = 0.0
    workers: int = 0
    """Of the scenario's main pool; rates stay."""
    accelerator: str = ""
    model: str = ""
    """A shape by name, or a config.json."""
    tp: int = 0
    dtype: str = ""
    max_running: int = 0
    step_tokens: int = 0
    scheduling: Scheduling | None = None
    """Of the engines."""
    ttft_ms: float = 0.0
    """Of the objective."""
    tpot_ms: float = 0.0
    config: Config = Config()
    """The gateway's configuration, as `penstock serve` reads it."""
    step_time: StepTime | None = None
    """Instead of the roofline: a law fitted to measured steps."""


def with_settings(knobs: Knobs, settings: Mapping[str, str]) -> Knobs:
    """Apply `key=value` pairs: a knob's name, or a dotted path into the configuration (`queue.headroom=0`).

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a wrong value.
    """
    plain = {name: value for name, value in settings.items() if name in _KNOBS}
    paths = {name: value for name, value in settings.items() if name not in _KNOBS}
    changed: dict[str, object] = {}
    for name, text in plain.items():
        try:
            changed[name] = msgspec.convert(text, _KNOBS[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--set {name}={text}: {error}") from error
    if paths:
        changed["config"] = _configured(knobs.config, paths)
    return msgspec.structs.replace(knobs, **changed)


_KNOBS: Mapping[str, type] = {
    each.name: each.type for each in msgspec.structs.fields(Knobs) if each.name not in ("config", "step_time")
}


def _configured(config: Config, paths: Mapping[str, str]) -> Config:
    touched = {path.split(".")[0] for path in paths}
    tree: dict[str, object] = {
        name: msgspec.to_builtins(getattr(config, name))
        for name in config.__struct_fields__
        if name in touched
    }
    for path, text in paths.items():
        *sections, key = path.split(".")
        if not sections and key not in tree:
            known = ", ".join((*_KNOBS, "or a path such as queue.headroom"))
            raise ConfigError(
                f"--set {path}: is neither a knob nor a path into the configuration; knobs are {known}"
            )
        branch = tree
        for section in sections:
            inner = branch.get(section)
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {path}: {section} is no section of the configuration")
            branch = cast(dict[str, object], inner)
        branch[key] = _value(text)
    try:
        changed = convert_config(tree)
    except ConfigError as error:
        raise ConfigError(f"--set: {error}") from None
    # The other sections stay as they are: a caller may have put constants of its own into them.
    return msgspec.structs.replace(config, **{name: getattr(changed, name) for name in tree})


def _value(text: str) -> object:
    """A scalar or list as YAML writes it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set: {text!r} is no value: {error}") from error
