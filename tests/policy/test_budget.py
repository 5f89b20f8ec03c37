from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.clock import NS_PER_S
from penstock.config.ledger import ModelPrice, PricesConfig
from penstock.errors import BudgetExhausted
from penstock.policy.limits.budget import (
    DAY_NS,
    BudgetRefusal,
    BudgetTerms,
    Spent,
    TenantBudgets,
    day_of,
)
from penstock.policy.limits.price import PriceList
from penstock.policy.tenant import Tenant
from penstock.types import TenantId, Usage
from tests.doubles.budget_hold import BudgetHold, hold

HOUR_NS = 3600 * NS_PER_S
JUNE_30 = 20_634 * DAY_NS  # 2026-06-30


def tenant(day: int = 0, month: int = 0, name: str = "acme") -> Tenant:
    return Tenant(id=TenantId(name), budget_day_micros=day, budget_month_micros=month)


def budgets(**changes: object) -> TenantBudgets:
    return TenantBudgets(BudgetTerms(**changes), wall_offset_ns=JUNE_30)


def reserved(answer: BudgetHold | BudgetRefusal) -> BudgetHold:
    assert isinstance(answer, BudgetHold), answer
    return answer


def refused(answer: BudgetHold | BudgetRefusal) -> BudgetRefusal:
    assert isinstance(answer, BudgetRefusal), answer
    return answer


def test_what_is_reserved_is_not_there_for_others() -> None:
    money, acme = budgets(), tenant(day=100)
    first = reserved(hold(money, 0, acme, 60))
    refusal = refused(hold(money, 0, acme, 60))
    assert (refusal.kind, refusal.limit_micros, refusal.used_micros) == ("budget_day", 100, 60)
    first.settle(0, 30)
    reserved(hold(money, 0, acme, 70)).undo(0)
    refused(hold(money, 0, acme, 71))
    assert money.spent(0, acme.id) == (30, 30)


def test_a_stream_is_renewed_until_the_budget_ends() -> None:
    money, acme = budgets(), tenant(day=100)
    stream = reserved(hold(money, 0, acme, 40))
    assert stream.renew(0, 40)
    assert stream.renew(0, 70)
    assert stream.renew(0, 100)
    assert not stream.renew(0, 101)
    stream.settle(0, 100)
    assert money.spent(0, acme.id) == (100, 100)


def test_a_day_ends_at_midnight_and_a_month_with_its_last_day() -> None:
    money, acme = budgets(), tenant(day=100, month=150)
    reserved(hold(money, 0, acme, 100)).settle(0, 100)
    refusal = refused(hold(money, 23 * HOUR_NS, acme, 1))
    assert (refusal.kind, refusal.retry_after_ns) == ("budget_day", HOUR_NS)
    reserved(hold(money, DAY_NS, acme, 100)).settle(DAY_NS, 100)  # July: the month is new as well.
    assert money.spent(DAY_NS, acme.id) == (100, 100)
    refusal = refused(hold(money, 2 * DAY_NS, acme, 51))
    assert (refusal.kind, refusal.retry_after_ns) == ("budget_month", 30 * DAY_NS)


def test_what_runs_over_midnight_counts_for_the_day_in_which_it_ends() -> None:
    money, acme = budgets(), tenant(day=100)
    stream = reserved(hold(money, 0, acme, 60))
    refused(hold(money, DAY_NS, acme, 60))
    stream.settle(DAY_NS, 60)
    assert money.spent(DAY_NS, acme.id) == (60, 60)


def test_the_refusal_says_what_and_until_when() -> None:
    money, acme = budgets(), tenant(day=10_000)
    reserved(hold(money, 0, acme, 9_999)).settle(0, 9_999)
    error = refused(hold(money, 23 * HOUR_NS, acme, 2)).error()
    assert isinstance(error, BudgetExhausted)
    assert error.retry_after_s == 3600
    assert "daily budget of 0.01 is used up" in str(error)


