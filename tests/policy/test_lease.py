from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import LimitsConfig, SharedConfig
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import LeaseAsk, LeaseTable
from penstock.policy.limits.rate_limit import Limiter, LimitRefusal, LimitReservation
from penstock.policy.tenant import Tenant
from penstock.policy.terms import SharedTerms
from penstock.types import TenantId

WHO = Tenant(id=TenantId("t"), tokens_per_minute=60_000)
KEY = "tokens:t"
SECOND = 1000  # Tokens that a second refills.


class Gateway:
    """One gateway's limiter with its leases, and what its requests really used."""

    def __init__(self, name: str, config: SharedConfig) -> None:
        self.name, self.leases = name, Leases(config)
        self.limiter = Limiter(LimitsConfig(), self.leases.make_bucket)
        self.live: deque[LimitReservation] = deque()
        self.used = 0

    def exchange(self, now_ns: int, table: LeaseTable | None, *, reply_lost: bool = False) -> None:
        """One batch; without a table, or with a lost reply, it fails."""
        self.leases.look_for_idle(now_ns)
        asks = self.leases.asks(now_ns)
        reply = None if table is None else table.lease(now_ns, self.name, asks)
        if reply is None or reply_lost:
            self.leases.failed(now_ns)
        else:
            self.leases.granted(now_ns, reply)

    def request(self, now_ns: int, tokens: int) -> bool:
        outcome = self.limiter.reserve(now_ns, WHO, tokens, 0)
        if isinstance(outcome, LimitRefusal):
            return False
        outcome.settle(now_ns, tokens)
        self.used += tokens
        return True

    def spend_all(self, now_ns: int, tokens: int) -> int:
        count = 0
        while self.request(now_ns, tokens):
            count += tokens
            assert count < 10**7
        return count

    def bucket(self):
        return self.limiter._tenants[WHO.id].tokens


def fleet(count: int, **settings) -> tuple[list[Gateway], LeaseTable]:
    config = SharedTerms(**settings)
    gateways, table = [Gateway(f"g{i}", config) for i in range(count)], LeaseTable(config)
    for now_ns in (-20 * NS_PER_S, -10 * NS_PER_S, 0):
        for gateway in gateways:
            gateway.exchange(now_ns, table)  # Everybody knows how many there are.
    return gateways, table


# --- examples -------------------------------------------------------------------------------------


def test_the_first_request_of_a_tenant_does_not_wait_for_the_store() -> None:
    (gateway,), table = fleet(1)
    assert gateway.request(0, 20_000)  # More than a lease: the one thing on credit.
    assert not gateway.request(0, 20_000)
    gateway.exchange(0, table)
    assert gateway.request(0, 20_000)
    assert table.level(0, KEY) == 60_000 - 20_000 - 15_000  # Alone it leases a quarter of the bucket.


def test_gateways_that_start_together_do_not_take_themselves_for_alone() -> None:
    config = SharedConfig()
    gateways, table = [Gateway(f"g{i}", config) for i in range(8)], LeaseTable(config)
    for gateway in gateways:
        gateway.exchange(0, table)
    for _ in range(100):
        for gateway in gateways:
            gateway.spend_all(0, 100)
            gateway.exchange(0, table)
    assert sum(gateway.used for gateway in gateways) <= 60_000 + 8 * SECOND


def test_one_gateway_alone_gets_the_whole_limit_and_no_more() -> None:
    (gateway,), table = fleet(1)
    total = 0
    for _ in range(100):
        total += gateway.spend_all(0, 100)
        gateway.exchange(0, table)
    assert total == 60_000
    now_ns = 10 * NS_PER_S
    for _ in range(100):
        total += gateway.spend_all(now_ns, 100)
        gateway.exchange(now_ns, table)
        now_ns += NS_PER_MS
    assert 70_000 <= total <= 70_000 + SECOND + 100


