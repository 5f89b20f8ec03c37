from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.resilience.worker_state import Breaker, BreakerState, BreakerTerms

S, MS = NS_PER_S, NS_PER_MS
CONFIG = BreakerTerms(jitter=0.0)


def breaker(**config: object) -> Breaker:
    return Breaker(BreakerTerms(**{"jitter": 0.0, **config}), lambda: 0.5)


def fine() -> bool:
    return True


def tripped(made: Breaker, now_ns: int = 0) -> int:
    for _ in range(10):
        made.failed(now_ns)
    assert made.state is BreakerState.OPEN
    return now_ns


def test_half_of_ten_attempts_open_it_and_nine_do_not() -> None:
    made = breaker(in_a_row=11)
    for i in range(9):
        made.failed(i)
    assert not made.blocks(9)
    made.failed(9)
    assert made.blocks(9)
    mixed = breaker()
    for i in range(30):
        mixed.began(i, 50 * MS, peers_fine=fine)
        mixed.began(i, 50 * MS, peers_fine=fine)
        mixed.failed(i)
    assert not mixed.blocks(30), "a third"


def test_five_failures_in_a_row_are_enough_however_rare_requests_are() -> None:
    made = breaker()
    for i in range(4):
        made.failed(60 * i * S)
    made.began(300 * S, 50 * MS, peers_fine=fine)
    for i in range(4):
        made.failed((400 + 60 * i) * S)
    assert not made.blocks(600 * S)
    made.failed(660 * S)
    assert made.blocks(661 * S)
    assert made.why == "its attempts fail"


def test_a_key_that_is_not_accepted_opens_it_at_once() -> None:
    made = breaker()
    made.reject(S, "no such key")
    assert made.blocks(2 * S)
    assert (made.state, made.why) == (BreakerState.OPEN, "no such key")


def test_an_attempt_that_was_given_up_failed_if_it_was_slow_for_this_worker() -> None:
    made = breaker()
    made.gave_up(0, 60 * S)
    for i in range(16):
        made.began(i, 100 * MS, peers_fine=fine)
    for _ in range(20):
        made.gave_up(S, 250 * MS)
    assert not made.blocks(S), "nothing is known of these: they were within three times the usual"
    for _ in range(4):
        made.gave_up(S, 2 * S)
    assert made.is_slow(301 * MS), "those that run meanwhile are judged by the same bound"
    made.gave_up(S, 2 * S)
    assert made.blocks(S)
    now = S
    while made.is_slow(2 * S):  # In time it is what is usual there.
        now = made.due_ns or now
        assert not made.blocks(now), "a probe may begin"
        made.started(now)
        made.gave_up(now + 2 * S, 2 * S)
    assert now < 3600 * S


def test_an_attempt_that_was_given_up_failed_if_nothing_ever_came_in_a_long_time() -> None:
    made = breaker()
    for _ in range(20):
        made.gave_up(S, 9 * S, 10 * S)
    assert not made.blocks(S)
    for _ in range(5):
        made.gave_up(S, 10 * S, 10 * S)
    assert made.blocks(S)


def test_an_attempt_that_began_before_the_probe_is_no_verdict_on_it() -> None:
    made = breaker()
    for i in range(16):
        made.began(i, 100 * MS, peers_fine=fine)
    for _ in range(5):
        made.failed(S)
    now = made.due_ns or 0
    assert not made.blocks(now)
    made.started(now)
    made.gave_up(now + S, 30 * S)
    made.began(now + S, 30 * S, peers_fine=fine)
    assert made.state is BreakerState.PROBING, "both were started when it was known to be slow"
    made.began(now + S, 100 * MS, peers_fine=fine)
    assert made.state is BreakerState.TRUSTING


def test_what_is_older_than_the_window_does_not_count() -> None:
    made = breaker(in_a_row=11)
    for i in range(9):
        made.failed(i)
    made.failed(11 * S)
    assert not made.blocks(11 * S)


def test_it_is_probed_once_then_a_few_times_then_used() -> None:
    made = breaker()
    now = tripped(made) + 5 * S
    assert made.blocks(now - 1)
    assert not made.blocks(now)
    made.started(now)
    assert made.blocks(now), "one probe at a time"
    now += 50 * MS
    made.began(now, 50 * MS, peers_fine=fine)
    for _ in range(5):
        assert not made.blocks(now)
        made.started(now)
    assert made.blocks(now), "five, and no sixth"
    for _ in range(5):
        made.began(now + 50 * MS, 50 * MS, peers_fine=fine)
    assert made.state is BreakerState.CLOSED


