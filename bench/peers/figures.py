"""Figures of servers by name, their ratios to the peers' and the tables. Pure: no server, no clock.

A ratio is taken round by round, between servers that were measured one after the other; it is written so that
more is better: ours / peer for rates, peer / ours for times.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bench.harness import Spread, shown, spread, table
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
"""Of the figures of a level, those that are held against each peer's."""


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


def values(runs: Iterable[Run], model: str, variant: str, figure: str) -> dict[int, float]:
    """One figure of one variant, by round."""
    found = {run.round: run.figures for run in runs if (run.model, run.variant) == (model, variant)}
    return {number: figures[figure] for number, figures in found.items() if figure in figures}


def is_rate(figure: str) -> bool:
    """Whether more is better."""
    return figure.endswith(("tok/s", PREFIX))


def times_better(runs: Sequence[Run], model: str, ours: str, peer: str, figure: str) -> Spread | None:
    """Of the rounds that measured both."""
    mine, other = values(runs, model, ours, figure), values(runs, model, peer, figure)
    pairs = [(mine[number], other[number]) for number in mine.keys() & other.keys()]
    known = [(a, b) if is_rate(figure) else (b, a) for a, b in pairs if a > 0 and b > 0]
    return spread(a / b for a, b in known) if known else None


def tables(runs: Sequence[Run]) -> str:
    """Of every model: its levels, each followed by ours over every peer, and the footprint."""
    parts: list[str] = []
    for model in dict.fromkeys(run.model for run in runs):
        names = {name for run in runs if run.model == model for name in run.figures}
        known = {run.variant for run in runs if run.model == model}
        variants = [variant.name for variant in VARIANTS if variant.name in known]
        for callers in sorted({int(name[2:].split(" ")[0]) for name in names if name.startswith("c=")}):
            figures = [f"c={callers} {name}" for name in LEVEL]
            parts.append(
                _table(
                    runs,
                    model,
                    variants,
                    f"{model}, {callers} at once",
                    dict(zip(figures, LEVEL, strict=True)),
                )
            )
            parts.append(_ratios(runs, model, variants, callers))
        footprint = {name: name for name in FOOTPRINT if name in names}
        parts.append(_table(runs, model, variants, f"{model}, times in ms", footprint))
    return "\n\n".join(filter(None, parts))


def _table(
    runs: Sequence[Run], model: str, variants: Iterable[str], title: str, figures: Mapping[str, str]
) -> str:
    """Figures under their shown names."""
    rows = [
        (each, *(shown([*values(runs, model, each, figure).values()]) for figure in figures))
        for each in variants
    ]
    return table((title, *figures.values()), rows)


def _ratios(runs: Sequence[Run], model: str, variants: Sequence[str], callers: int) -> str:
    """How many times better each of ours is than each peer, round by round."""
    rows = [
        (
            f"{ours} over {peer}",
            *(times_better(runs, model, ours, peer, f"c={callers} {name}") or "" for name in RATED),
        )
        for ours in variants
        for peer in variants
        if ours.startswith("ours") and not peer.startswith("ours")
    ]
    return table(("times better", *RATED), rows) if rows else ""
