"""The policy gate: as recorded it is open, a bad scorer shuts it, and its margins count in the right
direction.
"""

import pytest

from bench.harness import REPOSITORY
from bench.sim.gate import GATED, MARGINS, NOT_GATED, QUICK, Baseline, judge, measure, read_baseline
from penstock.config.routing import RoutingConfig
from penstock.config.tree import Config
from penstock.policy.terms import PlacementTerms, WeightedTerms
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.setup import Knobs

BAD = PlacementTerms(
    policy="weighted",
    weighted=WeightedTerms(match=0, delay=0, pressure=0, headroom=0),
    explore=1,
)
"""A deliberately bad scorer: all workers are alike to it, wherever the prefix is and whatever they have to
do."""


def quiet(_: str) -> None:
    pass


def test_the_recorded_policies_pass_the_small_gate() -> None:
    now, failed = measure(QUICK, (1,), Knobs(), quiet)
    worse, _ = judge(read_baseline(), now)
    assert not failed + worse


def test_a_bad_scorer_is_caught() -> None:
    now, failed = measure(
        ("conversations",), (1,), Knobs(config=Config(routing=RoutingConfig(placement=BAD))), quiet
    )
    worse, _ = judge(read_baseline(), now)
    assert any("hit_rate" in line for line in worse), failed + worse


def test_the_baseline_has_every_gated_scenario() -> None:
    recorded = read_baseline()
    assert set(GATED) == set(recorded.measured) <= set(SCENARIOS)
    assert set(QUICK) <= set(GATED)
    assert all((REPOSITORY / place).is_file() for place in NOT_GATED.values())


@pytest.mark.parametrize(
    ("figure", "change", "worse"),
    [
        ("attainment", -0.03, True),
        ("attainment", -0.01, False),
        ("attainment", 0.03, False),
        ("hit_rate", -0.03, True),
        ("jain", -0.03, True),
        ("cost_per_million", 0.06, True),
        ("cost_per_million", 0.04, False),
        ("cost_per_million", -0.5, False),
    ],
)
def test_margins(figure: str, change: float, worse: bool) -> None:
    def made(extra: float) -> Baseline:
        figures = {name: [1.0 + extra * (name == figure)] for name in MARGINS}
        return Baseline(seeds=(1,), measured={"steady": figures}, digests={})

    assert bool(judge(made(0), made(change))[0]) is worse
