import copy
import math
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import InvalidRequest, Overloaded
from penstock.policy.limits.bucket import Bucket
from penstock.policy.limits.rate_limit import Limiter, LimitRefusal, LimitReservation, RateTerms, duration
from penstock.policy.tenant import ANONYMOUS, Tenant
from penstock.types import TenantId

CONFIG = RateTerms()


def tenant(name: str = "t", **limits: int) -> Tenant:
    return Tenant(id=TenantId(name), **limits)


def admitted(outcome: LimitReservation | LimitRefusal) -> LimitReservation:
    assert isinstance(outcome, LimitReservation), outcome
    return outcome


def refused(outcome: LimitReservation | LimitRefusal) -> LimitRefusal:
    assert isinstance(outcome, LimitRefusal), outcome
    return outcome


def shown(limiter: Limiter, now_ns: int, who: Tenant) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in limiter.headers(now_ns, who)}


# --- examples -------------------------------------------------------------------------------------


def test_without_limits_everything_passes_and_no_headers_are_made() -> None:
    limiter = Limiter(CONFIG)
    for _ in range(1000):
        admitted(limiter.reserve(0, ANONYMOUS, 10**9, 10**9))
    assert limiter.headers(0, ANONYMOUS) == ()


def test_the_store_is_asked_for_one_request_and_its_tokens() -> None:
    asked = []

    class Source(Bucket):
        def lacks(self, now_ns: int, amount: int) -> bool:
            asked.append(amount)
            return amount == 1

    limiter = Limiter(CONFIG, lambda now_ns, tenant, unit, rate, burst: Source(now_ns, rate, burst))
    assert limiter.lacks(0, tenant(tokens_per_minute=6000, requests_per_minute=60), 100)
    assert asked == [100, 1]


