"""Scenarios: each says what it answers, is the same for the same seed, and a knob does what it says."""

import re
from pathlib import Path

import pytest

from penstock.config.routing import RoutingConfig
from penstock.config.tree import Config
from penstock.errors import ConfigError
from penstock.policy.terms import PlacementTerms, QueueTerms
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import find, run_scenario
from penstock.sim.scenarios.setup import Knobs, play, with_settings

SMALL = {"seconds": "4", "workers": "1", "load": "0.3"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_asks_a_question_and_can_be_built(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.question.endswith("?"), scenario.question
    assert len(scenario.answer) > 40
    made = scenario.build(Knobs())
    assert made.prices
    assert all(price > 0 for price in made.prices.values())


def test_every_scenario_answers_a_question_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing-overload.md").read_text()
    table = page[page.index("| question of the requirement |") : page.index("## What it has found")]
    asked = {
        name
        for row in table.splitlines()
        if row.startswith("| ")
        for name in re.findall(r"`([a-z0-9-]+)`", row)
    }
    assert asked <= set(SCENARIOS)
    everyday = {"bursts", "conversations", "agent-loops"}
    assert set(SCENARIOS) - asked == everyday


def test_the_same_seed_is_the_same_run() -> None:
    made = SCENARIOS["steady"].build(with_settings(Knobs(), SMALL))
    first, again, other = play(made, 3), play(made, 3), play(made, 4)
    assert first.result.digest == again.result.digest != other.result.digest
    assert first.figures == again.figures
    assert first.figures.requests == first.result.counters.arrived > 0


def test_a_quota_refuses_the_one_who_is_over_it() -> None:
    verdict = run_scenario(SCENARIOS["tenant-quota"], with_settings(Knobs(), {"seconds": "12"}), 1)
    refused = {record.tenant for record in verdict.played.records if record.reason == "limits"}
    assert refused == {"big"}


def test_settings_reach_knobs_and_the_configuration() -> None:
    knobs = with_settings(
        Knobs(), {"load": "2", "workers": "3", "queue.headroom": "0.2", "admission.ttft_target_ms": "3"}
    )
    assert (knobs.load, knobs.workers, knobs.config.queue.headroom) == (2.0, 3, 0.2)
    assert knobs.config.admission.ttft_target_ms == 3


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("laod", "2", "neither a knob nor a path"),
        ("queue.hedroom", "0", "headroom"),
        ("queue.headroom", "9", "headroom"),
        ("workers", "many", "workers"),
        ("nothing.here", "1", "no section"),
        ("queue.headroom", "[", "no value"),
    ],
)
def test_a_wrong_setting_is_named(key: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        with_settings(Knobs(), {key: value})


def test_a_typo_in_a_name_gets_the_nearest() -> None:
    assert find("SPIKE_20x", SCENARIOS).name == "spike-20x"
    with pytest.raises(ConfigError, match="did you mean spike-20x"):
        find("spike-20", SCENARIOS)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("kv-full", Config(queue=QueueTerms(shed_kv_above=1)), "requests that were shed for memory"),
        ("kv-full", Config(queue=QueueTerms(requests_max=2)), "requests that were lost in any other way"),
        (
            "rollout-bad",
            Config(routing=RoutingConfig(placement=PlacementTerms(policy="weighted", explore=1))),
            "SLO attainment, the bad time included",
        ),
    ],
)
def test_a_scenario_fails_where_the_policy_that_it_asks_about_is_off(name, config, words) -> None:
    verdict = run_scenario(SCENARIOS[name], Knobs(config=config), 1)
    assert words in [finding.words for finding in verdict.findings if not finding.passed]


def test_no_scenario_of_a_rollout_takes_its_own_fault_back() -> None:
    setup = SCENARIOS["rollout-bad"].build(Knobs())
    assert setup.faults
    assert all(not fault.until_ns for fault in setup.faults)
