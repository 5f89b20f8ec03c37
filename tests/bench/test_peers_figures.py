"""Ratios, goals and tables of the comparison of engines."""

import pytest

from bench.peers.engines import VARIANTS
from bench.peers.figures import (
    FOOTPRINT,
    GAPS,
    GOALS,
    LEVEL,
    LOADED,
    PREFIX,
    READY,
    Goal,
    Run,
    best_peer,
    judge,
    tables,
    times_better,
    verdicts,
)

RATE, WAIT = "c=8 tok/s", "c=8 TTFT p50"


def a_run(variant: str, number: int = 1, *, rate: float = 100.0, ttft: float = 50.0, **more: float) -> Run:
    figures = {RATE: rate, WAIT: ttft, "c=8 TPOT p50": 7.0, READY: 2.0, LOADED: 1.5, PREFIX: 15.0, GAPS: 1.75}
    return Run(model="28m", variant=variant, round=number, figures=figures | more)


def test_ratios_pair_the_rounds_and_more_is_always_better() -> None:
    runs = [
        a_run("ours bf16", 1, rate=200, ttft=25), a_run("vllm bf16", 1, rate=100, ttft=100),
        a_run("ours bf16", 2, rate=90, ttft=50), a_run("vllm bf16", 2, rate=30, ttft=100),
        a_run("vllm bf16", 3, rate=1, ttft=1),
    ]  # fmt: skip
    assert times_better(runs, "28m", "ours bf16", "vllm bf16", RATE) == (2.5, 2.0, 3.0)
    assert times_better(runs, "28m", "ours bf16", "vllm bf16", WAIT) == (3.0, 2.0, 4.0)


def test_the_best_peer_is_chosen_figure_by_figure() -> None:
    runs = [a_run("vllm bf16", rate=100, ttft=90), a_run("llama.cpp bf16", rate=80, ttft=30)]
    both = ("vllm bf16", "llama.cpp bf16", "llama.cpp f16")
    assert best_peer(runs, "28m", both, RATE) == "vllm bf16"
    assert best_peer(runs, "28m", both, WAIT) == "llama.cpp bf16"
    assert best_peer(runs, "494m", both, RATE) is None


@pytest.mark.parametrize(("rate", "met"), [(149.0, False), (150.0, True)])
def test_a_goal_against_peers_asks_for_a_ratio_to_the_best_of_them(rate: float, met: bool) -> None:
    runs = [a_run("ours bf16", rate=rate), a_run("vllm bf16", rate=100), a_run("llama.cpp f16", rate=70)]
    verdict = judge(Goal(model="28m", figure=RATE, peers=("vllm bf16", "llama.cpp f16"), at_least=1.5), runs)
    assert verdict is not None
    assert (verdict.met, verdict.peer) == (met, "vllm bf16")
    assert verdict.found.median == pytest.approx(rate / 100)


def test_a_goal_without_peers_is_a_bound_on_our_own_figure() -> None:
    runs = [a_run("ours bf16")]
    bounds = {READY: 5.0, GAPS: 1.5}
    found = {
        name: judge(Goal(model="28m", figure=name, at_most=bound), runs) for name, bound in bounds.items()
    }
    found[PREFIX] = judge(Goal(model="28m", figure=PREFIX, at_least=10.0), runs)
    met = {name: verdict is not None and verdict.met for name, verdict in found.items()}
    assert met == {READY: True, GAPS: False, PREFIX: True}


def test_goals_that_were_not_measured_have_no_verdict() -> None:
    runs = [a_run("ours bf16")]
    assert judge(Goal(model="28m", figure="c=32 tok/s", peers=("vllm bf16",)), runs) is None
    assert judge(Goal(model="28m", figure=RATE, peers=("vllm bf16",)), runs) is None
    assert judge(Goal(model="28m", figure=READY, ours="ours int8", at_most=5.0), runs) is None


def test_every_goal_names_variants_and_figures_that_exist() -> None:
    names = {variant.name for variant in VARIANTS}
    figures = {*FOOTPRINT, *(f"c={callers} {name}" for callers in (1, 8, 32) for name in LEVEL)}
    assert all({goal.ours, *goal.peers} <= names and goal.figure in figures for goal in GOALS)
    named = {(goal.model, goal.ours, goal.figure) for goal in GOALS}
    for model in ("28m", "494m"):
        assert (model, "ours int4", "c=1 tok/s") in named
        kinds = {(model, f"ours {kind}", f"c={n} tok/s") for kind in ("bf16", "int8") for n in (1, 8, 32)}
        assert kinds <= named


def test_tables_show_figures_spreads_ratios_and_marks() -> None:
    runs = [
        a_run("llama.cpp q4_0", rate=70),
        a_run("ours bf16", 1, rate=200), a_run("ours bf16", 2, rate=300),
        a_run("vllm bf16", 1, rate=100), a_run("vllm bf16", 2, rate=100),
    ]  # fmt: skip
    text = tables(runs)
    level = text.partition("\n\n")[0].splitlines()
    assert [line.split("|")[1].strip() for line in level[2:]] == ["ours bf16", "vllm bf16", "llama.cpp q4_0"]
    assert "250 (200 to 300)" in level[2]
    assert "2.50x" in level[2]
    assert "0.70x" in level[4]
    assert PREFIX in text
    assert {verdict.met for verdict in verdicts(runs)} == {True, False}
    assert "SHORT" in text
