import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.policy.lifecycle.machine_costs import (
    HOUR_NS,
    AcceleratorCost,
    ReportedCost,
    share_micros,
    work_weight,
)
from penstock.types import RequestId

A, B, P = RequestId("a"), RequestId("b"), RequestId("probe")
DOLLAR_A_SECOND = 3600 * 10**6
S = NS_PER_S


def test_alone_it_pays_for_its_time_and_idle_time_has_an_account() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(2 * S, A)
    cost.worked(A, 5)
    assert cost.settle(5 * S, A) == 3_000_000
    accounts = cost.accounts(6 * S).micros()
    assert (accounts.bill, accounts.requests, accounts.idle, accounts.platform) == (
        6_000_000,
        3_000_000,
        3_000_000,
        0,
    )


def test_together_they_pay_by_their_work() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(0, A)
    cost.started(0, B)
    cost.worked(A, 30)
    cost.worked(B, 10)
    cost.interval(4 * S)
    cost.worked(B, 10)
    assert cost.settle(5 * S, A) == 3_000_000
    assert cost.settle(5 * S, B) == 2_000_000


def test_a_prompt_under_way_shares_equally_until_work_is_known() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(0, A)
    cost.started(0, B)
    assert cost.settle(2 * S, A) == 1_000_000
    assert cost.settle(2 * S, B) == 1_000_000


def test_probes_are_the_platforms() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(0, P, is_platform=True)
    cost.worked(P, 1)
    assert cost.settle(1 * S, P) == 0
    assert cost.accounts(1 * S).micros().platform == 1_000_000


def test_a_long_context_costs_more_for_equal_tokens() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(0, A)
    cost.started(0, B)
    for step in range(100):
        cost.worked(A, work_weight(computed_tokens=1, kv_tokens_read=30_000 + step))
        cost.worked(B, work_weight(computed_tokens=1, kv_tokens_read=100 + step))
    cost.interval(10 * S)
    assert cost.settle(10 * S, A) > 5 * cost.settle(10 * S, B)


def test_requests_begin_and_end_once() -> None:
    cost = AcceleratorCost(0, 1)
    cost.started(0, A)
    with pytest.raises(AssertionError):
        cost.started(0, A)
    cost.settle(0, A)
    with pytest.raises(KeyError):
        cost.settle(0, A)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_parts_are_the_bill_whatever_happens(data: st.DataObject) -> None:
    """Requests + idle + reserve + platform = price * time, to the millionth and below."""
    price = data.draw(st.integers(0, 10**11))
    cost, now_ns, running, paid = AcceleratorCost(7, price), 7, dict[str, bool](), 0
    for number in range(data.draw(st.integers(0, 40))):
        now_ns += data.draw(st.integers(0, 3 * 10**9))
        kind = data.draw(st.sampled_from(["start", "work", "work", "interval", "settle", "serves"]))
        if kind == "start":
            running[f"r{number}"] = data.draw(st.booleans()) and data.draw(st.booleans())
            cost.started(now_ns, RequestId(f"r{number}"), is_platform=running[f"r{number}"])
        elif kind == "serves":
            cost.serves(now_ns, in_service=data.draw(st.booleans()), is_lost=False)
        elif kind == "interval":
            cost.interval(now_ns)
        elif running:
            name = RequestId(data.draw(st.sampled_from(sorted(running))))
            if kind == "work":
                cost.worked(name, data.draw(st.integers(0, 10**9)))
            else:
                del running[name]
                paid += cost.settle(now_ns, name)
        accounts = cost.accounts(now_ns)
        assert accounts.bill == price * (now_ns - 7)
        parts = (accounts.requests, accounts.running, accounts.idle, accounts.reserve, accounts.platform)
        assert sum(parts) == accounts.bill
        assert accounts.requests == paid * HOUR_NS
        assert min(parts) >= 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_a_worker_tells_and_what_it_does_not_are_the_bill(data: st.DataObject) -> None:
    """It works, rests, leaves service and dies at any time; whenever nothing is left to be told, the parts
    sum to price * time.
    """
    price, now_ns, busy_ns = data.draw(st.integers(1, 10**9)), 0, 0
    cost, has_work, is_there = ReportedCost(0, price), False, True
    for _ in range(data.draw(st.integers(0, 30))):
        passed_ns = data.draw(st.integers(0, 3 * 10**9))
        now_ns += passed_ns
        busy_ns += passed_ns * has_work
        kind = data.draw(st.sampled_from(["work", "rest", "report", "look", "hold", "serve", "die"]))
        if kind == "die":
            cost.serves(now_ns, in_service=False, is_lost=True)
            has_work, is_there, busy_ns = False, False, 0
        elif kind in ("hold", "serve"):
            is_there = is_there or kind == "serve"
            cost.serves(now_ns, in_service=kind == "serve", is_lost=False)
        elif kind == "look":
            cost.pass_time(now_ns)
        elif is_there:
            has_work = kind == "work" or (has_work and kind == "report")
            cost.report(now_ns, busy_ns, 0, has_work=has_work)
        if not has_work:
            cost.pass_time(now_ns)
            assert cost.busy + cost.idle + cost.reserve == price * now_ns


