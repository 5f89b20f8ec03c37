"""The tables of bench/relay/peers.py, in Markdown: the gateways side by side, ours against its goals, what
each feature costs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Round = dict[str, float]
Results = dict[str, dict[str, list[Round]]]
"""Gateway -> shape -> its rounds, in order."""


@dataclass(frozen=True)
class Goal:
    """The bound on a figure of ours."""

    shape: str
    limit: float
    """CPU-seconds per 1,000 requests."""


GOALS = (Goal("whole", 0.12), Goal("chunks", 0.60), Goal("paced", 4.5))
ADDED_P50_US = 250.0
BELOW_SMG = 1.0
BELOW_LITELLM = 1 / 60

FEATURES = (
    ("auth (a hashed key)", "penstock-limits+budget", "penstock-auth+limits+budget"),
    ("limits (six, with headers)", "penstock", "penstock-limits"),
    ("budgets and prices", "penstock", "penstock-budget"),
    ("ledger", "penstock", "penstock-ledger"),
    ("access log", "penstock", "penstock-access"),
    ("metrics", "penstock", "penstock-metrics"),
    ("all of these", "penstock", "penstock-bare"),
)
"""Its name, the gateway with it, the gateway without."""
FEATURE_VARIANTS = tuple(dict.fromkeys(name for _, *pair in FEATURES for name in pair))


def figures(results: Results, gateway: str, shape: str, key: str = "cpu_s_per_1000") -> list[float]:
    """One figure of every round; empty if there is none."""
    return [round_[key] for round_ in results.get(gateway, {}).get(shape, []) if key in round_]


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round; with another number of rounds, each of ours to their median."""
    if not others:
        return []
    if len(mine) != len(others):
        others = [statistics.median(others)] * len(mine)
    return [a / b for a, b in zip(mine, others, strict=True) if b]


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """The median, with the least and the most of several."""
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}{unit}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quartiles(values: Sequence[float]) -> str:
    """The median and the middle half of many short rounds."""
    if len(values) < 2:
        return spread(values, 3)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def added_us(results: Results, gateway: str, shape: str = "alone", at: str = "p50") -> list[float]:
    """The time that the gateway adds to a request, at the median or the 99th percentile of a round."""
    key = f"total_{at}_us"
    bare = figures(results, "upstream", shape, key)
    rounds = results.get(gateway, {}).get(shape, [])
    if not all("direct_p50_us" in round_ for round_ in rounds) and not bare:
        return []
    return [
        r[key] - (r["direct_p50_us"] if "direct_p50_us" in r else statistics.median(bare)) for r in rounds
    ]


def peer_table(results: Results) -> list[str]:
    """Every gateway: CPU-seconds per 1,000 requests by shape, events per request, memory, latency added."""
    lines = [
        "| gateway | whole | chunks | events | each | events | paced | events | memory | added p50 | p99 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gateway, shapes in results.items():
        if gateway == "upstream":
            continue
        cells = [spread(figures(results, gateway, "whole"))]
        for shape in ("chunks", "each", "paced"):
            events = figures(results, gateway, shape, "events_per_request")
            cells += [
                spread(figures(results, gateway, shape)),
                f"{statistics.median(events):.0f}" if events else "",
            ]
        memory = max((r["rss_mb"] for rounds in shapes.values() for r in rounds), default=0.0)
        waits = added_us(results, gateway, "open", "p99")
        cells += [f"{memory:.0f} MB", spread(added_us(results, gateway), 0, " us"), spread(waits, 0, " us")]
        lines.append(f"| {gateway} | " + " | ".join(cells) + " |")
    return lines


def goal_table(results: Results) -> list[str]:
    """Our figures against the absolute goals, and against smg and LiteLLM in the same run."""
    lines = ["| figure | goal | measured | |", "|---|---|---|---|"]

    def add(figure: str, limit: float, values: Sequence[float], digits: int, unit: str = "") -> None:
        if values:
            verdict = "met" if statistics.median(values) <= limit else "**missed**"
            goal = f"at most {limit:.{digits}f}{unit}"
            lines.append(f"| {figure} | {goal} | {spread(values, digits, unit)} | {verdict} |")

    for goal in GOALS:
        add(
            f"`{goal.shape}`, CPU-s per 1,000",
            goal.limit,
            figures(results, "penstock", goal.shape),
            2,
        )
    add("latency added at concurrency 1, p50", ADDED_P50_US, added_us(results, "penstock"), 0, " us")
    for peer, limit, digits in (("smg", BELOW_SMG, 2), ("litellm", BELOW_LITELLM, 3)):
        for goal in GOALS:
            mine, theirs = (figures(results, name, goal.shape) for name in ("penstock", peer))
            add(f"`{goal.shape}`, times {peer}'s in the same run", limit, ratios(mine, theirs), digits)
    return lines


def feature_table(results: Results) -> list[str]:
    """The cost of each feature: with it less without it, round by round; the median and the quartiles."""
    shapes = [shape for shape in ("whole", "paced") if figures(results, "penstock", shape)]
    lines = [
        "| feature | " + " | ".join(f"`{shape}`, CPU-s per 1,000 | share" for shape in shapes) + " |",
        "|---|" + "---|---|" * len(shapes),
    ]
    for label, on, off in FEATURES:
        cells: list[str] = []
        for shape in shapes:
            pairs = list(zip(figures(results, on, shape), figures(results, off, shape), strict=False))
            whole = figures(results, "penstock", shape)
            costs = [a - b for a, b in pairs]
            share = f"{statistics.median(costs) / statistics.median(whole):.0%}" if costs else ""
            cells += [quartiles(costs), share]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    everything = (cell for shape in shapes for cell in (quartiles(figures(results, "penstock", shape)), ""))
    lines.append("| **the whole gateway** | " + " | ".join(everything) + " |")
    return lines
