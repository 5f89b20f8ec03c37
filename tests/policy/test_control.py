from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.clock import NS_PER_S
from penstock.config.flow import LimitsConfig
from penstock.errors import Draining, EngineFault, Evicted, Overloaded, StreamBroken, WorkerUnavailable
from penstock.policy.contracts import Pass
from penstock.policy.estimates import OutputLengths
from penstock.policy.flow import (
    Abort,
    Diverted,
    Outcome,
    Queued,
    Refused,
    RequestFacts,
    Requeued,
    Start,
    State,
    Stop,
)
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import AdmitAll, Policies
from penstock.policy.limits.levels import LimitLevels
from penstock.policy.limits.rate_limit import Limiter
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict, Settled
from penstock.policy.tenant import PartLimits, Tenant
from penstock.policy.terms import BandTerms, QueueTerms
from penstock.types import RequestId, TenantId, Usage, WorkerId

S = NS_PER_S
W, V = WorkerId("w"), WorkerId("v")
ACME = Tenant(id=TenantId("acme"))


def arrival(name: str, **facts) -> RequestFacts:
    facts = {"tenant": ACME, "route": "m", "prompt_tokens": 32, "max_tokens": 10, **facts}
    return RequestFacts(id=RequestId(name), **facts)


def control(*, running: int = 1, parts: Policies | None = None, **queue) -> FlowControl:
    """With one worker `w` of one slot, unless told otherwise."""
    made = FlowControl(QueueTerms(**{"worker_credit": 0, **queue}), parts)
    if running:
        made.set_worker(0, "m", W, WorkerView(max_running=running))
    return made


def started(made: FlowControl, now_ns: int = 0) -> list[str]:
    answers = made.dispatch(now_ns)
    assert all(isinstance(each, Start) for each in answers), answers
    return [each.id for each in answers]


def accept(made: FlowControl, *names: str, now_ns: int = 0, **facts) -> None:
    for name in names:
        assert isinstance(made.arrive(now_ns, arrival(name, **facts)), Queued)


def only(answers) -> Evict:
    assert len(answers) == 1
    assert isinstance(answers[0], Evict)
    return answers[0]


def end(made: FlowControl, name: str, tokens: int = 10, now_ns: int = 0) -> Settled:
    usage = Usage(prompt_tokens=32, completion_tokens=tokens)
    settled = made.ended(now_ns, RequestId(name), Outcome.FINISHED, usage, finish_reason="stop")
    assert settled is not None
    return settled


# --- one life -------------------------------------------------------------------------------------


def test_an_answer_from_arrival_to_record() -> None:
    made = control()
    accept(made, "r", now_ns=1 * S)
    assert made.dispatch(2 * S) == [Start(RequestId("r"), "m", W, priority=0, attempt=1, takes_row=True)]
    made.first_output(3 * S, RequestId("r"), cached_tokens=16)
    assert made.output(4 * S, RequestId("r"), 10) is None
    record = end(made, "r", now_ns=5 * S).request.record(99)
    assert (record.outcome, record.finish_reason, record.worker) == (Outcome.FINISHED, "stop", "w")
    assert (record.prompt_tokens, record.completion_tokens, record.attempts) == (32, 10, 1)
    assert (record.queue_us, record.ttft_us, record.total_us) == (1_000_000, 2_000_000, 4_000_000)
    assert len(made) == 0
    assert made.ended(5 * S, RequestId("r"), Outcome.FINISHED) is None
    assert made.cancel(5 * S, RequestId("r")) is None
    assert made.next_ns(5 * S) in (None, 5 * S)


def test_who_leaves_the_queue_makes_way_for_who_is_behind() -> None:
    """The place aside that it had, or its tenant's turn: whoever fits is looked at again (swarm seed 552)."""
    for gone in ("aside", "head"):
        made = control(running=0, aside_max=1)
        made.set_worker(0, "m", W, WorkerView(max_running=4, kv_blocks_total=30))
        accept(made, "runs", prompt_tokens=320)
        assert started(made) == ["runs"]
        accept(made, "aside", "head", prompt_tokens=400)
        accept(made, "small")
        assert started(made) == []
        assert isinstance(made.cancel(1 * S, RequestId(gone)), Settled)
        assert started(made, 1 * S) == ["small"]


def test_it_waits_until_a_worker_has_room() -> None:
    made = control()
    accept(made, "a", "b", "c")
    assert started(made) == ["a"]
    assert started(made) == []
    end(made, "a")
    assert started(made) == ["b"]
    made.set_worker(0, "m", V, WorkerView(max_running=1))
    assert started(made) == ["c"]


