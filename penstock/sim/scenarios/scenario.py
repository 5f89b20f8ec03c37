"""Scenarios: questions that a simulation answers, each with a setup and a criterion that is checked.

A scenario is a function from `Knobs` to `Setup`; its docstring is the question. Its check says, of one run,
what was found and whether that passes. Where the answer is a comparison (with the spike, without it) the
scenario names the setup that runs on the same seed for comparison.

Its fleet is described as an operator describes one: `described` takes it through the parsing and the checks
of `penstock serve`, to the names and engines that come out. A model's directory is called by the shape that
is simulated, and served under the pool's name, so nothing in a simulation works because the two are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.checkpoints import served_name
from penstock.config.checks import check
from penstock.config.engine_settings import EngineSettings
from penstock.config.load import convert_config
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config, ModelConfig
from penstock.errors import ConfigError
from penstock.planning.roofline import Placed, Roofline, accelerator, model_shape, unknown
from penstock.policy.flow import Outcome
from penstock.sim.report.figures import Figures, Objective, Spread
from penstock.sim.scenarios.setup import Knobs, Played, Setup, play, promised
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, TrafficSource, even
from penstock.sim.world.faults import InjectedFault
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.types import VERSIONED


def described(config: Config, pools: Sequence[PoolSpec]) -> tuple[Config, tuple[PoolSpec, ...]]:
    """The whole configuration, and the pools as it describes them.

    Pools of one model in several regions are one entry.

    Raises:
        ConfigError: `penstock serve` would not start with it.
    """
    entries: dict[str, dict[str, object]] = {}
    for pool in pools:
        versioned = VERSIONED.fullmatch(pool.model)
        entry = entries.setdefault(
            pool.model,
            {
                "path": f"/models/{pool.worker.checkpoint or 'unnamed'}",
                "name": pool.model if versioned is None else versioned["name"],
                "version": 0 if versioned is None else int(versioned["version"]),
                "replicas": 0,
                "engine": msgspec.to_builtins(pool.worker.engine.configured),
            },
        )
        entry["replicas"] = int(str(entry["replicas"])) + pool.count
    # The other sections were parsed already, or hold constants that no operator could write.
    made = msgspec.structs.replace(config, models=convert_config({"models": list(entries.values())}).models)
    check(made)
    by_name = {served_name(model): model for model in made.models}
    return made, tuple(_as_described(by_name, pool) for pool in pools)


def _as_described(models: dict[str, ModelConfig], pool: PoolSpec) -> PoolSpec:
    model = models.get(pool.model)
    if model is None:
        raise ConfigError(f"no model of the configuration is served as {pool.model}")
    if model.engine != pool.worker.engine.configured:
        raise ConfigError(f"the pools of {pool.model} have different engines; a model has one")
    return replace(pool, model=served_name(model))


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    words: str
    value: float
    bound: float
    at_most: bool = True
    """Whether the bound is an upper one."""

    @property
    def passed(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def at_most(words: str, value: float, bound: float) -> Finding:
    """A finding with an upper bound."""
    return Finding(words=words, value=value, bound=bound)


def at_least(words: str, value: float, bound: float) -> Finding:
    """A finding with a lower bound."""
    return Finding(words=words, value=value, bound=bound, at_most=False)


Build = Callable[[Knobs], Setup]
Check = Callable[[Played, Played | None], Sequence[Finding]]
"""Of the run, and of the one to compare with."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """A named question."""

    name: str
    build: Build
    check: Check
    baseline: Build | None = None
    """The setup that the run is compared with, on the same seed."""

    @property
    def question(self) -> str:
        """The docstring's first paragraph."""
        return " ".join((self.build.__doc__ or "").split("\n\n")[0].split())

    @property
    def answer(self) -> str:
        """The rest of it: how the system answers, in words."""
        return " ".join(" ".join((self.build.__doc__ or "").split("\n\n")[1:]).split())