def test_warnings_come_once_for_each_share_and_period() -> None:
    money, acme = budgets(), tenant(day=100)
    for micros in (40, 15, 5, 25, 14):
        reserved(hold(money, 0, acme, micros)).settle(0, micros)
    reported = [(event.period, event.share, event.spent_micros) for event in money.take_events()]
    assert reported == [("day", 0.5, 55), ("day", 0.8, 85)]
    refused(hold(money, 0, acme, 2))
    refused(hold(money, 0, acme, 2))
    assert [(event.share, event.spent_micros) for event in money.take_events()] == [(1.0, 99)]
    reserved(hold(money, DAY_NS, acme, 50)).settle(DAY_NS, 50)
    assert [event.share for event in money.take_events()] == [0.5]


def spent(day: int, day_micros: int, month_micros: int, process: str = "p") -> Spent:
    return Spent(
        tenant=TenantId("acme"),
        process=process,
        day=day,
        day_micros=day_micros,
        month_micros=month_micros,
    )


def test_soft_budgets_only_warn() -> None:
    money, acme = budgets(hard=False), tenant(day=100)
    stream = reserved(hold(money, 0, acme, 1_000))
    assert stream.renew(0, 2_000)
    stream.settle(0, 2_000)
    assert [event.share for event in money.take_events()] == [1.0]


def test_no_budget_is_no_limit_but_it_is_counted() -> None:
    money = budgets()
    reserved(hold(money, 0, tenant(), 10**12)).settle(0, 10**12)
    refused(hold(money, 0, tenant(day=100), 1))
    assert money.take_events()[0].limit_micros == 100


def test_what_the_ledger_knows_is_taken_over() -> None:
    money, acme = budgets(), tenant(day=100, month=1000)
    day = day_of(JUNE_30)
    money.restore(0, [spent(day, 90, 500)])
    refused(hold(money, 0, acme, 11))
    reserved(hold(money, 0, acme, 10)).settle(0, 10)
    money.restore(0, [spent(day, 90, 500), spent(day - 1, 999, 600, "q")])
    assert money.spent(0, acme.id) == (100, 1110)
    money.restore(0, [spent(day, 80, 400)])
    assert money.spent(0, acme.id) == (100, 1110), "old news"


def test_a_reservation_ends_once() -> None:
    stream = reserved(hold(budgets(), 0, tenant(), 1))
    stream.settle(0, 1)
    for again in (lambda: stream.settle(0, 1), lambda: stream.undo(0), lambda: stream.renew(0, 5)):
        with pytest.raises(AssertionError):
            again()


def test_tenants_that_are_remembered_are_bounded_and_those_that_run_are_kept() -> None:
    money = budgets(tenants_max=300)
    running = [reserved(hold(money, 0, tenant(name=f"r{i}"), 1)) for i in range(50)]
    for i in range(2_000):
        reserved(hold(money, 0, tenant(name=f"t{i}"), 1)).settle(0, 1)
    assert len(money) <= 300
    for stream in running:
        stream.settle(0, 1)
    assert all(money.spent(0, TenantId(f"r{i}")) == (1, 1) for i in range(50))


# --- 100 streams against one cent --------------------------------------------------------------------------


@dataclass
class Stream:
    """A running answer that is renewed at every slice boundary and stopped `late` tokens after one, if it
    must.
    """

    reservation: BudgetHold
    prompt: int
    length: int
    tokens: int = 0
    stopped: bool = field(default=False)


PRICES = PriceList(PricesConfig(models=(ModelPrice(model="m", input=1.0, output=4.0),)))
SLICE = 256


def cost(stream: Stream, tokens: int) -> int:
    return PRICES.cost_micros("m", Usage(prompt_tokens=stream.prompt, completion_tokens=tokens))


