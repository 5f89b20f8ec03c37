"""Spreads, ratios, goals and tables of the comparison of engines."""

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.peers.engines import VARIANTS
from bench.peers.figures import (
    ARRIVAL,
    LOADED,
    MEMORY,
    PREFIX,
    READY,
    Arrival,
    Goal,
    Level,
    PrefixTimes,
    Run,
    best_peer,
    columns,
    judge,
    ratio,
    spread,
    values,
)
from bench.peers.goals import goals, judge_host_time
from bench.peers.tables import footprint_table, goal_table, level_table, run_line

RATE = columns([8])[0]
WAIT = columns([8])[1]


def level(callers: int = 8, *, rate: float = 100.0, ttft: float = 50.0, requests: int = 24) -> Level:
    return Level(
        callers=callers,
        requests=requests,
        failed=0,
        errors={},
        prompt_tokens=2640,
        cached_tokens=0,
        output_tokens=1536,
        output_tokens_per_s=rate,
        ttft_p50_ms=ttft,
        ttft_p95_ms=2 * ttft,
        tpot_p50_ms=7.0,
        tpot_p95_ms=9.0,
    )


def a_run(variant: str, number: int = 1, **figures) -> Run:
    return Run(
        model="28m",
        variant=variant,
        round=number,
        ready_s=2.0,
        resident_bytes=10**9,
        levels=(level(**figures),),
        prefix=PrefixTimes(miss_ms=300.0, hit_ms=20.0),
        arrival=Arrival(
            ttft_ms=400,
            before_p50_ms=8.0,
            before_p99_ms=9.0,
            during_p50_ms=10.0,
            during_p99_ms=14.0,
            during_max_ms=15.0,
        ),
    )


def test_ratios_pair_the_rounds_and_more_is_always_better():
    runs = [
        a_run("ours bf16", 1, rate=200, ttft=25),
        a_run("vllm bf16", 1, rate=100, ttft=100),
        a_run("ours bf16", 2, rate=90, ttft=50),
        a_run("vllm bf16", 2, rate=30, ttft=100),
        a_run("vllm bf16", 3, rate=1, ttft=1),
    ]
    found = ratio(runs, "28m", "ours bf16", "vllm bf16", RATE)
    assert (found.middle, found.least, found.limit, found.count) == (2.5, 2.0, 3.0, 2)
    assert ratio(runs, "28m", "ours bf16", "vllm bf16", WAIT).limit == 4.0


def test_the_best_peer_is_chosen_column_by_column():
    runs = [a_run("vllm bf16", rate=100, ttft=90), a_run("llama.cpp bf16", rate=80, ttft=30)]
    both = ("vllm bf16", "llama.cpp bf16", "llama.cpp f16")
    assert best_peer(runs, "28m", both, RATE) == "vllm bf16"
    assert best_peer(runs, "28m", both, WAIT) == "llama.cpp bf16"
    assert best_peer(runs, "494m", both, RATE) is None


def test_a_level_in_which_nothing_succeeded_has_no_figures():
    runs = [a_run("vllm bf16", requests=0, rate=0)]
    assert values(runs, "28m", "vllm bf16", RATE) == {}
    assert spread([]) is None


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_a_spread_holds_its_middle(numbers):
    found = spread(numbers)
    assert found.least == min(numbers) <= found.middle <= max(numbers) == found.limit
    assert found.count == len(numbers)


@pytest.mark.parametrize(("rate", "met"), [(149.0, False), (150.0, True)])
def test_a_goal_against_peers_asks_for_a_ratio_to_the_best_of_them(rate, met):
    runs = [a_run("ours bf16", rate=rate), a_run("vllm bf16", rate=100), a_run("llama.cpp f16", rate=70)]
    goal = Goal(
        model="28m", title=RATE.title, ours="ours bf16", peers=("vllm bf16", "llama.cpp f16"), at_least=1.5
    )
    verdict = judge(goal, runs)
    assert (verdict.met, verdict.peer) == (met, "vllm bf16")
    assert verdict.middle == pytest.approx(rate / 100)


def test_a_goal_without_peers_is_a_bound_on_our_own_figure():
    runs = [a_run("ours bf16")]
    assert judge(Goal(model="28m", title=READY.title, ours="ours bf16", at_most=5.0), runs).met
    assert judge(Goal(model="28m", title=PREFIX.title, ours="ours bf16", at_least=10.0), runs).middle == 15.0
    gaps = judge(Goal(model="28m", title=ARRIVAL.title, ours="ours bf16", at_most=1.5), runs)
    assert (gaps.middle, gaps.met) == (1.75, False)


def test_start_up_is_held_without_what_reading_the_files_takes():
    run = msgspec.structs.replace(a_run("ours bf16"), weights_read_s=0.5)
    assert judge(Goal(model="28m", title=LOADED.title, ours="ours bf16", at_most=5.0), [run]).middle == 1.5


@pytest.mark.parametrize(("ms", "met"), [(0.3, True), (0.85, False)])
def test_the_scheduler_has_goals_of_its_own(ms, met):
    verdict = judge_host_time(256, [0.9 * ms, ms, 1.1 * ms])
    assert (verdict.met, verdict.middle) == (met, ms)
    assert "scheduler ms, 256 rows" in printed(goal_table([verdict]))


def test_every_precision_of_both_models_has_its_goals():
    named = {(goal.model, goal.ours, goal.title) for goal in goals()}
    for model in ("28m", "494m"):
        assert (model, "ours int4", "c=1 tok/s") in named
        assert {
            (model, f"ours {kind}", f"c={level} tok/s") for kind in ("bf16", "int8") for level in (1, 8, 32)
        } <= named


def test_goals_that_were_not_measured_have_no_verdict():
    runs = [a_run("ours bf16")]
    assert judge(Goal(model="28m", title="c=32 tok/s", ours="ours bf16", peers=("vllm bf16",)), runs) is None
    assert judge(Goal(model="28m", title=RATE.title, ours="ours bf16", peers=("vllm bf16",)), runs) is None
    assert judge(Goal(model="28m", title=READY.title, ours="ours int8", at_most=5.0), runs) is None


def test_every_goal_names_variants_and_figures_that_exist():
    names = {variant.name for variant in VARIANTS}
    titles = {column.title for column in [*columns([1, 8, 32]), LOADED, PREFIX, ARRIVAL]}
    assert MEMORY.title in titles
    for goal in goals():
        assert {goal.ours, *goal.peers} <= names
        assert goal.title in titles


def printed(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_tables_show_figures_spreads_ratios_and_marks():
    runs = [
        a_run("llama.cpp q4_0", rate=70),
        a_run("ours bf16", 1, rate=200),
        a_run("ours bf16", 2, rate=300),
        a_run("vllm bf16", 1, rate=100),
        a_run("vllm bf16", 2, rate=100),
    ]
    lines = printed(level_table(runs, "28m", 8)).splitlines()
    rows = [line for line in lines if "ours" in line or "vllm" in line or "q4_0" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["ours bf16", "vllm bf16", "llama.cpp q4_0"]
    assert "250.0 (200.0 to 300.0)" in rows[0]
    assert "2.50" in rows[0]
    assert "0.70" in rows[2]
    assert "15.0" in printed(footprint_table(runs, "28m"))
    found = [verdict for goal in goals() if (verdict := judge(goal, runs))]
    text = printed(goal_table(found))
    assert "met" in text
    assert "short" in text
    assert "c=8 200 tok/s" in run_line(runs[1])