def test_an_end_is_worth_a_look_only_where_something_waits_for_the_room() -> None:
    made = control()
    accept(made, "r1")
    assert made.is_due
    assert started(made) == ["r1"]
    made.ended(S, RequestId("r1"), Outcome.FINISHED, Usage(prompt_tokens=32, completion_tokens=5))
    assert not made.is_due
    accept(made, "r2", "r3", now_ns=S)
    assert started(made, S) == ["r2"]
    assert not made.is_due
    made.ended(2 * S, RequestId("r2"), Outcome.FINISHED, Usage(prompt_tokens=32, completion_tokens=5))
    assert made.is_due
    assert started(made, 2 * S) == ["r3"]


def test_the_end_of_the_last_one_that_waits_is_worth_a_look() -> None:
    made = control()
    accept(made, "r1", "r2")
    assert started(made) == ["r1"]
    made.failed(S, RequestId("r2"), EngineFault("its reply met a bug"), retry=False)
    assert made.is_due
    assert started(made, S) == []
    assert not made.is_due
    accept(made, "r3", "r4", now_ns=100 * S)
    end(made, "r1", now_ns=100 * S)
    assert started(made, 100 * S) == ["r3"]
    assert made.model_queue("m").gap_ns == 0, "nothing waited between the two starts"


def test_so_is_that_of_one_that_a_worker_is_kept_free_for() -> None:
    made = control(running=0, skip_s=1)
    made.set_worker(0, "m", W, WorkerView(max_running=4, kv_blocks_total=30))
    accept(made, "runs", prompt_tokens=320)
    accept(made, "large", prompt_tokens=400)
    assert started(made) == ["runs"]
    assert started(made, 2 * S) == []
    workers = made.model_queue("m").workers
    assert workers.held is not None
    made.failed(2 * S, RequestId("large"), EngineFault("its reply met a bug"), retry=False)
    assert made.is_due
    assert started(made, 2 * S) == []
    assert workers.held is None


def test_a_client_that_leaves_the_queue_is_settled_at_once_and_was_given_nothing() -> None:
    made = control()
    accept(made, "a", "b")
    started(made)
    settled = made.cancel(S, RequestId("b"))
    assert isinstance(settled, Settled)
    record = settled.request.record(0)
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == (Outcome.CANCELLED, 0, 0)
    assert record.attempts == 0


def test_a_client_that_leaves_a_stream_is_settled_with_the_workers_last_word() -> None:
    made = control()
    accept(made, "a")
    started(made)
    made.output(0, RequestId("a"), 3)
    assert made.cancel(0, RequestId("a")) == Abort(RequestId("a"), W)
    assert made.cancel(0, RequestId("a")) is None, "it is ending already"
    assert made.output(0, RequestId("a"), 1) is None
    accept(made, "b")
    assert started(made) == [], "the room is free when the worker says so"
    settled = made.ended(0, RequestId("a"), Outcome.FINISHED, Usage(prompt_tokens=32, completion_tokens=5))
    assert settled is not None
    assert (settled.outcome, settled.request.record(0).completion_tokens) == (Outcome.CANCELLED, 5)
    assert started(made) == ["b"]


def test_the_drivers_word_for_a_cancel_is_as_good() -> None:
    made = control()
    accept(made, "a")
    started(made)
    settled = made.ended(0, RequestId("a"), Outcome.CANCELLED, Usage(completion_tokens=2))
    assert settled is not None
    assert settled.outcome is Outcome.CANCELLED


# --- failures and tries ---------------------------------------------------------------------------


def test_a_request_is_tried_again_elsewhere_in_its_old_place_until_tries_are_used_up() -> None:
    made = control(retries_max=2)
    made.set_worker(0, "m", V, WorkerView(max_running=1))
    accept(made, "a", now_ns=1)
    accept(made, "b", "c", now_ns=2)
    assert {start.id: start.worker_id for start in made.dispatch(2)} == {"a": W, "b": V}
    error = WorkerUnavailable("gone")
    end(made, "b")
    assert made.failed(3, RequestId("a"), error, retry=True) == Requeued(RequestId("a"), 1)
    answers = made.dispatch(3)
    assert [(each.id, each.worker_id) for each in answers] == [("a", V), ("c", W)], (
        "before c, and not on w again"
    )
    made.failed(4, RequestId("a"), error, retry=True)
    assert [each.id for each in made.dispatch(4)] == ["a"]
    settled = made.failed(5, RequestId("a"), error, retry=True)
    assert isinstance(settled, Settled)
    record = settled.request.record(0)
    assert (record.outcome, record.error, record.attempts) == (Outcome.FAILED, "WorkerUnavailable", 3)
    assert record.prompt_tokens == 0, "nobody pays for what nobody answered"


def test_after_the_first_output_nothing_is_begun_again() -> None:
    made = control()
    accept(made, "a")
    started(made)
    made.first_output(0, RequestId("a"))
    settled = made.failed(0, RequestId("a"), StreamBroken("gone"), retry=False)
    assert isinstance(settled, Settled)
    assert settled.outcome is Outcome.FAILED
    assert settled.request.record(0).prompt_tokens == 32