def test_one_over_the_concurrent_ones_waits_for_the_first_place() -> None:
    limiter, who = Limiter(CONFIG), tenant(concurrent_max=2)
    for _ in range(2):
        admitted(limiter.reserve(0, who, 1, 1))
    waits = [refused(limiter.reserve(0, who, 1, 1)).retry_after_ns for _ in range(2)]
    assert waits == [NS_PER_S // 2, NS_PER_S], "two places in the second that each is taken to run"


def test_what_was_reserved_and_not_used_comes_back() -> None:
    limiter, who = Limiter(CONFIG), tenant(tokens_per_minute=6000)
    reservation = admitted(limiter.reserve(0, who, 1000, 500))
    assert shown(limiter, 0, who)["x-ratelimit-remaining-tokens"] == "4500"
    reservation.settle(0, 1100)
    assert shown(limiter, 0, who) == {
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4900",
        "x-ratelimit-reset-tokens": "11s",
    }


def test_a_long_answer_is_charged_in_slices_and_the_next_request_waits_for_its_debt() -> None:
    limiter, who = Limiter(CONFIG), tenant(tokens_per_minute=600)
    reservation = admitted(limiter.reserve(0, who, 400, 200))
    reservation.renew(0, 200)
    assert reservation.reserved == 600
    reservation.renew(0, 201)
    assert reservation.reserved == 856
    assert reservation.covered == 456
    reservation.renew(0, 456)
    assert reservation.reserved == 856
    reservation.settle(0, 700)  # 100 tokens of debt, 10 per second.
    refusal = refused(limiter.reserve(0, who, 50, 50))
    assert refusal.retry_after_ns >= 20 * NS_PER_S
    assert refusal.kind == "tokens"
    assert "600 tokens per minute" in refusal.message
    assert isinstance(refusal.error(), Overloaded)
    admitted(limiter.reserve(20 * NS_PER_S, who, 50, 50))


def test_a_request_over_the_burst_is_told_that_it_can_never_pass() -> None:
    limiter, who = Limiter(CONFIG), tenant(tokens_per_minute=1000)
    refusal = refused(limiter.reserve(0, who, 1000, 1))
    assert refusal.kind == "too_large"
    assert "never" in refusal.message
    assert isinstance(refusal.error(), InvalidRequest)
    assert admitted(limiter.reserve(0, who, 999, 5000)).reserved == 1000  # Its answer may turn out short.


def test_requests_at_once() -> None:
    limiter, who = Limiter(CONFIG), tenant(concurrent_max=2)
    first = admitted(limiter.reserve(0, who, 1, 1))
    admitted(limiter.reserve(0, who, 1, 1))
    assert refused(limiter.reserve(0, who, 1, 1)).kind == "concurrent"
    first.settle(8 * NS_PER_S, 2)
    admitted(limiter.reserve(8 * NS_PER_S, who, 1, 1))
    waits = [refused(limiter.reserve(8 * NS_PER_S, who, 1, 1)).retry_after_ns for _ in range(3)]
    assert waits[0] == pytest.approx(4 * NS_PER_S, rel=0.2)  # Two at once, eight seconds each.
    assert waits == sorted(waits)


def test_nothing_is_taken_when_one_limit_refuses() -> None:
    limiter = Limiter(CONFIG)
    who = tenant(tokens_per_minute=6000, requests_per_minute=2)
    for _ in range(2):
        admitted(limiter.reserve(0, who, 10, 10))
    assert refused(limiter.reserve(0, who, 10, 10)).kind == "requests"
    assert shown(limiter, 0, who)["x-ratelimit-remaining-tokens"] == "5960"


def test_undone_is_as_if_it_never_was() -> None:
    limiter = Limiter(CONFIG)
    who = tenant(tokens_per_minute=6000, requests_per_minute=2, concurrent_max=1)
    before = shown(limiter, 0, who)
    admitted(limiter.reserve(0, who, 10, 10)).undo(0)
    assert shown(limiter, 0, who) == before
    assert limiter.num_live(who.id) == 0


def test_a_reservation_ends_once() -> None:
    reservation = admitted(Limiter(CONFIG).reserve(0, tenant(tokens_per_minute=100), 10, 10))
    reservation.settle(0, 20)
    with pytest.raises(AssertionError):
        reservation.settle(0, 20)
    with pytest.raises(AssertionError):
        reservation.undo(0)


def test_a_reload_takes_effect_at_once_and_forgets_nothing() -> None:
    limiter = Limiter(CONFIG)
    old, new = tenant(tokens_per_minute=1000), tenant(tokens_per_minute=2000)
    reservation = admitted(limiter.reserve(0, old, 500, 400))
    admitted(limiter.reserve(0, new, 0, 100))
    assert shown(limiter, 0, new)["x-ratelimit-remaining-tokens"] == "1000"
    assert shown(limiter, 0, old)["x-ratelimit-limit-tokens"] == "2000"  # Asked for a stream from before.
    reservation.settle(0, 500)
    assert shown(limiter, 0, new)["x-ratelimit-remaining-tokens"] == "1400"


def test_a_limit_that_came_later_is_not_paid_back_what_it_never_took() -> None:
    limiter = Limiter(CONFIG)
    early = admitted(limiter.reserve(0, tenant(), 5000, 5000))
    limited = tenant(tokens_per_minute=1000)
    admitted(limiter.reserve(0, limited, 500, 500))
    early.settle(0, 0)
    assert shown(limiter, 0, limited)["x-ratelimit-remaining-tokens"] == "0"


def test_idle_tenants_are_forgotten_and_nothing_is_lost_by_it() -> None:
    limiter = Limiter(RateTerms(tenants_max=1000))
    busy = tenant("busy", tokens_per_minute=60)
    admitted(limiter.reserve(0, busy, 30, 20))
    for number in range(20_000):
        who = tenant(f"t{number}", tokens_per_minute=6000, requests_per_minute=600)
        admitted(limiter.reserve(number * NS_PER_MS, who, 10, 10)).settle(number * NS_PER_MS, 20)
        assert len(limiter) <= 1001
    assert limiter.num_live(busy.id) == 1
    assert shown(limiter, 20 * NS_PER_S, busy)["x-ratelimit-remaining-tokens"] == "30"


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, b"0s"),
        (1, b"1ms"),
        (120 * NS_PER_MS, b"120ms"),
        (NS_PER_S, b"1s"),
        (59 * NS_PER_S + 1, b"1m0s"),
        (360 * NS_PER_S, b"6m0s"),
        (3605 * NS_PER_S, b"1h0m5s"),
    ],
)
def test_durations_read_like_openai(ns: int, text: bytes) -> None:
    assert duration(ns) == text