def test_a_burst_that_the_bucket_has_comes_at_the_pace_of_leases() -> None:
    gateways, table = fleet(2, gateways=2)
    for gateway in gateways:
        gateway.exchange(0, table)
    here, who = gateways[0], Tenant(id=TenantId("burst"), requests_per_minute=60)
    reported, now_ns = [], NS_PER_S
    here.exchange(now_ns, table)  # All that are to be there are there: no need to wait for more.
    for i in range(16):
        outcome = here.limiter.reserve(now_ns, who, 1, 0, request_id=str(i))
        reported += [outcome.retry_after_ns] if isinstance(outcome, LimitRefusal) else []
    assert len(reported) == 9  # Seven are a quarter of the bucket, shared by two.
    assert max(reported) < NS_PER_S  # The other gateway took nothing, so they need not wait for refill.
    for _ in range(2):
        here.exchange(now_ns, table)
    now_ns += max(reported)
    assert not any(
        isinstance(here.limiter.reserve(now_ns, who, 1, 0, request_id=str(i)), LimitRefusal) for i in range(9)
    )


def test_who_is_busy_gets_what_the_others_do_not_use() -> None:
    gateways, table = fleet(4)
    total = 0
    for step in range(600):
        now_ns = step * 100 * NS_PER_MS
        total += gateways[0].spend_all(now_ns, 10)
        for gateway in gateways:
            gateway.exchange(now_ns, table)
    assert total == pytest.approx(120_000, rel=0.05)


def test_an_idle_lease_goes_back() -> None:
    (one, other), table = fleet(2)
    one.request(0, 10)
    one.exchange(0, table)
    assert one.bucket().balance > 0
    later_ns = 6 * NS_PER_S
    one.exchange(later_ns, table)
    assert one.bucket().balance == 0
    assert table.level(later_ns, KEY) == 60_000
    assert other.limiter.reserve(later_ns, WHO, 60_000, 0)


def test_a_busy_gateway_leases_more_than_a_quiet_one() -> None:
    (busy, quiet), table = fleet(2)
    for step in range(50):
        now_ns = step * 100 * NS_PER_MS
        busy.request(now_ns, 90)
        if step % 25 == 0:
            quiet.request(now_ns, 5)
        for gateway in (busy, quiet):
            gateway.exchange(now_ns, table)
    assert busy.bucket().size > 1.5 * quiet.bucket().size


def test_a_question_that_was_carried_out_but_not_answered_is_not_granted_twice() -> None:
    (gateway,), table = fleet(1)
    gateway.request(0, 500)
    gateway.exchange(0, table, reply_lost=True)
    level = table.level(0, KEY)
    for _ in range(3):
        gateway.exchange(0, table, reply_lost=True)
        assert table.level(0, KEY) == level
    gateway.exchange(0, table)
    assert table.level(0, KEY) == level
    assert gateway.bucket().balance == 60_000 - 500 - level


def test_a_store_that_lost_its_memory_takes_it_from_the_gateways() -> None:
    gateways, table = fleet(4)
    for _ in range(100):
        for gateway in gateways:
            gateway.spend_all(0, 100)
            gateway.exchange(0, table)
    total = sum(gateway.used for gateway in gateways)
    assert 60_000 <= total <= 60_000 + 4 * 3750  # A lease each.
    fresh = LeaseTable(SharedConfig(), epoch=1_000_000)
    for gateway in gateways:
        gateway.exchange(0, None)
    for _ in range(100):
        for gateway in gateways:
            gateway.exchange(NS_PER_S, fresh)
            gateway.spend_all(NS_PER_S, 100)
    assert sum(gateway.used for gateway in gateways) <= 60_000 + SECOND + 4 * 3750
    assert fresh.level(NS_PER_S, KEY) <= 0


def outage(policy: str, seconds: int) -> tuple[int, int]:
    """Two gateways use all they get, the store is away for a while: what was used meanwhile, and until 60 s
    after.
    """
    gateways, table = fleet(2, on_store_down=policy)
    totals = [0, 0, 0]
    for step in range(10 * (60 + seconds + 60)):
        now_ns = step * 100 * NS_PER_MS
        phase = 0 if step < 600 else 1 if step < 600 + 10 * seconds else 2
        for gateway in gateways:
            for _ in range(3):
                totals[phase] += 400 * gateway.request(now_ns, 400)
            gateway.exchange(now_ns, None if phase == 1 else table)
    return totals[1], sum(totals)


def test_store_down_closed_uses_what_was_leased_and_nothing_more() -> None:
    while_down, _ = outage("closed", 20)
    assert while_down <= 4 * SECOND