@pytest.mark.parametrize(
    ("outcome", "paid"),
    [(Outcome.FAILED, 0), (Outcome.EVICTED, 0), (Outcome.CANCELLED, 36), (Outcome.FINISHED, 36)],
)
def test_a_whole_answer_that_does_not_come_to_its_end_costs_its_client_nothing(
    outcome: Outcome, paid: int
) -> None:
    limiter = Limiter(LimitsConfig())
    made = control(parts=Policies(limits=limiter), running=2)
    for name, is_whole in (("whole", True), ("streamed", False)):
        accept(made, name, tenant=limited(tokens_per_minute=1000), is_whole=is_whole)
    started(made)
    before = 0
    for name, expected in (("whole", paid), ("streamed", 36)):
        made.first_output(0, RequestId(name))
        settled = made.ended(0, RequestId(name), outcome, so_far(4))
        assert settled is not None
        record = settled.request.record(0)
        assert record.prompt_tokens + record.completion_tokens == expected
        assert limiter.settled - before == expected
        before = limiter.settled
    assert limiter.outstanding == 0


def so_far(tokens: int) -> Usage:
    return Usage(prompt_tokens=32, completion_tokens=tokens)


def test_a_stream_whose_worker_died_goes_on_elsewhere_at_its_old_place_with_one_record() -> None:
    made = control(retries_max=0)
    made.set_worker(0, "m", V, WorkerView(max_running=1))
    accept(made, "a", now_ns=1)
    accept(made, "b", "c", now_ns=2)
    assert {start.id: start.worker_id for start in made.dispatch(2)} == {"a": W, "b": V}
    made.first_output(3, RequestId("a"))
    made.set_worker(4, "m", W, None)
    answer = made.failed(4, RequestId("a"), StreamBroken("gone"), retry=True, usage=so_far(7))
    assert answer == Requeued(RequestId("a"), 1, migrates=True)
    end(made, "b", now_ns=5 * S)
    (start,) = made.dispatch(5 * S)
    assert start == Start(RequestId("a"), "m", V, priority=0, attempt=2, takes_row=True), "before c"
    flow = made.request(RequestId("a"))
    assert flow is not None
    assert (flow.state, flow.completion_tokens) == (State.STARTED, 7)
    made.output(6 * S, RequestId("a"), 1)
    assert flow.state is State.STREAMING
    record = end(made, "a", 10, now_ns=7 * S).request.record(0)
    assert (record.outcome, record.worker, record.attempts) == (Outcome.FINISHED, "v", 2)
    assert (record.prompt_tokens, record.completion_tokens, record.ttft_us) == (32, 10, 0)
    assert record.queue_us == (5 * S - 4) // 1000, "it waited twice, the first time for a nanosecond"


@pytest.mark.parametrize(("limit", "parts"), [(2, Policies(migrations_max=2)), (3, Policies())])
def test_streams_move_only_so_often(limit: int, parts: Policies) -> None:
    made = control(parts=parts)
    accept(made, "a")
    for number in range(limit + 1):
        assert started(made) == ["a"]
        if number != 1:  # One worker dies before it has gone on.
            made.output(0, RequestId("a"), 1)
        answer = made.failed(0, RequestId("a"), StreamBroken("gone"), retry=True, usage=so_far(number))
        assert isinstance(answer, Requeued if number < limit else Settled)
    assert isinstance(answer, Settled)
    record = answer.request.record(0)
    assert (record.outcome, record.error, record.attempts) == (Outcome.FAILED, "StreamBroken", limit + 1)
    assert record.prompt_tokens == 32


def test_a_stream_that_waits_to_go_on_waits_anew_and_pays_for_what_it_gave() -> None:
    made = control(no_worker_wait_s=1000.0)
    accept(made, "a", "b", max_wait_ns=10 * S)
    started(made)
    made.first_output(S, RequestId("a"))
    made.set_worker(70 * S, "m", W, None)
    made.failed(70 * S, RequestId("a"), StreamBroken("gone"), retry=True, usage=so_far(5))
    assert [each.id for each in made.dispatch(70 * S)] == ["b"], "which has waited too long"
    settled = made.cancel(80 * S, RequestId("a"))
    assert isinstance(settled, Settled)
    record = settled.request.record(0)
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == (Outcome.CANCELLED, 32, 5)


def test_a_stream_that_finds_no_worker_to_go_on_is_dropped_and_pays_for_what_it_gave() -> None:
    made = control(no_worker_wait_s=5.0)
    accept(made, "a")
    started(made)
    made.first_output(S, RequestId("a"))
    made.set_worker(2 * S, "m", W, None)
    made.failed(2 * S, RequestId("a"), StreamBroken("gone"), retry=True, usage=so_far(5))
    evict = only(made.dispatch(7 * S))
    assert evict.reason == "no_worker"
    assert evict.settled is not None
    assert evict.settled.request.record(0).completion_tokens == 5