@dataclass(slots=True, kw_only=True)
class Verdict:
    """A scenario on one seed."""

    scenario: Scenario
    played: Played
    baseline: Played | None
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether everything that is checked passes."""
        return all(finding.passed for finding in self.findings)


def run_scenario(
    scenario: Scenario, knobs: Knobs, seed: int, *, on_arrival: Callable[[int], None] | None = None
) -> Verdict:
    """Play it and check it."""
    baseline = play(scenario.baseline(knobs), seed) if scenario.baseline is not None else None
    played = play(scenario.build(knobs), seed, on_arrival=on_arrival)
    return Verdict(
        scenario=scenario, played=played, baseline=baseline, findings=scenario.check(played, baseline)
    )


def find(name: str, known: Mapping[str, Scenario]) -> Scenario:
    """The scenario of that name; `_` counts as `-`.

    Raises:
        ConfigError: there is none; the message has the nearest.
    """
    if (found := known.get(name.lower().replace("_", "-"))) is not None:
        return found
    raise ConfigError(f"scenario: {unknown(name, known)}; `penstock simulate --list` says what each answers")


# --- what scenarios are built from ------------------------------------------------------------------


def pool(
    knobs: Knobs,
    *,
    workers: int,
    name: str = "model",
    shape: str = "7b",
    device: str = "a10g",
    cold_start_s: float = 60.0,
) -> PoolSpec:
    """Workers of one model; knobs go before what the scenario says.

    The main pool is the one called "model".
    """
    main = name == "model"
    placed = Placed(
        model=model_shape((main and knobs.model) or shape),
        device=accelerator(knobs.accelerator or device),
        tp=(main and knobs.tp) or 1,
        dtype=knobs.dtype or "bf16",
    )
    max_running = knobs.max_running or 32
    spec = SimWorkerSpec(
        step_time=knobs.step_time or Roofline(placed),
        engine=EngineSettings(
            step_tokens=max(knobs.step_tokens or 512, max_running),
            max_running=max_running,
            scheduling=knobs.scheduling or "fair",
        ),
        checkpoint=placed.model.name,
        dtype=placed.dtype,
        num_blocks=placed.num_blocks,
        max_model_len=min(placed.model.max_model_len, placed.num_blocks * 16),
        kind=kind_of(placed),
        cold_start_ns=round(cold_start_s * NS_PER_S),
    )
    return PoolSpec(model=name, worker=spec, count=(main and knobs.workers) or workers)


def kind_of(placed: Placed) -> str:
    """Names a replica for reports and prices: 70b@h100x4."""
    return f"{placed.model.name}@{placed.device.name}x{placed.tp}"


def setup(
    knobs: Knobs, pools: Sequence[PoolSpec], sources: Sequence[TrafficSource], *, seconds: float,
    faults: Sequence[InjectedFault] = (),
    objective: Objective | None = None, **world: object,
) -> Setup:  # fmt: skip
    """A setup with the knobs applied: `world` goes to `WorldSpec`."""
    wanted = objective or Objective(ttft_ms=2000, tpot_ms=150)
    wanted = msgspec.structs.replace(
        wanted, ttft_ms=knobs.ttft_ms or wanted.ttft_ms, tpot_ms=knobs.tpot_ms or wanted.tpot_ms
    )
    config = knobs.config
    # The objective is what is promised, unless other promises were set.
    if config.admission == AdmissionConfig():
        config = msgspec.structs.replace(config, admission=promised(wanted))
    config, fleet = described(config, pools)
    spec = replace(WorldSpec(config=config, pools=fleet), **world)
    prices: dict[str, float] = {}
    for each in pools:
        device, _, tp = each.worker.kind.partition("@")[2].rpartition("x")
        prices[each.worker.kind] = accelerator(device).price_per_hour * int(tp)
    return Setup(
        world=spec,
        sources=tuple(sources),
        faults=tuple(faults),
        seconds=knobs.seconds or seconds,
        objective=wanted,
        prices=prices,
    )


# The parts that scenarios have in common: the registry, the default chat, and what is looked at in a run.

SCENARIOS: dict[str, Scenario] = {}

QUESTION, ANSWER = LengthDistribution(250, 0.7, maximum=4096), LengthDistribution(60, 0.7, maximum=512)
WORKER_RPS = 6.0
"""The load of one default worker."""


def scenario(
    check: Check, *, baseline: Callable[[Knobs], Setup] | None = None
) -> Callable[[Callable[[Knobs], Setup]], Callable[[Knobs], Setup]]:
    """Register a function from knobs to a setup under its own name."""

    def register(build: Callable[[Knobs], Setup]) -> Callable[[Knobs], Setup]:
        name = build.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name=name, build=build, check=check, baseline=baseline)
        return build

    return register


def chat(
    knobs: Knobs, load: float, workers: int, *, name: str = "chat", callers: Callers | None = None
) -> Chat:
    """The default chat at a share of what `workers` workers can do."""
    rate = WORKER_RPS * workers * load * knobs.load
    return Chat(
        name=name, arrivals=Poisson(rate), callers=callers or Callers(tenants=even(8)), prompt=QUESTION,
        output=ANSWER, system_tokens=160,
    )  # fmt: skip


def share_good(figures: Figures, tenants: Callable[[str], bool]) -> float:
    """The good share of some tenants' requests."""
    found = [each for name, each in figures.tenants.items() if tenants(name)]
    return sum(each.good for each in found) / max(1, sum(each.requests for each in found))


def ttft_p95(records: Sequence[RequestRecord], which: Callable[[RequestRecord], bool]) -> float:
    """Milliseconds, of some requests that had a first token."""
    return Spread.of([record.ttft_ns for record in records if record.first_ns >= 0 and which(record)]).p95


def answered(played: Played) -> Finding:
    """Every request that came has ended, one way or the other."""
    return at_most("requests without an end", played.result.counters.arrived - len(played.records), 0)


def no_failures(played: Played) -> Finding:
    """Nothing failed for a reason of ours."""
    return at_most("failed requests", played.figures.outcomes.get(Outcome.FAILED.value, 0), 0)


def finished_share(played: Played, which: Callable[[RequestRecord], bool]) -> float:
    """The share of some requests that were answered."""
    found = [record for record in played.records if which(record)]
    return sum(record.outcome is Outcome.FINISHED for record in found) / max(1, len(found))


def good_share(played: Played, which: Callable[[RequestRecord], bool]) -> float:
    """The share of some requests that were answered as promised."""
    found = [record for record in played.records if which(record)]
    return sum(played.good(record) for record in found) / max(1, len(found))
