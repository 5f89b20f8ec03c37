import statistics

from hypothesis import given
from hypothesis import strategies as st

from penstock import rng
from penstock.bench.load import Samples, percentile

VALUES = st.lists(st.integers(0, 10**12), min_size=2, max_size=60)


@given(VALUES)
def test_percentiles_are_those_of_the_standard_library(values: list[int]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    ordered = sorted(values)
    for percent in (1, 50, 90, 95, 99):
        assert abs(percentile(ordered, percent / 100) - cuts[percent - 1]) <= 0.01  # Float error at 10^12.


@given(VALUES)
def test_the_summary_is_ordered_and_exact_at_the_ends(values: list[int]) -> None:
    samples = Samples(rng.stream(1, "test"))
    for value in values:
        samples.add(value)
    got = samples.summary()
    assert (got.count, got.min, got.max) == (len(values), min(values), max(values))
    assert got.min <= got.p50 <= got.p90 <= got.p95 <= got.p99 <= got.max


def test_memory_is_bounded_and_the_subset_is_fair() -> None:
    samples = Samples(rng.stream(1, "test"), bound=1000)
    for value in range(100_000):
        samples.add(value)
    got = samples.summary(divisor=1000)
    assert (got.count, got.max, got.mean) == (100_000, 99.999, 49.9995)
    assert abs(got.p50 - 50) < 5  # A thousand of a hundred thousand: one standard error is 1.6.


def test_nothing_sums_up_to_zeros() -> None:
    got = Samples(rng.stream(1, "test")).summary()
    assert (got.count, got.mean, got.p99) == (0, 0.0, 0.0)