def test_a_request_whose_client_left_is_not_tried_again() -> None:
    made = control()
    accept(made, "a")
    started(made)
    made.cancel(0, RequestId("a"))
    settled = made.failed(0, RequestId("a"), WorkerUnavailable("gone"), retry=True)
    assert isinstance(settled, Settled)
    assert settled.outcome is Outcome.CANCELLED


# --- waits that end -------------------------------------------------------------------------------


def test_a_wait_that_is_too_long_ends_with_503() -> None:
    made = control()
    accept(made, "a", "b", max_wait_ns=3 * S)
    started(made)
    assert made.next_ns(0) == 3 * S
    assert made.dispatch(3 * S - 1) == []
    evict = only(made.dispatch(3 * S))
    assert (evict.id, evict.reason, evict.worker_id) == ("b", "timeout", None)
    assert isinstance(evict.error, Evicted)
    assert evict.settled is not None
    assert evict.settled.outcome is Outcome.EVICTED


def test_without_a_worker_requests_wait_for_one_for_a_while() -> None:
    made = control(running=0, no_worker_wait_s=5.0)
    accept(made, "a")
    accept(made, "b", now_ns=2 * S)
    assert made.dispatch(2 * S) == []
    assert made.next_ns(2 * S) == 5 * S
    evict = only(made.dispatch(5 * S))
    assert (evict.id, evict.reason) == ("a", "no_worker")
    assert isinstance(evict.error, WorkerUnavailable)
    made.set_worker(6 * S, "m", W, WorkerView(max_running=1))
    assert started(made, 6 * S) == ["b"]


def test_or_they_are_refused_at_once() -> None:
    made = control(running=0, no_worker_wait_s=0)
    refused = made.arrive(0, arrival("a"))
    assert isinstance(refused, Refused)
    assert (refused.reason, type(refused.error)) == ("no_worker", WorkerUnavailable)


@pytest.mark.parametrize("wait_s", [0, 5.0])
def test_a_model_that_is_asleep_is_waited_for_twice_as_long_as_waking_takes(wait_s: float) -> None:
    made = control(running=0, no_worker_wait_s=wait_s)
    made.set_worker(0, "m", W, WorkerView(ready=False, max_running=1, wake_ns=10 * S))
    accept(made, "a", "b")
    assert made.dispatch(19 * S) == [], "nothing falls back or ends meanwhile"
    until_ns = made.next_ns(19 * S)
    assert until_ns is not None
    assert until_ns >= 20 * S
    made.set_worker(20 * S, "m", W, WorkerView(max_running=1))
    assert started(made, 20 * S) == ["a"]


def test_waking_takes_longer_than_a_band_lets_wait_and_only_a_clients_own_bound_ends_that() -> None:
    made = control(running=0, no_worker_wait_s=5.0)
    made.set_worker(0, "m", W, WorkerView(ready=False, max_running=1, wake_ns=100 * S))
    accept(made, "a", "b")
    accept(made, "short", max_wait_ns=20 * S)
    assert only(made.dispatch(20 * S)).id == "short"
    assert made.dispatch(204 * S) == [], "its band lets it wait for 60 s"
    assert made.next_ns(204 * S) == 205 * S
    assert [each.id for each in made.dispatch(205 * S)] == ["a", "b"]
    accept(made, "c", "d", now_ns=300 * S)
    assert made.dispatch(400 * S) == []
    made.set_worker(400 * S, "m", W, WorkerView(max_running=1))
    assert started(made, 400 * S) == ["c"]
    assert made.dispatch(504 * S) == [], "it stays for as long as it was kept"
    assert only(made.dispatch(505 * S)).id == "d"


def test_a_worker_that_comes_back_counts_anew() -> None:
    made = control(no_worker_wait_s=5.0)
    accept(made, "a", "b")
    started(made)
    made.set_worker(50 * S, "m", W, None)
    made.failed(50 * S, RequestId("a"), WorkerUnavailable("gone"), retry=True)
    assert made.dispatch(50 * S) == []
    assert {each.id for each in made.dispatch(55 * S)} == {"a", "b"}
    assert len(made) == 0


# --- bounds ---------------------------------------------------------------------------------------


def test_a_full_queue_says_so_and_when_to_come_back() -> None:
    made = control(bands=(BandTerms(name="default", order=0, requests_max=2),), tenant_share=1.0)
    accept(made, "a", "b")
    refused = made.arrive(0, arrival("c"))
    assert isinstance(refused, Refused)
    assert refused.reason == "queue"
    assert isinstance(refused.error, Overloaded)
    assert refused.error.retry_after_s == 1.0
    assert len(made) == 2


def test_a_full_queue_drops_bulk_for_better_work_and_settles_it() -> None:
    made = control(requests_max=1)
    bulk = Tenant(id=TenantId("b"), band="bulk")
    accept(made, "running")
    started(made)
    accept(made, "bulk", tenant=bulk)
    accept(made, "good")
    evict = only(made.dispatch(0))
    assert (evict.id, evict.reason) == ("bulk", "queue_full")
    assert evict.settled is not None
    assert len(made) == 2


