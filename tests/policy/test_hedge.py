"""Hedges: when a second attempt is made, what it may cost, and that one of the two is always dropped."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.fleet import HealthConfig
from penstock.errors import StreamBroken, WorkerUnavailable
from penstock.policy.extras.hedging import HedgeOutcome, Hedges, HedgeTerms
from penstock.policy.flow import Abort, Outcome, RequestFacts, Requeued, Start, State
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict, Settled
from penstock.policy.resilience.health import FleetHealth
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

MS = NS_PER_MS
W, V, U = WorkerId("w"), WorkerId("v"), WorkerId("u")
R = RequestId("r")
PLENTY = HedgeTerms(hedge_share=0.1, hedge_after_ms=100)


class Watched(FleetHealth):
    """Remembers what was held against whom."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.blamed = []

    def ended(self, now_ns, route, worker_id, error) -> None:
        self.blamed.append((worker_id, error))
        super().ended(now_ns, route, worker_id, error)


class Made:
    """Flow control with hedges after 100 ms, and a budget that was saved up."""

    def __init__(
        self, *workers: WorkerId, slots: int = 4, config: HedgeTerms = PLENTY, saved: int = 20
    ) -> None:
        self.reported = Counter()
        self.hedges = Hedges(config, lambda _, outcome: self.reported.update((outcome,)))
        for _ in range(saved):
            self.hedges.started(0, "elsewhere", RequestId("x"), prompt_tokens=8, first=False)
        self.health = Watched(HealthConfig(), lambda: 0.0)
        parts = Policies(hedges=self.hedges, health=self.health)
        self.control = FlowControl(QueueTerms(worker_credit=0, retries_max=2), parts)
        for worker in workers:
            self.control.set_worker(0, "m", worker, WorkerView(max_running=slots))

    def arrive(self, name: str = "r", now_ns: int = 0, **facts) -> None:
        facts = {"prompt_tokens": 32, "max_tokens": 10, **facts}
        self.control.arrive(now_ns, RequestFacts(id=RequestId(name), route="m", **facts))

    def do(self, now_ns: int) -> list:
        return list(self.control.dispatch(now_ns))

    def worker(self, worker: WorkerId):
        return self.control.model_queue("m").workers.get(worker)

    def race(self) -> tuple[WorkerId, WorkerId]:
        """One request that runs on two workers, the first of them first."""
        self.arrive()
        (first,) = self.do(0)
        (second,) = self.do(100 * MS)
        assert (second.attempt, second.is_hedge) == (2, True)
        return first.worker_id, second.worker_id


def ended(made: Made, now_ns: int) -> Settled:
    return made.control.ended(now_ns, R, Outcome.FINISHED, Usage(completion_tokens=3), finish_reason="stop")


def test_the_second_attempt_wins_and_the_first_holds_nothing_any_more() -> None:
    made = Made(W, V)
    first, second = made.race()
    assert made.control.hedging.won(150 * MS, made.control.request(R), 2) == Abort(R, first, 1)
    assert (made.worker(first).booked, made.worker(second).booked) == (0, 1)
    made.control.first_output(150 * MS, R)
    assert made.worker(first).pending_tokens == made.worker(second).pending_tokens == 0
    record = ended(made, 200 * MS).request.record(0)
    assert (record.worker, record.attempts, record.outcome) == (second, 2, Outcome.FINISHED)
    assert (record.completion_tokens, record.ttft_us) == (3, 150_000)
    assert made.worker(second).booked == 0
    assert made.reported == {HedgeOutcome.WON: 1}
    assert made.control.request(R) is None, "the last report of the other attempt counts no more"
    made.control.model_queue("m").check_invariants()


def test_the_first_attempt_wins() -> None:
    made = Made(W, V)
    first, second = made.race()
    assert made.control.hedging.won(110 * MS, made.control.request(R), 1) == Abort(R, second, 2)
    made.control.first_output(110 * MS, R)
    assert ended(made, 200 * MS).request.record(0).worker == first
    assert made.reported == {HedgeOutcome.LOST: 1}


