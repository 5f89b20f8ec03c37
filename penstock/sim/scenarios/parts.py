"""What scenarios have in common: the registry, the default chat, and what is looked at in a run."""

from collections.abc import Callable, Sequence

from penstock.policy.record import Outcome
from penstock.sim.report.figures import Figures, Spread
from penstock.sim.scenarios.scenario import Check, Finding, Scenario, at_most
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.request import RequestRecord
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, even

SCENARIOS: dict[str, Scenario] = {}

QUESTION, ANSWER = LengthDistribution(250, 0.7, maximum=4096), LengthDistribution(60, 0.7, maximum=512)
WORKER_RPS = 6.0
"""What one default worker is given at full load."""


def scenario(
    check: Check, *, beside: Callable[[Knobs], Setup] | None = None
) -> Callable[[Callable[[Knobs], Setup]], Callable[[Knobs], Setup]]:
    """Register a function from knobs to a setup under its own name."""

    def register(build: Callable[[Knobs], Setup]) -> Callable[[Knobs], Setup]:
        name = build.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name=name, build=build, check=check, beside=beside)
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
