"""Figures of made records, where the right answer is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.flow import Outcome
from penstock.sim.report.compare import compare, mean_and_half_width, t95
from penstock.sim.report.figures import (
    SHARES_MAX,
    Objective,
    Run,
    Spread,
    WorkerUse,
    fair_shares,
    figures,
    jain,
    largest_gap,
    ttft_shares,
)
from penstock.sim.traffic.prompts import RequestRecord

MS, S = 10**6, 10**9


def record(
    at_s: float, ttft_ms: float = 100, *, tenant: str = "a", outcome: Outcome = Outcome.FINISHED,
    tokens: int = 11, queue_s: float = 0.0, gap_ms: float = 20,
) -> RequestRecord:  # fmt: skip
    began = outcome is Outcome.FINISHED
    first = round(at_s * S + ttft_ms * MS)
    return RequestRecord(
        id=f"{tenant}{at_s}", tenant=tenant, model="m", band="default", outcome=outcome,
        at_ns=round(at_s * S), first_ns=first if began else -1,
        end_ns=first + round((tokens - 1) * gap_ms * MS), prompt_tokens=100 if began else 0,
        cached_tokens=25 if began else 0, completion_tokens=tokens if began else 0, attempts=int(began),
        queue_ns=round(queue_s * S), reason="" if began else "admission",
    )  # fmt: skip


def test_the_objective_decides_what_is_good() -> None:
    records = [
        record(0),
        record(1, 600),
        record(2, gap_ms=200),
        record(3, outcome=Outcome.REJECTED),
        record(9),
    ]
    found = figures(Run(records=records), Objective(ttft_ms=500, tpot_ms=100))
    assert (found.requests, found.good, found.attainment) == (5, 2, 0.4)
    assert found.outcomes == {"finished": 4, "rejected": 1}
    assert found.reasons == {"admission": 1}
    assert found.hit_rate == 0.25
    assert found.ttft_ms.max == 600
    assert found.goodput_tps == pytest.approx(22 / found.seconds)
    assert sum(window.arrived for window in found.windows) == 5
    # Three windows of about a second were lost: those of the late, the slow and the refused request.
    assert found.slo_minutes_lost == pytest.approx(3 * found.seconds / len(found.windows) / 60)


def test_money_is_the_workers_time() -> None:
    use = WorkerUse(id="w", model="m", paid_ns=3600 * S, busy_ns=1800 * S, price_per_hour=2.0)
    found = figures(Run(records=[record(0, tokens=1001)], workers=[use, use]))
    assert found.cost == pytest.approx(4.0)
    assert found.cost_per_million == pytest.approx(4.0 / 1001 * 1e6)
    assert found.utilisation == 0.5


def test_nothing_is_not_an_error() -> None:
    found = figures(Run(records=[]))
    assert (found.requests, found.attainment, found.ttft_ms) == (0, 1.0, Spread())


def test_percentiles_lie_between_samples() -> None:
    spread = Spread.of([MS * value for value in (4, 1, 3, 2)])
    assert (spread.p50, spread.max, spread.mean) == (2.5, 4, 2.5)


def test_shares_are_max_min_fair() -> None:
    assert fair_shares(9, {"little": (1, 1), "some": (4, 1), "much": (50, 1)}) == {
        "little": 1,
        "some": 4,
        "much": 4,
    }
    assert fair_shares(9, {"one": (50, 2), "two": (50, 1)}) == {"one": 6, "two": 3}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3), st.tuples(st.floats(0, 1e6), st.floats(1, 1e6)), min_size=1
    )
)
def test_jain_is_between_one_nth_and_one(tenants: dict[str, tuple[float, float]]) -> None:
    index = jain({name: (min(served, wanted), wanted, 1.0) for name, (served, wanted) in tenants.items()})
    assert 1 / len(tenants) - 1e-9 <= index <= 1 + 1e-9


def test_jain_knows_the_extremes() -> None:
    assert jain({"a": (10, 10, 1), "b": (10, 500, 1)}) == 1
    assert jain({"a": (20, 500, 1), "b": (0, 500, 1)}) == 0.5


def test_the_gap_counts_only_while_both_wait() -> None:
    waiting = [record(t / 10, 2000, tenant=who, queue_s=1.9) for t in range(50) for who in "ab"]
    extra = [record(t / 10, 2000, tenant="a", queue_s=1.9) for t in range(50)]
    assert largest_gap(waiting, {}) < 300
    assert largest_gap([*waiting, *extra], {}) > 2000
    assert largest_gap([record(t / 10, tenant=who) for t in range(50) for who in "ab"], {}) == 0


def test_paired_differences_see_through_what_seeds_share() -> None:
    base = [figures(Run(records=[record(0, 100 + 50 * seed)])) for seed in range(8)]
    later = [figures(Run(records=[record(0, 110 + 50 * seed)])) for seed in range(8)]
    ttft = next(each for each in compare(base, later) if each.name == "ttft_p50_ms")
    assert (round(ttft.difference), ttft.verdict) == (10, "worse")
    assert ttft.high - ttft.low < 1
    same = next(each for each in compare(base, base) if each.name == "attainment")
    assert same.verdict == "no difference shown"


def test_the_interval_is_students() -> None:
    mean, half = mean_and_half_width([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5))
    assert mean_and_half_width([1.0])[1] == float("inf")
    assert t95(11) == t95(10) > t95(12)


def test_shares_of_first_tokens_rise_to_one_and_are_bounded() -> None:
    records = [record(i, i + 1) for i in range(1000)] + [record(5, outcome=Outcome.REJECTED)]
    shares = ttft_shares(records)
    assert len(shares) == SHARES_MAX + 1
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == ((1.0, 0.001), (1000.0, 1.0))
    assert ttft_shares(records[:1]) == [(1.0, 1.0)]
    assert ttft_shares(records[-1:]) == []