def test_what_waits_has_the_room_of_the_attempt_that_lost() -> None:
    made = Made(W, V, slots=1)
    _, second = made.race()
    made.arrive("s", 101 * MS)
    assert made.do(101 * MS) == []
    request = made.control.request(R)
    made.control.hedging.won(102 * MS, request, request.attempt)
    (start,) = made.do(102 * MS)
    assert (start.id, start.worker_id) == ("s", second)


def test_whichever_fails_the_other_goes_on_and_a_retry_follows_only_when_both_have() -> None:
    for failing in (1, 2):
        made = Made(W, V, U)
        first, second = made.race()
        made.control.hedging.lost(120 * MS, made.control.request(R), failing, WorkerUnavailable("gone"))
        assert made.control.request(R).worker == (second if failing == 1 else first)
        answer = made.control.failed(130 * MS, R, WorkerUnavailable("gone"), retry=True)
        assert isinstance(answer, Requeued)
        (again,) = made.do(130 * MS)
        assert (again.worker_id, again.attempt, again.is_hedge) == (U, 3, False)
        assert made.do(500 * MS) == [], "it is hedged once"


def test_a_client_that_leaves_ends_both() -> None:
    made = Made(W, V)
    first, second = made.race()
    assert not made.control.is_due
    assert made.control.cancel(120 * MS, R) == Abort(R, first)
    assert made.control.is_due, "though nothing waits"
    assert made.do(120 * MS) == [Abort(R, second, 2)]
    assert not made.control.is_due
    assert made.control.ended(130 * MS, R, Outcome.CANCELLED).outcome is Outcome.CANCELLED
    assert made.worker(first).booked == made.worker(second).booked == 0
    assert made.reported == {HedgeOutcome.ENDED: 1}


def test_a_drain_evicts_both() -> None:
    made = Made(W, V)
    first, second = made.race()
    made.control.drain(120 * MS, 130 * MS)
    abort, evict = made.do(130 * MS)
    assert abort == Abort(R, second, 2)
    assert isinstance(evict, Evict)
    assert evict.worker_id == first


def test_what_is_not_hedged() -> None:
    alone = Made(W)
    alone.arrive()
    assert len(alone.do(0)) == 1
    assert alone.do(200 * MS) == []
    assert alone.reported == {HedgeOutcome.NO_ROOM: 1}

    several = Made(W, V)
    several.arrive(choices=2)
    assert len(several.do(0)) == 1
    assert several.do(200 * MS) == []
    assert not several.reported, "two streams would be two more"

    quick = Made(W, V)
    quick.arrive()
    quick.do(0)
    quick.control.first_output(50 * MS, R)
    quick.do(50 * MS)
    assert quick.control.next_ns(60 * MS) is None, "nobody need look at it"
    assert quick.do(200 * MS) == []

    poor = Made(W, V, saved=0)
    poor.arrive()
    poor.do(0)
    assert poor.do(200 * MS) == []
    assert poor.reported == {HedgeOutcome.NO_BUDGET: 1}

    full = Made(W, V, slots=1)
    for name in "abc":
        full.arrive(name)
    full.do(0)
    full.control.ended(10 * MS, RequestId("a"), Outcome.FINISHED, Usage(completion_tokens=1))
    assert [each.id for each in full.do(150 * MS)] == ["c"], "who waits goes first"
    assert HedgeOutcome.NO_ROOM in full.reported


def test_a_retried_request_is_not_hedged() -> None:
    made = Made(W, V, U)
    made.arrive()
    made.do(0)
    made.control.failed(10 * MS, R, WorkerUnavailable("gone"), retry=True)
    made.do(10 * MS)
    assert made.do(500 * MS) == []


def test_an_aborted_loser_is_not_held_against_its_worker() -> None:
    made = Made(W, V)
    first, _ = made.race()
    made.control.hedging.won(150 * MS, made.control.request(R), 2)
    assert made.health.blamed == [(first, None)]