def test_a_drain_refuses_the_new_and_lets_the_old_go_on_until_its_deadline() -> None:
    made = control()
    accept(made, "a", "b", "c")
    started(made)
    made.drain(1 * S, 10 * S)
    refused = made.arrive(1 * S, arrival("d"))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Draining)
    end(made, "a", now_ns=2 * S)
    assert started(made, 2 * S) == ["b"]
    assert made.next_ns(2 * S) == 10 * S
    answers = {each.id: each for each in made.dispatch(10 * S)}
    assert answers["b"].worker_id == W
    assert answers["c"].settled is not None
    assert made.dispatch(11 * S) == []
    made.ended(11 * S, RequestId("b"), Outcome.CANCELLED, Usage(completion_tokens=1))
    assert len(made) == 0


# --- a large request, and memory ------------------------------------------------------------------


def test_a_large_request_lets_some_pass_and_then_a_worker_is_kept_free_for_it() -> None:
    made = control(running=4, skips_max=2)
    made.set_worker(0, "m", W, WorkerView(max_running=4, kv_blocks_total=24))
    accept(made, "s0", "s1", prompt_tokens=16 * 5)
    accept(made, "large", prompt_tokens=16 * 12)
    accept(made, "s2", "s3", "s4", "s5", prompt_tokens=16)
    assert started(made) == ["s0", "s1", "s2", "s3"]
    end(made, "s2")
    end(made, "s3")
    assert started(made) == [], "two have passed it"
    end(made, "s0")
    assert started(made) == ["large", "s4", "s5"]


def test_full_memory_ends_the_lowest_bands_longest_answers_and_no_protected_one() -> None:
    made = control(running=8)
    for i, band in enumerate(["bulk", "bulk", "default", "priority"]):
        tenant = Tenant(id=TenantId(band), band=band)
        accept(made, f"{band}{i}", tenant=tenant, prompt_tokens=16 * 10, max_tokens=100 * (i + 1))
    assert len(started(made)) == 4
    made.set_worker(S, "m", W, WorkerView(max_running=8, running=4, kv_blocks_total=100, kv_blocks_used=98))
    evict = only(made.dispatch(S))
    assert (evict.id, evict.reason, evict.worker_id) == ("bulk1", "memory", W)
    assert made.dispatch(S) == [], "once per report"
    made.set_worker(S, "m", W, WorkerView(max_running=8, running=4, kv_blocks_total=100, kv_blocks_used=98))
    assert made.dispatch(S) == [], "what it will give back is enough"
    settled = made.ended(S, RequestId("bulk1"), Outcome.FINISHED, Usage(completion_tokens=7))
    assert settled is not None
    assert settled.outcome is Outcome.EVICTED
    for used in (100, 100, 100):
        made.set_worker(
            S, "m", W, WorkerView(max_running=8, running=3, kv_blocks_total=100, kv_blocks_used=used)
        )
        for each in made.dispatch(S):
            made.ended(S, each.id, Outcome.FINISHED)
    assert made.request(RequestId("priority3")) is not None
    assert len(made) == 1


def test_among_equals_memory_is_the_engines_affair() -> None:
    made = control(running=8)
    accept(made, "a", "b", prompt_tokens=160)
    started(made)
    made.set_worker(S, "m", W, WorkerView(max_running=8, running=2, kv_blocks_total=100, kv_blocks_used=100))
    assert made.dispatch(S) == []


def test_who_runs_more_than_its_part_leaves_some_rows_to_others_that_are_active() -> None:
    made = control(running=10, headroom=0.2, worker_credit=1)
    greedy, other = Tenant(id=TenantId("greedy")), Tenant(id=TenantId("other"))
    accept(made, "o0", tenant=other)
    accept(made, "third")
    accept(made, *(f"g{i}" for i in range(20)), tenant=greedy)
    assert len(started(made)) == 2 + 6, "two rows and the credit stay free"
    accept(made, "o1", "o2", tenant=other)
    assert started(made) == ["o1", "o2"], "and these start at once"
    for name in ("o0", "o1", "o2", "third"):
        end(made, name)
    assert len(started(made)) == 5, "alone it has every row"


# --- with the other parts -------------------------------------------------------------------------


def limited(**limits) -> Tenant:
    return Tenant(id=TenantId("limited"), **limits)


def test_limits_are_reserved_before_the_queue_and_settled_at_the_end() -> None:
    config = LimitsConfig()
    limiter = Limiter(config)
    made = control(parts=Policies(limits=limiter, lengths=OutputLengths(config)), running=4)
    tenant = limited(tokens_per_minute=100)
    accept(made, "a", tenant=tenant)
    assert limiter.outstanding == 42
    started(made)
    accept(made, "b", tenant=tenant)
    refused = made.arrive(0, arrival("c", tenant=tenant))
    assert isinstance(refused, Refused)
    assert refused.reason == "limits"
    end(made, "a", tokens=4)
    made.cancel(0, RequestId("b"))
    assert (limiter.outstanding, limiter.settled) == (0, 36), "b never started"