def test_what_others_run_beside_it_is_theirs() -> None:
    """Two gateways, one request each in the same second: the bill is paid once."""
    gateways = [AcceleratorCost(0, DOLLAR_A_SECOND) for _ in range(2)]
    for cost in gateways:
        cost.started(0, A)
        cost.beside(0, 2)
    assert [cost.settle(1 * S, A) for cost in gateways] == [500_000, 500_000]
    for cost in gateways:
        cost.beside(1 * S, 0)
    found = [cost.accounts(2 * S).micros() for cost in gateways]
    assert [(each.bill, each.requests, each.elsewhere, each.idle) for each in found] == [
        (2_000_000, 500_000, 500_000, 1_000_000)
    ] * 2


def test_others_pay_for_the_time_that_they_were_there() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(0, A)
    cost.beside(1 * S, 2)
    assert cost.settle(3 * S, A) == 2_000_000


def test_a_new_price_counts_from_then_on() -> None:
    cost = AcceleratorCost(0, DOLLAR_A_SECOND)
    cost.started(0, A)
    cost.reprice(1 * S, 2 * DOLLAR_A_SECOND)
    assert cost.settle(2 * S, A) == 3_000_000


def test_told_time_is_busy_or_idle() -> None:
    cost = ReportedCost(0, DOLLAR_A_SECOND)
    cost.report(1 * S, 7 * S, 0, has_work=False)  # What it did before this gateway came is not on its bill.
    cost.report(2 * S, 7 * S + S // 2, 0, has_work=True)
    cost.pass_time(3 * S)
    assert (cost.busy, cost.idle) == (S // 2 * DOLLAR_A_SECOND, S * DOLLAR_A_SECOND), (
        "the rest is not told yet"
    )
    cost.report(4 * S, 8 * S, 0, has_work=False)
    cost.pass_time(5 * S)
    assert (cost.busy, cost.idle) == (S * DOLLAR_A_SECOND, 4 * S * DOLLAR_A_SECOND)
    cost.report(6 * S, S // 4, 0, has_work=False)  # Another process.
    assert cost.busy + cost.idle == 6 * S * DOLLAR_A_SECOND
    assert share_micros(S // 2, DOLLAR_A_SECOND) == 500_000


def test_idle_time_never_falls() -> None:
    """The report that work had begun comes late: the clock catches up before there is idle time again."""
    cost = ReportedCost(0, 1)
    cost.report(0, 0, 0, has_work=False)
    cost.pass_time(100)
    cost.report(101, 50, 0, has_work=True)
    assert (cost.busy, cost.idle) == (50, 100)
    cost.report(200, 120, 0, has_work=False)
    assert (cost.busy, cost.idle) == (120, 100)
    cost.pass_time(300)
    assert (cost.busy, cost.idle) == (120, 180)