def test_the_delay_is_a_high_percentile_of_prompts_of_that_length() -> None:
    made = Hedges(
        HedgeTerms(hedge_share=0.02, samples_min=50, quantile=0.98, after_min_ms=20), lambda *_: None
    )
    for i in range(100):
        assert made.delay_ns("m", 100) is None or i >= 50
        made.began("m", (i + 1) * 10 * MS, prompt_tokens=100)
    assert made.delay_ns("m", 127) == 980 * MS
    assert made.delay_ns("m", 128) is None
    assert made.delay_ns("n", 100) is None
    for _ in range(100):
        made.began("n", 1000, prompt_tokens=100)
    assert made.delay_ns("n", 100) == 20 * MS


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 0.1), st.integers(1, 20))
def test_the_budget_is_never_passed(tries, share, saved) -> None:
    made = Hedges(HedgeTerms(hedge_share=share, saved_max=saved), lambda *_: None)
    for wants in tries:
        made.started(0, "m", R, prompt_tokens=1, first=True)
        if wants:
            made.take()
        assert made.num_taken <= share * made.num_starts + 1e-3


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 4), st.integers(1, 25))
def test_whatever_happens_there_is_one_winner_and_every_attempt_ends(
    seed, workers, slots, num_requests
) -> None:
    random, made = Random(seed), Made(*(WorkerId(f"w{i}") for i in range(workers)), slots=slots)
    control, running, now_ns = made.control, {}, 0
    started, over, settled, waiting = Counter(), Counter(), {}, [f"r{i}" for i in range(num_requests)]

    def note(answer) -> None:
        if isinstance(answer, Settled):
            assert answer.id not in settled
            settled[answer.id] = answer.request
            for attempt in running.pop(answer.id, ()):
                over[answer.id, attempt] += 1

    def drop(name, attempt) -> None:
        running[name].remove(attempt)
        over[name, attempt] += 1

    for _ in range(2000):
        for action in control.dispatch(now_ns):
            if isinstance(action, Start):
                started[action.id, action.attempt] += 1
                running.setdefault(action.id, []).append(action.attempt)
                assert len(running[action.id]) == 1 + action.is_hedge
            elif isinstance(action, Abort):
                drop(action.id, action.attempt)
            else:
                note(action.settled)
        control.model_queue("m").check_invariants() if control.model_queue("m") else None
        for name, attempts in running.items():
            assert (len(attempts) == 2) == (control.request(name).hedge is not None)
        if not waiting and not len(control):
            break
        now_ns += random.randrange(200) * MS
        if waiting and random.random() < 0.5:
            made.arrive(waiting.pop(), now_ns)
            continue
        names = sorted(name for name, attempts in running.items() if attempts)
        if not names:
            now_ns += 30 * NS_PER_S
            continue
        name, chance = random.choice(names), random.random()
        flow, attempts = control.request(name), running[name]
        attempt = random.choice(attempts)
        if flow.state is State.STREAMING or chance < 0.3:
            if len(attempts) == 2:
                drop(name, control.hedging.won(now_ns, flow, attempt).attempt)
            if flow.state is State.STARTED:
                control.first_output(now_ns, name)
            else:
                note(control.ended(now_ns, name, Outcome.FINISHED, Usage(completion_tokens=1)))
        elif chance < 0.6:
            error = WorkerUnavailable("gone")
            if len(attempts) == 2:
                control.hedging.lost(now_ns, flow, attempt, error)
                drop(name, attempt)
            else:
                kind = StreamBroken("gone") if flow.has_begun else error
                drop(name, attempt)
                note(control.failed(now_ns, name, kind, retry=True))
        elif chance < 0.7 and flow.state is not State.STOPPING:
            control.cancel(now_ns, name)
        elif flow.state is State.STOPPING and len(attempts) == 1:
            note(control.ended(now_ns, name, Outcome.CANCELLED))
    assert not len(control), "something never ended"
    assert started == over, "every attempt ends once"
    assert len(settled) == num_requests
    assert not any(worker.booked for worker in control.model_queue("m").workers)
    reported = made.reported
    hedged = sum(
        reported[each] for each in HedgeOutcome if each not in (HedgeOutcome.NO_ROOM, HedgeOutcome.NO_BUDGET)
    )
    assert hedged == made.hedges.num_taken
    assert sum(flow.attempts for flow in settled.values()) == sum(started.values())
