"""Attempts that give nothing in time: by the client's bound, and by what is usual at a worker."""

from dataclasses import replace

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.fleet import HealthConfig
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig
from penstock.errors import AttemptTimeout, Evicted, WorkerUnavailable
from penstock.policy.admission.admit import AdmissionControl
from penstock.policy.contracts import ModelFacts, Pass
from penstock.policy.extras.hedging import Hedges, HedgeTerms
from penstock.policy.extras.hooks import FIRST_MIN_NS, SAMPLES_MIN, FirstTokens
from penstock.policy.flow import FallBack, GiveUp, Outcome, RequestFacts, Requeued, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict, request_of
from penstock.policy.resilience.health import FleetHealth
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

S, MS = NS_PER_S, NS_PER_MS
W, V = WorkerId("w"), WorkerId("v")


def made(*, fallback: str = "small", external: bool = True, health: FleetHealth | None = None) -> FlowControl:
    config = QueueTerms(worker_credit=0)
    routing = RoutingConfig(models=(ModelRoute(model="large", fallback=fallback),))
    admission = AdmissionControl(
        AdmissionConfig(ttft_target_ms=0, targets=()),
        routing,
        config,
        {"large": ModelFacts(), "small": ModelFacts()}.get,
    )
    policies = Policies(admission=admission)
    control = FlowControl(config, replace(policies, health=health) if health else policies)
    control.set_worker(0, "large", W, WorkerView(is_external=external))
    control.set_worker(0, "small", V, WorkerView(max_running=8))
    return control


def facts_of(name: str, route: str = "large", **facts) -> RequestFacts:
    facts = {"prompt_tokens": 20, "max_tokens": 10, **facts}
    return RequestFacts(id=RequestId(name), route=route, requested_model="large", **facts)


def arrive(control: FlowControl, now_ns: int, name: str, **facts) -> None:
    control.arrive(now_ns, facts_of(name, **facts))
    (start,) = control.dispatch(now_ns)
    assert isinstance(start, Start)


def answered(control: FlowControl, count: int, ttft_ns: int) -> int:
    for i in range(count):
        arrive(control, i * S, f"r{i}")
        control.first_output(i * S + ttft_ns, RequestId(f"r{i}"))
        control.ended(i * S + ttft_ns, RequestId(f"r{i}"), Outcome.FINISHED, Usage(completion_tokens=1))
    return count * S


