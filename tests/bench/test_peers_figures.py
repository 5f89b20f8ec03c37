"""Ratios and tables of the comparison of engines."""

from bench.peers.figures import GAPS, LOADED, PREFIX, READY, Run, tables, times_better

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


def test_tables_show_figures_spreads_and_ours_over_each_peer() -> None:
    runs = [
        a_run("llama.cpp q4_0", rate=70),
        a_run("ours bf16", 1, rate=200), a_run("ours bf16", 2, rate=300),
        a_run("vllm bf16", 1, rate=100), a_run("vllm bf16", 2, rate=100),
    ]  # fmt: skip
    level, ratios, footprint = (part.splitlines()[2:] for part in tables(runs).split("\n\n"))
    assert [line.split("|")[1].strip() for line in level] == ["ours bf16", "vllm bf16", "llama.cpp q4_0"]
    assert "250 (200 to 300)" in level[0]
    assert ["ours bf16 over vllm bf16" in ratios[0], "2.5 (2 to 3)" in ratios[0]] == [True, True]
    assert "2.86 (2.86 to 2.86)" in ratios[1], "of the round that both have"
    assert "15 (15 to 15)" in footprint[0]