def test_a_failed_probe_doubles_the_time_up_to_its_bound() -> None:
    made, times = breaker(), []
    now = tripped(made)
    for _ in range(6):
        assert made.due_ns is not None
        times.append((made.due_ns - now) // S)
        now = made.due_ns
        assert not made.blocks(now)
        made.started(now)
        made.failed(now)
    assert times == [5, 10, 20, 40, 60, 60]


def test_who_flaps_stays_out_longer_and_who_was_well_for_long_does_not() -> None:
    def recover(made: Breaker) -> int:
        now = made.due_ns or 0
        assert not made.blocks(now)
        for _ in range(6):
            made.started(now)
            now += 50 * MS
            made.began(now, 50 * MS, peers_fine=fine)
        assert made.state is BreakerState.CLOSED
        return now

    made = breaker()
    tripped(made)
    now = tripped(made, recover(made) + 5 * S)
    assert made.due_ns == now + 10 * S
    now = tripped(made, recover(made) + 60 * S)
    assert made.due_ns == now + 5 * S


def test_jitter_spreads_the_times() -> None:
    drawn = iter([0.0, 1.0])
    config = BreakerTerms(jitter=0.2)
    first, second = Breaker(config, lambda: next(drawn)), Breaker(config, lambda: next(drawn))
    tripped(first)
    tripped(second)
    assert (first.due_ns, second.due_ns) == (5 * S, 6 * S)


@pytest.mark.parametrize("peers", [True, False])
def test_slow_first_tokens_open_it_only_while_its_peers_are_fine(peers: bool) -> None:
    made = breaker()
    for i in range(20):
        made.began(i * S, 100 * MS, peers_fine=lambda: peers)
    for i in range(10):
        made.began(30 * S + i, 2_000 * MS, peers_fine=lambda: peers)
    assert made.blocks(31 * S) is peers


def test_what_is_quick_all_the_same_is_not_slow() -> None:
    made = breaker()
    for i in range(40):
        made.began(i, (1 if i < 20 else 150) * MS, peers_fine=fine)
    assert not made.blocks(40)


def test_what_becomes_usual_is_not_slow_for_ever() -> None:
    made = breaker(attempts_min=10_000)
    for i in range(200):
        made.began(i, (100 if i < 20 else 2_000) * MS, peers_fine=fine)
    before = made._window.sums(200)[2]
    for i in range(50):
        made.began(200 + i, 2_000 * MS, peers_fine=fine)
    assert made._window.sums(250)[2] == before


def test_a_probe_whose_client_left_or_that_takes_for_ever_makes_room() -> None:
    made = breaker()
    now = tripped(made) + 5 * S
    assert not made.blocks(now)
    made.started(now)
    made.forget()
    assert not made.blocks(now)
    made.started(now)
    assert made.blocks(now + 9 * S)
    assert not made.blocks(now + 10 * S)


class AnyOrder(RuleBasedStateMachine):
    """Every event in any order: it never lets more through than it may, and never stays shut for longer than
    it may.
    """

    @initialize(seed=st.integers(0, 2**32 - 1))
    def open(self, seed: int) -> None:
        self.random, self.now_ns, self.under_way, self.shut_ns = Random(seed), 0, 0, None
        self.config = BreakerTerms(attempts_min=3, probes=2, open_s=1.0, open_max_s=4.0, probe_s=1.0)
        self.breaker = Breaker(self.config, self.random.random)

    @rule(ns=st.integers(0, 3 * S))
    def wait(self, ns: int) -> None:
        self.now_ns += ns

    @rule()
    def start(self) -> None:
        if not self.breaker.blocks(self.now_ns):
            self.breaker.started(self.now_ns)
            self.under_way += 1

    @precondition(lambda self: self.under_way)
    @rule(how=st.sampled_from(["good", "good", "slow", "failed", "failed", "left"]), peers=st.booleans())
    def end(self, how: str, peers: bool) -> None:
        self.under_way -= 1
        if how == "left":
            self.breaker.forget()
        elif how == "failed":
            self.breaker.failed(self.now_ns)
        else:
            ttft_ns = (5_000 if how == "slow" else 50) * MS
            self.breaker.began(self.now_ns, ttft_ns, peers_fine=lambda: peers)

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "breaker"):
            return
        self.breaker.check_invariants()
        if self.breaker.state is BreakerState.OPEN:
            assert self.breaker.due_ns is not None
            assert self.breaker.due_ns <= self.now_ns + 4 * S or self.shut_ns is not None
        due_ns = self.breaker.due_ns
        if self.breaker.blocks(self.now_ns):
            assert due_ns is not None, "it would be shut for ever"
            assert due_ns - self.now_ns <= 4 * S


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
