"""Budgets that several gateways share, against the table that keeps them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.limits.budget import (
    DAY_NS,
    BudgetRefusal,
    BudgetTerms,
    Spent,
    TenantBudgets,
    day_of,
)
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import LeaseReply, LeaseTable
from penstock.policy.tenant import Tenant
from penstock.policy.terms import SharedTerms
from penstock.types import TenantId
from tests.doubles.budget_hold import BudgetHold, hold

JUNE_30 = 20_634 * DAY_NS
COUNT = 3


def tenant(day: int, month: int = 0) -> Tenant:
    return Tenant(id=TenantId("acme"), budget_day_micros=day, budget_month_micros=month)


class Gateway:
    """One gateway's budgets, and the questions that it has asked and not had answered."""

    def __init__(self, name: str, **shared: Any) -> None:
        self.name = name
        self.leases = Leases(SharedTerms(gateways=COUNT, **shared), process=f"p-{name}")
        self.money = TenantBudgets(BudgetTerms(), wall_offset_ns=JUNE_30, leases=self.leases)
        self.live: list[BudgetHold] = []
        self.spent = 0

    def talk(self, now_ns: int, table: LeaseTable) -> LeaseReply:
        """One batch, answered at once."""
        reply = table.lease(now_ns, self.name, self.leases.asks(now_ns))
        self.leases.granted(now_ns, reply)
        return reply

    def ask(self, now_ns: int, acme: Tenant, micros: int, table: LeaseTable | None) -> bool:
        """A request as the gateway serves it: what is lacking is asked for first."""
        if self.money.lacks(now_ns, acme, micros):
            if table is None:
                self.leases.is_late = True
            else:
                self.talk(now_ns, table)
        answer = hold(self.money, now_ns, acme, micros)
        if isinstance(answer, BudgetHold):
            self.live.append(answer)
        return isinstance(answer, BudgetHold)

    def end(self, now_ns: int, place: int, micros: int) -> None:
        self.live.pop(place).settle(now_ns, micros)
        self.spent += micros


@dataclass
class World:
    table: LeaseTable = field(default_factory=lambda: LeaseTable(SharedTerms()))
    gateways: list[Gateway] = field(default_factory=lambda: [Gateway(name) for name in "abc"])

    def flood(self, acme: Tenant, micros: int) -> int:
        """Requests that were let in, one gateway after the other."""
        num = 0
        for number in range(60):
            for each in self.gateways:
                num += each.ask(number * NS_PER_S, acme, micros, self.table)
                each.talk(number * NS_PER_S, self.table)
        return num


def test_all_gateways_together_reserve_what_the_budget_has() -> None:
    world = World()
    assert world.flood(tenant(1000), 10) == 100
    for each in world.gateways:
        while each.live:
            each.end(0, 0, 10)
    assert sum(each.spent for each in world.gateways) == 1000


def test_what_was_reserved_and_not_spent_comes_back_to_all() -> None:
    world, acme = World(), tenant(100)
    one, two, _ = world.gateways
    assert one.ask(0, acme, 100, world.table)
    assert not two.ask(0, acme, 10, world.table)
    one.end(0, 0, 30)
    now_ns = NS_PER_S
    one.talk(now_ns, world.table)
    assert not two.ask(now_ns, acme, 71, world.table)
    now_ns += NS_PER_S
    assert two.ask(now_ns, acme, 70, world.table)
    assert two.money.spent(now_ns, acme.id)[0] == 30


def test_a_running_answers_next_slices_are_held_ahead() -> None:
    world, acme = World(), tenant(100_000)
    one = world.gateways[0]
    now_ns = 0
    for _ in range(40):
        assert one.ask(now_ns, acme, 10, world.table)
    now_ns += NS_PER_S
    one.talk(now_ns, world.table)
    assert all(stream.renew(now_ns, 20) for stream in one.live), "all at once, without an answer between"