def run_streams(limit: int, prompts: list[int], lengths: list[int], late: list[int]) -> tuple[int, int]:
    """(spent, admitted): all at once, token by token, until every stream has ended."""
    money, acme = budgets(), tenant(day=limit)
    streams: list[Stream] = []
    for prompt, length in zip(prompts, lengths, strict=True):
        first = PRICES.cost_micros("m", Usage(prompt_tokens=prompt, completion_tokens=SLICE))
        answer = hold(money, 0, acme, first)
        if isinstance(answer, BudgetHold):
            streams.append(Stream(answer, prompt, length))
    running = list(zip(streams, late, strict=False))
    while running:
        for stream, overrun in list(running):
            num = min(SLICE, stream.length - stream.tokens)
            stream.tokens += num
            more = stream.tokens < stream.length
            if more and not stream.reservation.renew(0, cost(stream, stream.tokens + SLICE)):
                stream.stopped = True
                stream.tokens = min(stream.length, stream.tokens + overrun)  # Until the abort arrives.
            if stream.stopped or not more:
                stream.reservation.settle(0, cost(stream, stream.tokens))
                running.remove((stream, overrun))
    spent, _ = money.spent(0, acme.id)
    assert spent == money.settled_micros == sum(cost(stream, stream.tokens) for stream in streams)
    return spent, len(streams)


def test_100_streams_against_a_cent() -> None:
    """4b item 10: spending stays within the budget and one slice for each stream."""
    slice_micros = 4 * SLICE
    spent, admitted = run_streams(10_000, [20] * 100, [10_000] * 100, [0] * 100)
    assert admitted == 9  # 20 + 1,024 millionths each for the prompt and the first slice.
    assert 10_000 - admitted * slice_micros <= spent <= 10_000
    spent, admitted = run_streams(200_000, [20] * 100, [10_000] * 100, [SLICE] * 100)
    assert admitted == 100
    assert 200_000 - slice_micros <= spent <= 200_000 + 100 * slice_micros


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 200_000),
    st.lists(
        st.tuples(st.integers(0, 2_000), st.integers(1, 4_000), st.integers(0, SLICE)),
        min_size=1,
        max_size=40,
    ),
)
def test_never_over_by_more_than_a_slice_for_each_stream(
    limit: int, streams: list[tuple[int, int, int]]
) -> None:
    prompts, lengths, late = map(list, zip(*streams, strict=True))
    spent, admitted = run_streams(limit, prompts, lengths, late)
    assert spent <= limit + admitted * 4 * SLICE
    if not any(late):
        assert spent <= limit


class AnyCourse(RuleBasedStateMachine):
    """Settled is what was spent, and reserved plus spent is within the budget, whatever happens in which
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.money, self.now_ns = budgets(), 0
        self.acme = tenant(day=500, month=1500)
        self.live: list[BudgetHold] = []
        self.settled: dict[int, int] = {}

    @rule(micros=st.integers(0, 200))
    def reserve(self, micros: int) -> None:
        answer = hold(self.money, self.now_ns, self.acme, micros)
        if isinstance(answer, BudgetHold):
            self.live.append(answer)
        else:
            assert 0 < answer.retry_after_ns <= 31 * DAY_NS
            assert answer.used_micros + micros > answer.limit_micros

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 99), more=st.integers(0, 100))
    def renew(self, place: int, more: int) -> None:
        stream = self.live[place % len(self.live)]
        before = stream.reserved
        assert stream.renew(self.now_ns, before + more) == (stream.reserved == before + more)

    @precondition(lambda self: self.live)
    @rule(place=st.integers(0, 99), share=st.fractions(0, 1), undo=st.booleans())
    def end(self, place: int, share: float, undo: bool) -> None:
        stream = self.live.pop(place % len(self.live))
        if undo:
            stream.undo(self.now_ns)
            return
        micros = int(stream.reserved * share)
        stream.settle(self.now_ns, micros)
        day = day_of(JUNE_30 + self.now_ns)
        self.settled[day] = self.settled.get(day, 0) + micros

    @rule(hours=st.integers(0, 30))
    def wait(self, hours: int) -> None:
        self.now_ns += hours * HOUR_NS

    @invariant()
    def sums_hold(self) -> None:
        day = day_of(JUNE_30 + self.now_ns)
        spent, month = self.money.spent(self.now_ns, self.acme.id)
        assert spent == self.settled.get(day, 0)
        assert self.money.settled_micros == sum(self.settled.values())
        assert spent + sum(stream.reserved for stream in self.live) <= 500
        assert spent <= month <= 1500


TestAnyCourse = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
