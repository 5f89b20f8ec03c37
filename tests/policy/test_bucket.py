from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.policy.limits.bucket import Bucket

HOUR_NS = 3600 * NS_PER_S
spans = st.integers(0, HOUR_NS)
rates = st.integers(1, 10**7)


def test_it_begins_full_and_refills_exactly() -> None:
    bucket = Bucket(0, 60, 60)
    assert bucket.standing(0)[0] == 60
    bucket.take(0, 60)
    assert not bucket.has(NS_PER_S - 1, 1)
    assert bucket.has(NS_PER_S, 1)
    assert bucket.standing(NS_PER_S)[1] == 59 * NS_PER_S
    assert bucket.standing(HOUR_NS)[0] == 60


def test_debt_is_waited_for() -> None:
    bucket = Bucket(0, 60, 60)
    bucket.take(0, 90)
    assert bucket.standing(0)[0] == 0
    assert bucket.wait_ns(0, 1) == 31 * NS_PER_S


def test_what_was_used_stays_used_when_the_limit_changes() -> None:
    bucket = Bucket(0, 100, 100)
    bucket.take(0, 60)
    bucket.change(0, 1000, 1000)
    assert bucket.standing(0)[0] == 940
    bucket.change(0, 100, 100)
    assert bucket.standing(0)[0] == 40
    bucket.change(0, 10, 10)  # More was used than the new limit has: it is empty, and not in debt.
    assert bucket.standing(0)[0] == 0
    assert bucket.wait_ns(0, 1) == 6 * NS_PER_S


@settings(deadline=None)
@given(rates, rates, st.lists(st.tuples(spans, st.integers(0, 10**6))))
def test_nothing_drifts(rate, burst, steps) -> None:
    """However often it is looked at, the level is what one exact sum says."""
    bucket = Bucket(0, rate, burst)
    level, now_ns = Fraction(burst), 0
    for span_ns, amount in steps:
        now_ns += span_ns
        level = min(Fraction(burst), level + Fraction(rate * span_ns, 60 * NS_PER_S))
        assert bucket.has(now_ns, amount) == (level >= amount)
        bucket.take(now_ns, amount)
        level -= amount
    assert bucket.standing(now_ns)[0] == max(0, level // 1)


@settings(deadline=None)
@given(rates, st.integers(1, 10**6), st.integers(0, 10**7), spans)
def test_the_wait_is_the_first_instant_at_which_it_fits(rate, burst, used, now_ns) -> None:
    bucket = Bucket(0, rate, burst)
    bucket.take(0, used)
    wait_ns = bucket.wait_ns(now_ns, burst)
    if wait_ns:
        assert not bucket.has(now_ns + wait_ns - 1, burst)
    assert bucket.has(now_ns + wait_ns, burst)