def test_a_refusal_by_the_queue_leaves_nothing_reserved() -> None:
    limiter = Limiter(LimitsConfig())
    band = BandTerms(name="default", order=0, requests_max=1)
    made = control(parts=Policies(limits=limiter), bands=(band,))
    accept(made, "a")
    before = limiter.outstanding
    assert isinstance(made.arrive(0, arrival("b")), Refused)
    assert limiter.outstanding == before
    assert limiter.num_live(ACME.id) == 1


class Purse:
    """A budget of so many micros, at one for each token."""

    def __init__(self, micros: int) -> None:
        self.left, self.settled = micros, 0

    are_any = True

    def cost_micros(self, model: str, usage: Usage) -> int:
        return usage.prompt_tokens + usage.completion_tokens

    def reserve(self, now_ns: int, tenant: Tenant, micros: int):
        if micros > self.left:
            return NoMoney()
        self.left -= micros
        return None

    def renew(self, now_ns: int, tenant: TenantId, held: int, total: int) -> bool:
        if total - held > self.left:
            return False
        self.left -= max(0, total - held)
        return True

    def settle(self, now_ns: int, tenant: TenantId, held: int, actual: int) -> None:
        self.left += held - actual
        self.settled += actual

    def spend(self, now_ns: int, tenant: TenantId, micros: int) -> None:
        self.left -= micros
        self.settled += micros


class NoMoney:
    def error(self) -> Overloaded:
        return Overloaded("no money")


def test_a_budget_stops_a_stream_at_a_slice_boundary() -> None:
    purse = Purse(100)
    made = control(parts=Policies(budgets=purse, prices=purse, slice_tokens=20))
    accept(made, "a", max_tokens=1000)
    started(made)
    assert purse.left == 100 - 32 - 20
    for _ in range(3):
        assert made.output(0, RequestId("a"), 10) is None
    assert made.output(0, RequestId("a"), 10) is None, "the third slice is paid for"
    assert made.output(0, RequestId("a"), 20) == Stop(RequestId("a"), W)
    assert made.output(0, RequestId("a"), 1) is None
    settled = made.ended(0, RequestId("a"), Outcome.CANCELLED, Usage(completion_tokens=61))
    assert settled is not None
    record = settled.request.record(0)
    assert (record.outcome, record.finish_reason, record.cost_micros) == (Outcome.FINISHED, "budget", 93)
    assert (purse.left, purse.settled) == (7, 93)
    assert isinstance(made.arrive(0, arrival("b")), Refused)


def test_a_request_that_began_before_anything_had_a_price_is_paid_for_at_its_end() -> None:
    purse = Purse(100)
    purse.are_any = False
    made = control(parts=Policies(budgets=purse, prices=purse, slice_tokens=20), running=2)
    for name in ("a", "b"):
        accept(made, name, max_tokens=1000)
    started(made)
    assert purse.left == 100, "nothing is held where nothing has a price"
    assert end(made, "a", tokens=4).request.record(0).cost_micros == 0
    purse.are_any = True
    assert made.output(0, RequestId("b"), 30) is None, "its next slice is not asked for"
    assert end(made, "b", tokens=30).request.record(0).cost_micros == 62
    assert (purse.left, purse.settled) == (38, 62)


def test_a_request_that_the_queue_refuses_takes_nothing_of_any_level() -> None:
    limiter = Limiter(LimitsConfig())
    levels = LimitLevels(limiter)
    made = control(parts=Policies(limits=limiter, levels=levels), requests_max=1)
    tenant = limited(tokens_per_minute=1000, per_user=PartLimits(tokens_per_minute=1000))
    accept(made, "a", tenant=tenant, user="ann")
    held = limiter.outstanding
    assert 0 < held == levels.parts.outstanding
    refused = made.arrive(0, arrival("b", tenant=tenant, user="ann"))
    assert isinstance(refused, Refused)
    assert refused.reason == "queue"
    assert limiter.outstanding == levels.parts.outstanding == held
    started(made)
    end(made, "a")
    assert limiter.outstanding == levels.parts.outstanding == 0
    assert limiter.settled == levels.parts.settled == 42


def test_the_admission_sees_the_load_and_may_send_elsewhere() -> None:
    seen = []

    class Gate(AdmitAll):
        def decide(self, now_ns, arrival, look):
            load = look("m")
            seen.append((load.ready, load.requests_ahead))
            return Pass(7) if load.requests_ahead < 1 else Diverted(arrival.id, "small", "queue_depth")

    made = control(parts=Policies(admission=Gate()))
    assert made.arrive(0, arrival("a")) == Queued(RequestId("a"), "m", 7)
    started(made)
    assert made.arrive(0, arrival("b")) == Queued(RequestId("b"), "m", 7)
    assert made.arrive(0, arrival("c")) == Diverted(RequestId("c"), "small", "queue_depth")
    assert seen == [(1, 0), (1, 0), (1, 1)]
    assert len(made) == 2