def test_half_of_the_clients_time_is_for_one_attempt_and_the_end_of_it_is_the_end() -> None:
    control = made()
    arrive(control, 0, "a", first_token_ns=S)
    assert control.next_ns(0) == S // 2
    assert control.dispatch(S // 2 - 1) == []
    (given_up,) = control.dispatch(S // 2)
    assert isinstance(given_up, GiveUp)
    assert isinstance(given_up.error, AttemptTimeout)
    assert given_up.error.waited_ns == S // 2
    assert isinstance(control.failed(S // 2, RequestId("a"), given_up.error, retry=True), Requeued)
    assert control.dispatch(S // 2) == [FallBack(RequestId("a"), "small", "timeout")]
    assert control.next_ns(S // 2) == S
    (evicted,) = control.dispatch(S)
    assert isinstance(evicted, Evict)
    assert isinstance(evicted.error, Evicted)
    assert str(evicted.error) == "no first token within 1000 ms, which is as long as the client waits"


def test_what_was_to_leave_and_cannot_is_tried_again_at_once() -> None:
    control = made()
    arrive(control, 0, "a", first_token_ns=10 * S)
    (given_up,) = control.dispatch(5 * S)
    control.failed(5 * S, RequestId("a"), given_up.error, retry=True)
    assert control.dispatch(5 * S) == [FallBack(RequestId("a"), "small", "timeout")]
    assert control.dispatch(6 * S) == [], "it starts nowhere while it may leave"
    control.stay(RequestId("a"))
    (start,) = control.dispatch(6 * S)
    assert (start.id, start.worker_id) == ("a", W)


def test_the_clients_time_begins_with_its_request() -> None:
    control = made()
    arrive(control, 10 * S, "a", first_token_ns=S)
    assert control.next_ns(10 * S) == 10 * S + S // 2


def test_nothing_is_given_up_while_no_other_place_would_take_it() -> None:
    control = made(fallback="")
    arrive(control, 0, "a", first_token_ns=10 * S)
    assert control.dispatch(5 * S) == []
    assert control.next_ns(5 * S) == 6 * S, "another place may come"
    assert [type(each) for each in control.dispatch(10 * S)] == [Evict]


def test_a_worker_of_ours_has_all_of_the_clients_time() -> None:
    control = made(external=False)
    arrive(control, 0, "a", first_token_ns=S)
    assert control.next_ns(0) == S
    control.first_output(S // 2, RequestId("a"))
    assert control.dispatch(S) == [], "its client has what it waited for"


def test_what_is_usual_there_bounds_an_attempt() -> None:
    control = made()
    now = answered(control, SAMPLES_MIN, 700 * MS)
    arrive(control, now, "late")
    assert control.dispatch(now + 2800 * MS - 1) == []
    (given_up,) = control.dispatch(now + 2801 * MS)
    assert isinstance(given_up, GiveUp)
    control = made()
    now = answered(control, SAMPLES_MIN - 1, 700 * MS)
    arrive(control, now, "late")
    assert control.next_ns(now) == now + 10_040 * MS, "too little is known"


def test_a_worker_that_never_gives_anything_is_left_after_what_any_engine_takes() -> None:
    health = FleetHealth(HealthConfig(), lambda: 0.0)
    control = made(health=health)
    for i in range(5):
        arrive(control, i, f"r{i}")
        assert health.trouble(i, "large") is None
    now, fallen = 11 * S, 0
    while control.next_ns(now) == now:
        for each in control.dispatch(now):
            if isinstance(each, GiveUp):
                assert isinstance(control.failed(now, each.id, each.error, retry=True), Requeued)
            elif isinstance(each, FallBack):
                assert (each.route, each.why) == ("small", "timeout")
                control.move(now, facts_of(each.id, "small"))
                fallen += 1
    assert fallen == 5
    assert health.trouble(now, "large").why == "breaker", "five that failed in a row"


def test_nothing_is_known_of_a_worker_whose_client_was_in_a_hurry() -> None:
    health = FleetHealth(HealthConfig(), lambda: 0.0)
    health.worker("large", W, ready=True, is_external=True)
    for _ in range(9):
        health.ended(0, "large", W, AttemptTimeout("half a second", waited_ns=S // 2, unseen_ns=10 * S))
    assert health.trouble(0, "large") is None


def test_of_a_long_prompt_nothing_is_known_where_its_client_waits_less_than_any_engine_may_take() -> None:
    """Five are given up after 12 s of the 210 s that such prompts have: that opens no breaker."""
    for prompt_tokens, why in ((100_000, None), (500, "breaker")):
        health = FleetHealth(HealthConfig(), lambda: 0.0)
        control = made(health=health)
        for i in range(5):
            arrive(control, i, f"r{i}", prompt_tokens=prompt_tokens, first_token_ns=24 * S)
        now_ns, errors = 12 * S + 5, []
        while control.next_ns(now_ns) <= now_ns:
            for each in control.dispatch(now_ns):
                if isinstance(each, GiveUp):
                    errors.append(each.error)
                    control.failed(now_ns, each.id, each.error, retry=True)
        assert [error.unseen_ns for error in errors] == [10 * S + 2 * MS * prompt_tokens] * 5
        trouble = health.trouble(now_ns, "large")
        assert (trouble and trouble.why) == why


def test_what_any_engine_takes_grows_with_the_prompt_and_while_nothing_comes() -> None:
    firsts = FirstTokens(10 * S)
    assert firsts.bound_ns("m", W, 0) == 10 * S
    assert firsts.bound_ns("m", W, 10_000) == 30 * S
    seen = []
    for _ in range(25):
        seen.append(firsts.bound_ns("m", W, 0) // S)
        firsts.gave_up("m", W, 0, firsts.bound_ns("m", W, 0))
    assert seen == [10] * 5 + [20] * 5 + [40] * 5 + [80] * 10
    for _ in range(5):  # Their clients had no more time.
        firsts.gave_up("m", V, 0, S)
        firsts.gave_up("m", V, 10_000, 29 * S)
    assert firsts.bound_ns("m", V, 0) == 10 * S
    firsts.took("m", W, 0, 30 * S)
    assert firsts.bound_ns("m", W, 0) == 120 * S, "one that takes so long is known for it"
    assert FirstTokens(0).bound_ns("m", W, 0) == 0, "turned off"


def test_a_worker_that_answers_some_prompts_is_not_one_that_never_gives_anything() -> None:
    firsts = FirstTokens(10 * S)
    firsts.took("m", W, 20, S)
    for _ in range(5):
        firsts.gave_up("m", W, 1, 11 * S)
    assert firsts.bound_ns("m", W, 1) == 10_002 * MS
    for _ in range(SAMPLES_MIN):
        firsts.took("m", W, 20, S)
    for _ in range(5):
        firsts.took("m", W, 1, 11 * S)
    assert not firsts._num_silent


def test_a_worker_that_is_slow_for_good_is_taken_for_it_in_time() -> None:
    firsts, num = FirstTokens(), 0
    for _ in range(100):
        firsts.took("m", W, 20, 100 * MS)
    assert firsts.bound_ns("m", W, 20) == FIRST_MIN_NS
    while (bound_ns := firsts.bound_ns("m", W, 20)) < 10 * S:
        firsts.gave_up("m", W, 20, bound_ns)
        num += 1
    assert 10 < num < 200


def test_a_class_of_prompts_that_was_hardly_seen_borrows_from_those_beside_it() -> None:
    firsts = FirstTokens()
    for tokens in (20, 40):
        for _ in range(SAMPLES_MIN // 2):
            firsts.took("m", W, tokens, 800 * MS)
    assert firsts.bound_ns("m", W, 20) == 3200 * MS, "neither has enough alone"
    assert firsts.bound_ns("m", W, 40) == 3200 * MS, "four times as long is room enough for twice the length"
    assert firsts.bound_ns("m", W, 80) == 6400 * MS
    assert firsts.bound_ns("m", V, 20) == 0, "of another worker nothing is known"


def test_first_tokens_that_were_waited_for_too_long_do_not_become_usual_at_once() -> None:
    firsts = FirstTokens()
    for _ in range(SAMPLES_MIN):
        firsts.took("m", W, 20, 800 * MS)
    for _ in range(3):
        firsts.took("m", W, 20, 60 * S)  # There was nowhere else to go.
    assert firsts.bound_ns("m", W, 20) < 8 * S


def test_a_worker_in_doubt_has_less_time() -> None:
    health = FleetHealth(HealthConfig(), lambda: 0.0)
    control = made(health=health)
    now = answered(control, SAMPLES_MIN, 700 * MS)
    assert health.doubt_ns("large", W) == 0
    health.ended(now, "large", W, WorkerUnavailable("500"))
    assert health.doubt_ns("large", W) == 2100 * MS + 1
    arrive(control, now, "probe")
    assert control.dispatch(now + 2100 * MS) == []
    (given_up,) = control.dispatch(now + 2101 * MS)
    assert isinstance(given_up, GiveUp)
    health.worker("large", WorkerId("peer"), ready=True, is_external=True)
    assert health.doubt_ns("large", W) == 0, "with peers it is judged by these"


def test_a_worker_of_which_nothing_is_known_is_in_no_doubt() -> None:
    health = FleetHealth(HealthConfig(), lambda: 0.0)
    health.worker("large", W, ready=True, is_external=True)
    health.ended(0, "large", W, WorkerUnavailable("500"))
    assert health.doubt_ns("large", W) == 0, "what is usual there is not known"


def test_a_request_that_moved_to_another_model_is_evicted_once_at_its_deadline() -> None:
    control = made()
    control.set_worker(0, "small", V, WorkerView(max_running=1))
    control.arrive(0, facts_of("runs", "small"))
    control.arrive(0, facts_of("a", first_token_ns=S))
    control.set_worker(0, "large", W, None)
    assert FallBack(RequestId("a"), "small", "unavailable") in control.dispatch(0)
    assert control.move(1, facts_of("a", "small", first_token_ns=S))
    control.set_worker(1, "small", V, WorkerView(max_running=1, running=9))
    assert control.dispatch(1) == [], "there is no row"
    (evicted,) = control.dispatch(S)
    assert isinstance(evicted, Evict)
    assert (evicted.id, evicted.reason) == ("a", "late")


def test_a_request_that_moved_is_not_measured_by_what_was_predicted_for_the_first_model() -> None:
    moved = request_of(facts_of("a"), 0, model_queue=None, verdict=Pass(predicted_ns=S))
    moved.retarget(request_of(facts_of("a", "small"), 0, model_queue=None, verdict=Pass(predicted_ns=MS)))
    assert (moved.facts.route, moved.predicted_ns) == ("small", 0)


def test_as_many_attempts_are_given_up_as_another_place_takes() -> None:
    """One at a time: what is requeued takes a retry and a row before the next one is asked about."""
    policies = Policies(health=FleetHealth(HealthConfig(), lambda: 0.0))
    control = FlowControl(QueueTerms(worker_credit=0, retries_max=2), policies)
    control.set_worker(0, "large", W, WorkerView(is_external=True))
    for i in range(30):
        arrive(control, 0, f"r{i}", first_token_ns=10 * S)
    control.set_worker(1, "large", V, WorkerView(max_running=64))
    given_up, now_ns = [], 5 * S
    while control.next_ns(now_ns) == now_ns:
        late = [each for each in control.dispatch(now_ns) if isinstance(each, GiveUp)]
        given_up += [control.failed(now_ns, each.id, each.error, retry=True) for each in late]
    assert [type(each) for each in given_up] == [Requeued] * 3, "as many as the retry budget has"
    assert len(control) == 30, "the others run on where they are"
    assert control.next_ns(now_ns) == now_ns + S


def hedged() -> FlowControl:
    """One request of two attempts, both at external workers."""
    hedges = Hedges(HedgeTerms(hedge_share=1.0, hedge_after_ms=100), lambda *_: None)
    control = FlowControl(QueueTerms(worker_credit=0), Policies(hedges=hedges))
    for worker in (W, V):
        control.set_worker(0, "large", worker, WorkerView(is_external=True))
    arrive(control, 0, "a", first_token_ns=10 * S)
    (second,) = control.dispatch(100 * MS)
    assert isinstance(second, Start)
    assert second.is_hedge
    return control


def test_the_attempt_that_is_left_of_two_has_its_time_too() -> None:
    for failing in (1, 2):
        control = hedged()
        request = control.request(RequestId("a"))
        control.hedging.lost(2 * S, request, failing, WorkerUnavailable("gone"))
        control.set_worker(2 * S, "large", WorkerId("u"), WorkerView(is_external=True))
        given_up, now_ns = [], 2 * S
        while not given_up and now_ns < 10 * S:
            given_up = [each for each in control.dispatch(now_ns) if isinstance(each, GiveUp)]
            now_ns = max(now_ns + 1, control.next_ns(now_ns))
        assert [each.id for each in given_up] == ["a"], f"attempt {3 - failing} was never given up"


def test_no_attempt_is_given_up_while_two_run() -> None:
    control = hedged()
    control.set_worker(S, "large", WorkerId("u"), WorkerView(is_external=True))
    assert [control.dispatch(at * S) for at in range(1, 10)] == [[]] * 9
