"""Attempts that give nothing in time: by the client's bound, and by what is usual at a worker."""

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig
from penstock.errors import AttemptTimeout, Evicted
from penstock.policy.admission.gate import Gate, ModelFacts
from penstock.policy.answers import FallBack, GiveUp, Requeued, Start
from penstock.policy.estimates.attempt_times import FIRST_MIN_NS, SAMPLES_MIN, FirstTokens
from penstock.policy.flow import RequestFacts
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.queueing.terms import QueueTerms
from penstock.policy.record import Outcome
from penstock.policy.requests.endings import Evict
from penstock.types import RequestId, Usage, WorkerId

S, MS = NS_PER_S, NS_PER_MS
W, V = WorkerId("w"), WorkerId("v")


def made(*, fallback: str = "small", external: bool = True) -> FlowControl:
    config = QueueTerms(worker_credit=0)
    routing = RoutingConfig(models=(ModelRoute(model="large", fallback=fallback),))
    gate = Gate(
        AdmissionConfig(ttft_target_ms=0, targets=()),
        routing,
        config,
        {"large": ModelFacts(), "small": ModelFacts()}.get,
    )
    control = FlowControl(config, Policies(admission=gate))
    control.set_worker(0, "large", W, WorkerView(is_external=external))
    control.set_worker(0, "small", V, WorkerView(max_running=8))
    return control


def arrive(control: FlowControl, now_ns: int, name: str, **facts) -> None:
    facts = {"prompt_tokens": 20, "max_tokens": 10, **facts}
    control.arrive(now_ns, RequestFacts(id=RequestId(name), route="large", requested_model="large", **facts))
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
    assert control.next_ns(now) is None, "too little is known"


def test_a_worker_that_is_slow_for_good_is_taken_for_it_in_time() -> None:
    firsts, num = FirstTokens(), 0
    for _ in range(100):
        firsts.took("m", W, 20, 100 * MS)
    assert firsts.bound_ns("m", W, 20) == FIRST_MIN_NS
    assert firsts.bound_ns("m", W, 2000) == 0, "of long prompts nothing is known"
    while (bound_ns := firsts.bound_ns("m", W, 20)) < 10 * S:
        firsts.gave_up("m", W, 20, bound_ns)
        num += 1
    assert 10 < num < 200
