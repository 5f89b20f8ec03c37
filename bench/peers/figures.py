"""Figures of servers by name, their ratios to the best peer, the goals and the tables. Pure: no server, no
clock.

A ratio is taken round by round, between servers that were measured one after the other; it is written so that
more is better: ours / peer for rates, peer / ours for times.
"""

from collections.abc import Iterable, Sequence

import msgspec

from bench.harness import Spread, short, spread, table
from bench.peers.engines import VARIANTS

LEVEL = ("tok/s", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")
"""Of each number of callers; times in milliseconds."""
READY, LOADED, MEMORY = "start-up s", "start-up s but for reading", "memory GB"
PREFIX, GAPS = "prefix miss / hit", "gap p99 during / p50 before"
FOOTPRINT = (
    READY, LOADED, MEMORY, "miss", "hit", PREFIX, "gap p50 before", "gap p99 before", "gap p50 during",
    "gap p99 during", "gap most", GAPS,
)  # fmt: skip
RATED = ("tok/s", "TTFT p50", "TPOT p50")
"""Of the figures of a level, those that are held against the best peer's."""
SIXTEEN_BITS = ("vllm bf16", "llama.cpp bf16", "llama.cpp f16")
VLLM, FOUR_BITS = ("vllm bf16",), ("llama.cpp q4_0",)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One server's life: started, measured, stopped."""

    model: str
    variant: str
    round: int
    figures: dict[str, float]
    """By name; those of a level are called `c=8 tok/s`."""
    errors: dict[str, int] = {}
    """Requests that failed, by reason."""
    troubles: tuple[str, ...] = ()
    """Measurements that failed, and why."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Ours against the best of some peers in one figure, at least `at_least` times better; or, without peers,
    a bound on the figure itself.
    """

    model: str
    figure: str
    ours: str = "ours bf16"
    peers: tuple[str, ...] = ()
    at_least: float = 1.0
    at_most: float | None = None


THROUGHPUT = {
    ("28m", "ours bf16"): {1: 1.0, 8: 1.5, 32: 1.5}, ("28m", "ours int8"): {1: 1.5, 8: 2.0, 32: 2.0},
    ("494m", "ours bf16"): {1: 1.0, 8: 1.3, 32: 1.3}, ("494m", "ours int8"): {1: 1.5, 8: 2.0, 32: 2.0},
}  # fmt: skip
GOALS = (
    *(
        Goal(model=model, figure=f"c={callers} tok/s", ours=ours, peers=SIXTEEN_BITS, at_least=times)
        for (model, ours), levels in THROUGHPUT.items()
        for callers, times in levels.items()
    ),
    *(
        goal
        for model, start_s in (("28m", 5.0), ("494m", 3.0))
        for goal in (
            Goal(model=model, figure="c=1 tok/s", ours="ours int4", peers=FOUR_BITS),
            Goal(model=model, figure="c=8 TTFT p50", peers=VLLM, at_least=2.0),
            Goal(model=model, figure="c=32 TTFT p50", peers=VLLM, at_least=2.0),
            Goal(model=model, figure=PREFIX, at_least=10.0),
            Goal(model=model, figure=GAPS, at_most=2.0),
            Goal(model=model, figure=READY, at_most=start_s),
            Goal(model=model, figure=LOADED, at_most=start_s),
            Goal(model=model, figure=MEMORY, peers=VLLM, at_least=2.0),
        )
    ),
)
"""The marks that the engine is held to."""


def values(runs: Iterable[Run], model: str, variant: str, figure: str) -> dict[int, float]:
    """One figure of one variant, by round."""
    found = {run.round: run.figures for run in runs if (run.model, run.variant) == (model, variant)}
    return {number: figures[figure] for number, figures in found.items() if figure in figures}


def is_rate(figure: str) -> bool:
    """Whether more is better."""
    return figure.endswith(("tok/s", PREFIX))


def best_peer(runs: Sequence[Run], model: str, peers: Iterable[str], figure: str) -> str | None:
    """The peer whose median is best."""
    known = {peer: values(runs, model, peer, figure).values() for peer in peers}
    medians = {peer: spread(found).median for peer, found in known.items() if found}
    return (max if is_rate(figure) else min)(medians, key=medians.__getitem__) if medians else None


def times_better(runs: Sequence[Run], model: str, ours: str, peer: str, figure: str) -> Spread | None:
    """Of the rounds that measured both."""
    mine, other = values(runs, model, ours, figure), values(runs, model, peer, figure)
    pairs = [(mine[number], other[number]) for number in mine.keys() & other.keys()]
    known = [(a, b) if is_rate(figure) else (b, a) for a, b in pairs if a > 0 and b > 0]
    return spread(a / b for a, b in known) if known else None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A goal with what was measured. `peer` is empty for a bound on the figure itself."""

    goal: Goal
    peer: str
    found: Spread
    met: bool


def judge(goal: Goal, runs: Sequence[Run]) -> Verdict | None:
    """Hold the median against the goal; None if it was not measured."""
    peer = best_peer(runs, goal.model, goal.peers, goal.figure) if goal.peers else ""
    if peer is None:
        return None
    if peer:
        found = times_better(runs, goal.model, goal.ours, peer, goal.figure)
    else:
        known = values(runs, goal.model, goal.ours, goal.figure).values()
        found = spread(known) if known else None
    if found is None:
        return None
    met = found.median <= goal.at_most if goal.at_most is not None else found.median >= goal.at_least
    return Verdict(goal=goal, peer=peer, found=found, met=met)


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    return [found for goal in GOALS if (found := judge(goal, runs))]


# --- tables -----------------------------------------------------------------------------------------


def tables(runs: Sequence[Run]) -> str:
    """Of every model: its levels, the footprint and the goals."""
    parts: list[str] = []
    for model in dict.fromkeys(run.model for run in runs):
        names = {name for run in runs if run.model == model for name in run.figures}
        known = {run.variant for run in runs if run.model == model}
        shown = [variant.name for variant in VARIANTS if variant.name in known]
        levels = sorted({int(name[2:].split(" ")[0]) for name in names if name.startswith("c=")})
        parts += [_level(runs, model, shown, callers) for callers in levels]
        footprint = [name for name in FOOTPRINT if name in names]
        rows = [(each, *(_figure(runs, model, each, name) for name in footprint)) for each in shown]
        parts.append(table((f"{model}, times in ms", *footprint), rows))
    goals = [
        (
            one.goal.model, one.goal.figure, one.goal.ours, one.peer or "itself", one.found,
            f"<= {one.goal.at_most:g}" if one.goal.at_most is not None else f">= {one.goal.at_least:g}x",
            "met" if one.met else "SHORT",
        )
        for one in verdicts(runs)
    ]  # fmt: skip
    parts += [table(("goals", "figure", "ours", "against", "measured", "goal", ""), goals)] if goals else []
    return "\n\n".join(parts)


def _level(runs: Sequence[Run], model: str, variants: Iterable[str], callers: int) -> str:
    """A figure is followed by how many times better it is than the best 16-bit peer's."""
    rows: list[list[object]] = []
    for variant in variants:
        cells: list[object] = [variant]
        for name in LEVEL:
            figure = f"c={callers} {name}"
            cells.append(_figure(runs, model, variant, figure))
            if name in RATED:
                peer = best_peer(runs, model, SIXTEEN_BITS, figure)
                found = times_better(runs, model, variant, peer, figure) if peer else None
                cells.append(f"{found.median:.2f}x" if found else "")
        rows.append(cells)
    head = [each for name in LEVEL for each in ((name, "x") if name in RATED else (name,))]
    return table((f"{model}, {callers} at once", *head), rows)


def _figure(runs: Sequence[Run], model: str, variant: str, figure: str) -> str:
    found = values(runs, model, variant, figure).values()
    return str(spread(found)) if len(found) > 1 else "".join(map(short, found))