@pytest.mark.parametrize("policy", ["closed", "local-share", "open"])
def test_a_store_that_is_away(policy: str) -> None:
    """Closed: what is held. Local share: its part of what was left. Open: all that was left."""
    allowed = {"closed": 10, "local-share": 10 + 990 // COUNT, "open": 1000}[policy]
    one, acme, table = Gateway("a", on_store_down=policy), tenant(1000), LeaseTable(SharedTerms())
    for other in "bc":
        table.lease(0, other, [])
    assert one.ask(0, acme, 10, table)
    one.end(0, 0, 10)
    one.leases.look_for_idle(10 * NS_PER_S)
    one.talk(10 * NS_PER_S, table)
    one.leases.failed(10 * NS_PER_S)
    num = sum(one.ask(10 * NS_PER_S, acme, 1, None) for _ in range(1200))
    assert num == allowed - 10
    one.talk(11 * NS_PER_S, table)
    two = Gateway("b")
    assert not two.ask(12 * NS_PER_S, acme, 1001 - allowed, table), "it is charged when the store is back"
    while one.live:
        one.end(12 * NS_PER_S, 0, 1)
    one.leases.look_for_idle(30 * NS_PER_S)
    one.talk(30 * NS_PER_S, table)
    assert two.ask(30 * NS_PER_S, acme, 1000 - allowed, table)


def test_a_store_that_is_late_costs_one_slice_of_each_gateway() -> None:
    world, acme = World(), tenant(1000)
    for each in world.gateways:
        each.ask(0, acme, 1, world.table)
        each.end(0, 0, 0)
        each.leases.look_for_idle(20 * NS_PER_S)
        each.talk(20 * NS_PER_S, world.table)
    assert world.gateways[0].ask(20 * NS_PER_S, acme, 999, world.table)
    now_ns = 21 * NS_PER_S
    let_in = [each.ask(now_ns, acme, 300, None) for each in world.gateways for _ in range(4)]
    assert let_in.count(True) == COUNT - 1, "the one that has heard last knows that nothing is left"


def test_a_late_store_grants_one_slice_until_it_answers_and_a_refusal_says_to_ask_again_soon() -> None:
    world, acme = World(), tenant(1000)
    one, two, _ = world.gateways
    for each in (one, two):
        each.ask(0, acme, 1, world.table)
        each.end(0, 0, 0)
        each.leases.look_for_idle(20 * NS_PER_S)
        each.talk(20 * NS_PER_S, world.table)
    now_ns = 21 * NS_PER_S
    assert two.ask(now_ns, acme, 1000, world.table)
    assert one.ask(now_ns, acme, 300, None), "on credit"
    world.table.lease(now_ns, "a", one.leases.asks(now_ns))  # The answer is still on its way.
    refused = hold(one.money, now_ns, acme, 300)
    assert isinstance(refused, BudgetRefusal)
    assert refused.message == (
        "Your daily budget of 0.00 may have enough left, but the store that knows does not answer now. "
        "Try again in 2 s."
    )
    assert refused.error().retry_after_s == 1
    one.leases.failed(now_ns)
    one.talk(now_ns + NS_PER_S, world.table)
    refused = hold(one.money, now_ns + NS_PER_S, acme, 300)
    assert isinstance(refused, BudgetRefusal)
    assert refused.retry_after_ns == DAY_NS - (now_ns + NS_PER_S)
    assert "is used up: 0.001300 are spent or in use, and this request needs 0.000300" in refused.message


def test_a_store_that_lost_its_memory_learns_all_of_it() -> None:
    world, acme = World(), tenant(1000)
    one, two, _ = world.gateways
    two.money.restore(
        0, [Spent(tenant=acme.id, process="dead", day=day_of(JUNE_30), day_micros=200, month_micros=200)]
    )
    for each in (one, two):
        assert each.ask(0, acme, 300, world.table)
        each.end(0, 0, 300)
        each.leases.failed(0)
    new = LeaseTable(SharedTerms(), epoch=99)
    for each in (one, two):
        each.talk(NS_PER_S, new)
        each.talk(2 * NS_PER_S, new)
    third = Gateway("d")
    assert not third.ask(3 * NS_PER_S, acme, 201, new)
    assert third.ask(4 * NS_PER_S, acme, 200, new)


def test_a_lost_answer_and_a_late_copy_grant_nothing_twice() -> None:
    world, acme = World(), tenant(100)
    one = world.gateways[0]
    assert one.money.lacks(0, acme, 60)
    asks = one.leases.asks(0)
    world.table.lease(0, "a", asks)
    one.leases.failed(0)
    assert one.leases.asks(NS_PER_S) == asks
    one.talk(NS_PER_S, world.table)
    assert one.ask(NS_PER_S, acme, 60, world.table)
    one.talk(2 * NS_PER_S, world.table)
    world.table.lease(3 * NS_PER_S, "a", asks)
    ahead = 40 // (4 * COUNT)
    assert not world.gateways[1].ask(3 * NS_PER_S, acme, 41 - ahead, world.table)
    assert world.gateways[1].ask(4 * NS_PER_S, acme, 40 - ahead, world.table)


def test_a_gateway_that_is_gone_holds_nothing() -> None:
    world, acme = World(), tenant(100)
    one, two, _ = world.gateways
    assert one.ask(0, acme, 100, world.table)
    assert not two.ask(10 * NS_PER_S, acme, 10, world.table)
    assert two.ask(60 * NS_PER_S, acme, 100, world.table)


def test_a_new_day_is_a_new_budget_and_what_runs_counts_in_it() -> None:
    world, acme = World(), tenant(100)
    one, two, _ = world.gateways
    assert one.ask(0, acme, 100, world.table)
    assert not two.ask(0, acme, 10, world.table)
    one.money.spent(DAY_NS, acme.id)
    one.talk(DAY_NS + NS_PER_S, world.table)
    assert not two.ask(DAY_NS, acme, 10, world.table) or one.live, "it is reserved in the new day"
    one.end(DAY_NS + NS_PER_S, 0, 40)
    one.talk(DAY_NS + 2 * NS_PER_S, world.table)
    assert not two.ask(DAY_NS + 3 * NS_PER_S, acme, 61, world.table)


def test_a_gateway_that_ends_hands_back_what_it_holds() -> None:
    world, acme = World(), tenant(1000)
    one, two, _ = world.gateways
    for _ in range(5):
        assert one.ask(0, acme, 10, world.table)
    while one.live:
        one.end(0, 0, 10)
    one.leases.leave()
    one.talk(0, world.table)
    assert two.ask(0, acme, 950, world.table)


def test_a_request_that_costs_more_than_the_budget_waits_for_nothing() -> None:
    world = World()
    assert not world.gateways[0].money.lacks(0, tenant(100), 101)
    assert not world.gateways[0].ask(0, tenant(100), 101, world.table)


def test_soft_budgets_wait_for_nothing() -> None:
    one = Gateway("a")
    one.money.change(BudgetTerms(hard=False))
    assert not one.money.lacks(0, tenant(100), 200)
    assert one.ask(0, tenant(100), 200, None)


class AnyCourse(RuleBasedStateMachine):
    """While the store answers, what was spent and is reserved everywhere is within the budget; with answers
    that are late or lost it is over by a slice of each gateway at most.
    """

    LIMIT, SLICE = 500, 50

    def __init__(self) -> None:
        super().__init__()
        self.world, self.now_ns, self.num_late = World(), 0, 0
        self.acme = tenant(self.LIMIT)

    def pick(self, place: int) -> Gateway:
        return self.world.gateways[place % COUNT]

    @rule(place=st.integers(0, 2), micros=st.integers(1, SLICE), late=st.sampled_from([False, False, True]))
    def ask(self, place: int, micros: int, late: bool) -> None:
        gateway = self.pick(place)
        gateway.ask(self.now_ns, self.acme, micros, None if late else self.world.table)

    @precondition(lambda self: any(each.live for each in self.world.gateways))
    @rule(place=st.integers(0, 2), more=st.integers(1, SLICE))
    def renew(self, place: int, more: int) -> None:
        for stream in self.pick(place).live:
            stream.renew(self.now_ns, stream.reserved + more)

    @rule(place=st.integers(0, 2), share=st.floats(0, 1))
    def end(self, place: int, share: float) -> None:
        gateway = self.pick(place)
        if gateway.live:
            gateway.end(self.now_ns, 0, int(share * gateway.live[0].reserved))

    @rule(place=st.integers(0, 2), lost=st.booleans())
    def talk(self, place: int, lost: bool) -> None:
        gateway = self.pick(place)
        if lost:
            self.world.table.lease(self.now_ns, gateway.name, gateway.leases.asks(self.now_ns))
        else:
            gateway.talk(self.now_ns, self.world.table)

    @rule(ms=st.integers(1, 3000))
    def wait(self, ms: int) -> None:
        self.now_ns += ms * NS_PER_MS
        for each in self.world.gateways:
            each.leases.look_for_idle(self.now_ns)
            self.world.table.lease(self.now_ns, each.name, [])

    @invariant()
    def the_budget_holds(self) -> None:
        spent = sum(each.spent for each in self.world.gateways)
        reserved = sum(stream.reserved for each in self.world.gateways for stream in each.live)
        assert spent + reserved <= self.LIMIT + COUNT * self.SLICE


TestAnyCourse: Callable[..., object] = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
