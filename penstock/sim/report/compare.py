"""Two configurations on the same seeds: paired differences with 95 % confidence intervals.

Every seed gives both sides the same traffic and the same faults, so what differs is the configuration; the
intervals are Student's t over the per-seed differences (a paired t-test), which supposes that those are about
normal. A single seed has no interval.
"""

from collections.abc import Sequence
from math import inf, nan, sqrt
from typing import Literal

import msgspec

from penstock.sim.report.figures import Figures

# Two-sided 95 % quantiles of Student's t by degrees of freedom; between two rows the smaller row's (wider)
# counts.
_T95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip

Better = Literal["more", "less"]

COMPARED: tuple[tuple[str, str, Better], ...] = (
    ("attainment", "SLO attainment", "more"),
    ("goodput_rps", "goodput, requests/s", "more"),
    ("goodput_tps", "goodput, output tokens/s", "more"),
    ("ttft_p50_ms", "TTFT p50, ms", "less"),
    ("ttft_p95_ms", "TTFT p95, ms", "less"),
    ("tpot_p95_ms", "TPOT p95, ms", "less"),
    ("hit_rate", "prefix hit rate", "more"),
    ("jain", "fairness (Jain)", "more"),
    ("service_gap", "largest service gap, tokens", "less"),
    ("cost_per_million", "cost per 1M output tokens", "less"),
    ("slo_minutes_lost", "SLO minutes lost", "less"),
)
"""(name, words, which is better) of every figure that is compared and gated."""


def numbers(figures: Figures) -> dict[str, float]:
    """The compared figures of one run, by name."""
    return {
        "attainment": figures.attainment,
        "goodput_rps": figures.goodput_rps,
        "goodput_tps": figures.goodput_tps,
        "ttft_p50_ms": figures.ttft_ms.p50,
        "ttft_p95_ms": figures.ttft_ms.p95,
        "tpot_p95_ms": figures.tpot_ms.p95,
        "hit_rate": figures.hit_rate,
        "jain": figures.jain,
        "service_gap": figures.service_gap,
        "cost_per_million": figures.cost_per_million,
        "slo_minutes_lost": figures.slo_minutes_lost,
    }


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure under A and under B."""

    name: str
    words: str
    better: Better
    a: float
    """Mean over the seeds."""
    b: float
    difference: float
    """Mean of B - A."""
    low: float
    """The 95 % interval of it; infinite with a single seed."""
    high: float

    @property
    def verdict(self) -> Literal["better", "worse", "no difference shown"]:
        """The interval's verdict on B."""
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if (self.difference > 0) == (self.better == "more") else "worse"


def compare(a: Sequence[Figures], b: Sequence[Figures]) -> list[PairedDifference]:
    """The paired differences of runs on the same seeds, in the same order."""
    assert len(a) == len(b) > 0
    left, right = [numbers(each) for each in a], [numbers(each) for each in b]
    found: list[PairedDifference] = []
    for name, words, better in COMPARED:
        ones, others = [each[name] for each in left], [each[name] for each in right]
        differences = [other - one for one, other in zip(ones, others, strict=True)]
        mean, half = mean_and_half_width(differences)
        found.append(
            PairedDifference(
                name=name, words=words, better=better, a=sum(ones) / len(ones), b=sum(others) / len(others),
                difference=mean, low=mean - half, high=mean + half,
            )
        )  # fmt: skip
    return found


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval by Student's t.

    No value: not a number; one: an infinite interval.
    """
    if not values:
        return nan, inf
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, inf if values[0] else 0.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, t95(len(values) - 1) * sqrt(variance / len(values))


def t95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t; never smaller than the true one."""
    return _T95[max(known for known in _T95 if known <= degrees)]
