"""The marks that the engine is held to, each against the best peer of its column in the same run."""

from collections.abc import Sequence

from bench.peers.figures import ARRIVAL, LOADED, MEMORY, PREFIX, READY, Goal, Verdict, spread

SIXTEEN_BITS = ("vllm bf16", "llama.cpp bf16", "llama.cpp f16")
VLLM = ("vllm bf16",)
FOUR_BITS = ("llama.cpp q4_0",)
HOST_TIME_MS = {64: 0.4, 256: 0.8}
"""The scheduler's part of a step, by rows that decode."""


def goals() -> list[Goal]:
    """Every goal, model by model."""
    return [*_throughput(), *_waiting(), *_footprint()]


def judge_host_time(rows: int, milliseconds: Sequence[float]) -> Verdict:
    """Hold the scheduler's time per step against its goal; it is ours alone, so no server is asked."""
    goal = Goal(model="none", title=f"scheduler ms, {rows} rows", ours="ours", at_most=HOST_TIME_MS[rows])
    found = spread(milliseconds)
    assert found is not None, "measure something first"
    met = found.middle <= HOST_TIME_MS[rows]
    return Verdict(goal=goal, peer="", middle=found.middle, least=found.least, limit=found.limit, met=met)


def _throughput() -> list[Goal]:
    marks = {
        ("28m", "ours bf16"): {1: 1.0, 8: 1.5, 32: 1.5},
        ("28m", "ours int8"): {1: 1.5, 8: 2.0, 32: 2.0},
        ("494m", "ours bf16"): {1: 1.0, 8: 1.3, 32: 1.3},
        ("494m", "ours int8"): {1: 1.5, 8: 2.0, 32: 2.0},
    }
    found = [
        Goal(model=model, title=f"c={callers} tok/s", ours=ours, peers=SIXTEEN_BITS, at_least=times)
        for (model, ours), levels in marks.items()
        for callers, times in levels.items()
    ]
    found += [
        Goal(model=model, title="c=1 tok/s", ours="ours int4", peers=FOUR_BITS) for model in ("28m", "494m")
    ]
    return found


def _waiting() -> list[Goal]:
    found = [
        Goal(model=model, title=f"c={callers} TTFT p50", ours="ours bf16", peers=VLLM, at_least=2.0)
        for model in ("28m", "494m")
        for callers in (8, 32)
    ]
    for model in ("28m", "494m"):
        found.append(Goal(model=model, title=PREFIX.title, ours="ours bf16", at_least=10.0))
        found.append(Goal(model=model, title=ARRIVAL.title, ours="ours bf16", at_most=2.0))
    return found


def _footprint() -> list[Goal]:
    return [
        goal
        for model, start_s in (("28m", 5.0), ("494m", 3.0))
        for goal in (
            Goal(model=model, title=READY.title, ours="ours bf16", at_most=start_s),
            Goal(model=model, title=LOADED.title, ours="ours bf16", at_most=start_s),
            Goal(model=model, title=MEMORY.title, ours="ours bf16", peers=VLLM, at_least=2.0),
        )
    ]