@pytest.mark.parametrize("seconds", [5, 20, 90])
def test_store_down_local_share_goes_on_at_the_rate_and_overshoots_by_no_more_than_the_leases(
    seconds,
) -> None:
    while_down, total = outage("local-share", seconds)
    assert while_down == pytest.approx(seconds * SECOND, rel=0.25)
    elapsed = 60 + seconds + 60
    # 2 gateways at a lease each: an eighth of the burst, since there are two.
    assert total <= 60_000 + elapsed * SECOND + 2 * 7_500
    assert total >= 0.93 * (60_000 + elapsed * SECOND)


def test_store_down_open_lets_everything_through_and_charges_it_later() -> None:
    while_down, _ = outage("open", 20)
    assert while_down == pytest.approx(2 * 10 * 20 * 3 * 400, rel=0.02)
    (gateway,), table = fleet(1, on_store_down="open")
    gateway.exchange(0, None)
    for _ in range(5000):
        assert gateway.request(0, 100)
    gateway.exchange(0, table)
    gateway.exchange(0, table)
    assert not gateway.request(0, 100)
    assert table.level(0, KEY) == 0  # The bucket's worth, and no debt that locks the tenant out for longer.


def test_a_new_limit_reaches_the_store() -> None:
    (gateway,), table = fleet(1)
    gateway.request(0, 1000)
    gateway.exchange(0, table)
    bigger = Tenant(id=WHO.id, tokens_per_minute=120_000)
    gateway.limiter.reserve(0, bigger, 1, 0)
    gateway.exchange(0, table)
    assert table.level(0, KEY) == 120_000 - 1001 - gateway.bucket().balance
    assert dict(gateway.limiter.headers(0, bigger))[b"x-ratelimit-remaining-tokens"] == b"118999"


def test_the_table_forgets_full_buckets_and_gateways_that_are_gone() -> None:
    table = LeaseTable(SharedTerms(gateway_ttl_s=10))
    for number in range(20_000):
        ask = LeaseAsk(key=f"k{number}", rate=60_000, burst=60_000, seq=1, want=10)
        reply = table.lease(number * NS_PER_MS, f"g{number % 3}", [ask])
        assert reply.grants[0].granted == 10
        assert len(table) <= 2048
    assert table.lease(21 * NS_PER_S, "g0", []).num_gateways == 3
    assert table.lease(40 * NS_PER_S, "g0", []).num_gateways == 1
    table.lease(40 * NS_PER_S, "g1", [])
    table.left(40 * NS_PER_S, "g1")
    assert table.lease(41 * NS_PER_S, "g0", []).num_gateways == 2
    assert table.lease(43 * NS_PER_S, "g0", []).num_gateways == 1


# --- any order ------------------------------------------------------------------------------------

COUNT = 4
steps = st.lists(
    st.tuples(
        st.integers(0, COUNT - 1),
        st.sampled_from(["request", "request", "flood", "ask", "ask", "lose reply", "stream"]),
        st.integers(1, 900),
        st.sampled_from([0, 1, 50, 400, 3000]),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from(["closed", "local-share"]))
def test_all_gateways_together_overshoot_by_at_most_a_lease_each(script, policy) -> None:
    """Lost answers, a store that forgets everything, floods: admitted is at most burst, rate and a lease per
    gateway.
    """
    gateways, table = fleet(COUNT, on_store_down=policy)
    lease = 60_000 // (4 * COUNT)  # Above a second's worth and above any request.
    now_ns = overrun = 0
    for number, what, tokens, ms in script:
        now_ns += ms * NS_PER_MS
        gateway = gateways[number]
        if what == "request":
            gateway.request(now_ns, tokens)
        elif what == "flood":
            gateway.spend_all(now_ns, 50 + tokens)
        elif what == "stream":  # Longer than reserved: debt that the bucket must remember.
            outcome = gateway.limiter.reserve(now_ns, WHO, tokens, 0)
            if isinstance(outcome, LimitReservation):
                outcome.settle(now_ns, tokens + 100)
                gateway.used += tokens + 100
                overrun += 100
        else:
            gateway.exchange(now_ns, table, reply_lost=what == "lose reply")
        used = sum(gateway.used for gateway in gateways)
        allowed = 60_000 + SECOND * now_ns // NS_PER_S
        assert used <= allowed + COUNT * lease + overrun