# --- the herd -------------------------------------------------------------------------------------


def obey(limiter: Limiter, who: Tenant, waits: dict[str, int], *, prompt: int, output: int) -> int:
    """All come back exactly when they were told to; how many are admitted then."""
    count = 0
    for name, at_ns in sorted(waits.items(), key=lambda wait: wait[1]):
        count += isinstance(
            limiter.reserve(at_ns, who, prompt, output, request_id=f"{name} again"), LimitReservation
        )
    return count


@pytest.mark.parametrize("whole_seconds", [False, True])
@pytest.mark.parametrize(
    "limits", [{"tokens_per_minute": 60_000}, {"requests_per_minute": 300}, {"tokens_per_minute": 6_000_000}]
)
def test_two_hundred_refused_clients_that_obey_are_admitted_at_the_first_retry(limits, whole_seconds) -> None:
    limiter, who = Limiter(CONFIG), tenant(**limits)
    while isinstance(limiter.reserve(0, who, 200, 100), LimitReservation):
        pass
    waits = {}
    for number in range(200):
        wait_ns = refused(limiter.reserve(0, who, 200, 100, request_id=f"r{number}")).retry_after_ns
        waits[f"r{number}"] = math.ceil(wait_ns / NS_PER_S) * NS_PER_S if whole_seconds else wait_ns
    assert obey(limiter, who, waits, prompt=200, output=100) == 200
    if not whole_seconds:
        assert max(Counter(wait // (NS_PER_S // 10) for wait in waits.values()).values()) < 40 * max(
            1, limits.get("tokens_per_minute", 0) // 60_000
        )


def test_the_line_of_the_refused_is_bounded_and_passes_by_itself() -> None:
    limiter, who = Limiter(RateTerms(retry_after_max_s=30)), tenant(requests_per_minute=60)
    for _ in range(60):
        admitted(limiter.reserve(0, who, 1, 1))
    waits = [refused(limiter.reserve(0, who, 1, 1)).retry_after_ns for _ in range(500)]
    assert waits[:3] == [NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S]
    assert max(waits) == 30 * NS_PER_S
    assert all(one <= other for one, other in pairwise(waits))
    admitted(limiter.reserve(NS_PER_S, who, 1, 1))  # Nobody came back: who asks is served.


# --- any order ------------------------------------------------------------------------------------

RATE, REQUESTS, CONCURRENT = 6000, 90, 5


class LimiterMachine(RuleBasedStateMachine):
    """Requests that come, stream, end in every way, and a clock that moves between."""

    running = Bundle("running")

    @initialize(burst_s=st.sampled_from([1.0, 7.5, 60.0]), shift_ns=st.integers(0, 10**12))
    def start(self, burst_s: float, shift_ns: int) -> None:
        self.limiter = Limiter(RateTerms(burst_s=burst_s))
        self.who = tenant(tokens_per_minute=RATE, requests_per_minute=REQUESTS, concurrent_max=CONCURRENT)
        self.start_ns = self.now_ns = shift_ns
        self.burst, self.request_burst = int(RATE * burst_s) // 60, max(1, int(REQUESTS * burst_s) // 60)
        self.live: dict[int, tuple[LimitReservation, int, int]] = {}
        self.used = self.overrun = self.accepted = self.number = 0

    def allowed(self, rate: int, burst: int) -> int:
        return burst + rate * (self.now_ns - self.start_ns) // (60 * NS_PER_S)

    @rule(ms=st.integers(0, 20_000), ns=st.integers(0, 999_999))
    def wait(self, ms: int, ns: int) -> None:
        self.now_ns += ms * NS_PER_MS + ns

    @rule(target=running, prompt=st.integers(1, 200), output=st.integers(1, 300))
    def arrive(self, prompt: int, output: int):
        outcome = self.limiter.reserve(self.now_ns, self.who, prompt, output, request_id=str(self.number))
        self.number += 1
        if isinstance(outcome, LimitRefusal):
            return self.check_refusal(outcome, prompt, output)
        assert outcome.reserved == min(prompt + output, self.burst)
        assert len(self.live) < CONCURRENT
        self.live[self.number] = (outcome, prompt, 0)
        self.accepted += 1
        self.overrun = 0
        # Whoever is admitted, is admitted within burst and rate: no debt is left at that instant.
        assert self.used + sum(r.reserved for r, _, _ in self.live.values()) <= self.allowed(RATE, self.burst)
        assert self.accepted <= self.allowed(REQUESTS, self.request_burst)
        return self.number

    def check_refusal(self, refusal: LimitRefusal, prompt: int, output: int) -> None:
        if refusal.kind == "too_large":
            assert prompt + 1 > self.burst
        elif refusal.kind == "concurrent":
            assert len(self.live) == CONCURRENT
        else:
            later = copy.deepcopy(self.limiter)
            at_ns = self.now_ns + refusal.retry_after_ns
            obeyed = later.reserve(at_ns, self.who, prompt, output)
            assert isinstance(obeyed, LimitReservation) or obeyed.kind == "concurrent"

    @rule(number=running, tokens=st.integers(1, 700))
    def stream(self, number: int | None, tokens: int) -> None:
        if number not in self.live:
            return
        reservation, prompt, output = self.live[number]
        before = reservation.reserved
        reservation.renew(self.now_ns, output + tokens)
        self.overrun += reservation.reserved - before
        assert reservation.covered >= output + tokens
        assert reservation.covered < max(
            output + tokens + 256, reservation.covered - reservation.reserved + before + 1
        )
        self.live[number] = (reservation, prompt, output + tokens)

    @rule(number=consumes(running), delivered=st.booleans())
    def end(self, number: int | None, delivered: bool) -> None:
        """Finished, failed, cancelled, crashed: only what it used differs."""
        if number not in self.live:
            return
        reservation, prompt, output = self.live.pop(number)
        actual = prompt + output if delivered else output
        self.overrun += max(0, actual - reservation.reserved)
        reservation.settle(self.now_ns, actual)
        self.used += actual

    @rule(number=consumes(running))
    def undo(self, number: int | None) -> None:
        if number not in self.live or self.live[number][2]:
            return
        reservation, _, _ = self.live.pop(number)
        reservation.undo(self.now_ns)
        self.accepted -= 1

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "limiter"):
            return
        reserved = sum(reservation.reserved for reservation, _, _ in self.live.values())
        assert self.limiter.settled == self.used
        assert self.limiter.outstanding == reserved
        assert self.limiter.num_live(self.who.id) == len(self.live)
        assert self.used + reserved <= self.allowed(RATE, self.burst) + self.overrun

    @invariant()
    def headers_agree(self) -> None:
        if not hasattr(self, "limiter"):
            return
        seen = shown(self.limiter, self.now_ns, self.who)
        assert seen["x-ratelimit-limit-tokens"] == str(RATE)
        remaining = int(seen["x-ratelimit-remaining-tokens"])
        assert 0 <= remaining <= self.burst
        if remaining > 0 and len(self.live) < CONCURRENT and int(seen["x-ratelimit-remaining-requests"]):
            admitted(copy.deepcopy(self.limiter).reserve(self.now_ns, self.who, 0, remaining))
        full_ns = self.now_ns + parse_ns(seen["x-ratelimit-reset-tokens"])
        assert shown(copy.deepcopy(self.limiter), full_ns, self.who)["x-ratelimit-remaining-tokens"] == str(
            self.burst
        )


def parse_ns(text: str) -> int:
    units = {"h": 3600 * NS_PER_S, "m": 60 * NS_PER_S, "s": NS_PER_S, "ms": NS_PER_MS}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|h|m|s)", text))


LimiterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLimiterInAnyOrder = LimiterMachine.TestCase