# --- whatever happens -----------------------------------------------------------------------------

TENANTS = [
    Tenant(
        id=TenantId(name), band=band, weight=weight, tokens_per_minute=limit, fairness_key=name,
        per_key=per_key, per_user=per_user,
    )
    for name, band, weight, limit, per_key, per_user in [
        ("a", "default", 1.0, 0, None, None),
        ("b", "default", 2.0, 5000, None, PartLimits(tokens_per_minute=2000)),
        ("c", "priority", 1.0, 0, PartLimits(requests_per_minute=60), PartLimits(concurrent_max=2)),
        ("d", "bulk", 0.5, 0, None, None),
    ]
]  # fmt: skip


class Life(RuleBasedStateMachine):
    """All events in any order, beside a plain account of who was accepted, who runs where and who ended."""

    @initialize(seed=st.integers(0, 2**32 - 1), wait_s=st.sampled_from([15, 0]))
    def open(self, seed, wait_s) -> None:
        self.random, self.now_ns, self.count = Random(seed), 0, 0
        bands = (
            BandTerms(name="priority", order=-1, floor=0.25, starvation_s=5, requests_max=6, protected=True),
            BandTerms(name="default", order=0, floor=1, starvation_s=10, requests_max=6, timeout_s=40),
            BandTerms(
                name="bulk", order=1, starvation_s=20, requests_max=6, timeout_s=60, discipline="deadline"
            ),
        )
        config = LimitsConfig(burst_s=600)
        self.limiter, self.purse = Limiter(config), Purse(10**6)
        self.levels = LimitLevels(self.limiter)
        parts = Policies(
            limits=self.limiter,
            levels=self.levels,
            lengths=OutputLengths(config),
            budgets=self.purse,
            prices=self.purse,
            slice_tokens=8,
        )
        queue = QueueTerms(
            bands=bands, requests_max=10, no_worker_wait_s=wait_s, worker_credit=1,
            external_concurrency=2, skips_max=3, skip_s=2, aside_max=2, retries_max=1, tenants_kept=2,
        )  # fmt: skip
        self.control = FlowControl(queue, parts)
        self.waiting: set[str] = set()
        self.running: dict[str, str] = {}
        self.stopping: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.draining = False
        self.used = 0

    def settle(self, settled) -> None:
        assert isinstance(settled, Settled)
        record = settled.request.record(self.now_ns)
        assert settled.request.state is State.ENDED
        self.ended[settled.id] += 1
        self.used += record.prompt_tokens + record.completion_tokens
        self.waiting.discard(settled.id)
        self.running.pop(settled.id, None)
        self.stopping.discard(settled.id)

    def dispatch(self) -> None:
        for answer in self.control.dispatch(self.now_ns):
            if isinstance(answer, Start):
                self.waiting.remove(answer.id)
                self.running[answer.id] = answer.worker_id
            elif answer.settled is not None:
                assert answer.id in self.waiting
                self.settle(answer.settled)
            else:
                assert self.running[answer.id] == answer.worker_id
                assert answer.reason in ("memory", "drain")
                self.stopping.add(answer.id)
        assert self.control.dispatch(self.now_ns) == [], "one call does all there is to do"
        due_ns = self.control.next_ns(self.now_ns)
        assert due_ns is None or due_ns > self.now_ns or self.draining

    def pick(self, names) -> str | None:
        return self.random.choice(sorted(names)) if names else None

    @rule(
        kind=st.integers(0, 3), prompt=st.integers(1, 300), max_tokens=st.integers(1, 40), now=st.booleans()
    )
    def arrive(self, kind, prompt, max_tokens, now) -> None:
        self.count += 1
        new = arrival(
            f"r{self.count}", tenant=TENANTS[kind], prompt_tokens=prompt, max_tokens=max_tokens,
            choices=self.random.choice([1, 1, 1, 2, 5]), num_bytes=prompt, route=self.random.choice("mmn"),
            cached_tokens=self.random.randrange(prompt), max_wait_ns=self.random.choice([0, 0, 5 * S]),
            key_prefix=self.random.choice("kl"), user=self.random.choice(["", "ann", "bob"]),
        )  # fmt: skip
        answer = self.control.arrive(self.now_ns, new)
        if isinstance(answer, Queued):
            assert not self.draining
            self.waiting.add(new.id)
        if now or self.control._pending:  # Who gave way to it is told with the next dispatch.
            self.dispatch()

    @rule(worker=st.sampled_from("xyz"), gone=st.booleans(), kv=st.sampled_from([0, 20, 60]))
    def report(self, worker, gone, kv) -> None:
        route = "n" if worker == "z" else "m"
        view = WorkerView(
            ready=self.random.random() < 0.8, max_running=self.random.randrange(4),
            running=self.random.randrange(3), kv_blocks_total=kv,
            kv_blocks_used=self.random.randrange(kv + 1),
        )  # fmt: skip
        self.control.set_worker(
            self.now_ns, route, WorkerId(worker), None if gone and self.random.random() < 0.3 else view
        )
        self.dispatch()

    @rule(ns=st.integers(0, 8 * S))
    def wait(self, ns) -> None:
        """As a driver does: to `next_ns` if that comes first."""
        due_ns = self.control.next_ns(self.now_ns)
        self.now_ns = self.now_ns + ns if due_ns is None else min(self.now_ns + ns, max(due_ns, self.now_ns))
        self.dispatch()

    @rule(tokens=st.integers(1, 30))
    def output(self, tokens) -> None:
        if (name := self.pick(self.running)) is not None:
            stop = self.control.output(self.now_ns, RequestId(name), tokens)
            if stop is not None:
                assert stop.worker_id == self.running[name]
                self.stopping.add(name)

    @rule()
    def first(self) -> None:
        if (name := self.pick(self.running)) is not None:
            self.control.first_output(self.now_ns, RequestId(name), cached_tokens=self.random.randrange(200))

    @rule(outcome=st.sampled_from([Outcome.FINISHED, Outcome.FINISHED, Outcome.FAILED, Outcome.CANCELLED]))
    def end(self, outcome) -> None:
        if (name := self.pick(self.running)) is not None:
            reported = Usage(
                prompt_tokens=1,
                completion_tokens=self.random.randrange(60),
                cached_tokens=self.random.randrange(99),
            )
            usage = reported if self.random.random() < 0.7 else None
            self.settle(self.control.ended(self.now_ns, RequestId(name), outcome, usage))
            assert self.control.ended(self.now_ns, RequestId(name), outcome) is None
            self.dispatch()

    @rule(retry=st.booleans())
    def fail(self, retry) -> None:
        if (name := self.pick(self.running)) is not None:
            answer = self.control.failed(self.now_ns, RequestId(name), WorkerUnavailable("gone"), retry=retry)
            if isinstance(answer, Requeued):
                assert retry
                assert name not in self.stopping
                assert answer.attempts <= 1 or answer.migrates
                assert answer.attempts <= 4
                del self.running[name]
                self.waiting.add(name)
            else:
                self.settle(answer)
            self.dispatch()

    @rule()
    def cancel(self) -> None:
        if (name := self.pick(self.waiting | set(self.running))) is not None:
            answer = self.control.cancel(self.now_ns, RequestId(name))
            if name in self.waiting:
                self.settle(answer)
            elif name in self.stopping:
                assert answer is None
            else:
                assert answer == Abort(RequestId(name), WorkerId(self.running[name]))
                self.stopping.add(name)

    @rule(chance=st.integers(0, 30))
    def drain(self, chance) -> None:
        if chance == 0 and not self.draining:
            self.draining = True
            self.control.drain(self.now_ns, self.now_ns + 10 * S)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "control"):
            return
        assert set(self.ended.values()) <= {1}, "settled exactly once"
        assert len(self.control) == len(self.waiting) + len(self.running)
        assert not self.ended.keys() & (self.waiting | self.running.keys())
        for name in self.waiting:
            flow = self.control.request(RequestId(name))
            assert flow is not None
            assert flow.state is State.QUEUED
        model_queues = [
            model_queue for route in "mn" if (model_queue := self.control.model_queue(route)) is not None
        ]
        for model_queue in model_queues:
            model_queue.check_invariants()
            for capacity in model_queue.workers:
                here = {name for name, worker in self.running.items() if worker == capacity.id}
                assert here == set(capacity.begun)
        assert sum(len(model_queue.queue) for model_queue in model_queues) == len(self.waiting)
        live = len(self.control)
        assert sum(self.limiter.num_live(tenant.id) for tenant in TENANTS) == live
        assert self.limiter.settled == self.used == self.purse.settled, (
            "what was settled is what is on record"
        )

    def teardown(self) -> None:
        """Once no more comes and workers answer, everything ends."""
        if not hasattr(self, "control"):
            return
        for worker, route in (("x", "m"), ("z", "n")):
            self.control.set_worker(self.now_ns, route, WorkerId(worker), WorkerView(max_running=2))
        for _ in range(400):
            self.dispatch()
            for name in sorted(self.running):
                self.settle(self.control.ended(self.now_ns, RequestId(name), Outcome.FINISHED))
            if not len(self.control):
                break
        assert not len(self.control), "somebody waits for ever"
        assert self.limiter.outstanding == self.levels.parts.outstanding == 0
        assert self.purse.left + self.purse.settled == 10**6


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
