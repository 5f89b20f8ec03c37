"""What waits for a model whose last worker vanishes: another model answers where that is allowed, the rest
waits and then is told.
"""

from penstock.clock import NS_PER_S
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig
from penstock.errors import StreamBroken, WorkerUnavailable
from penstock.policy.admission.admit import AdmissionControl
from penstock.policy.contracts import ModelFacts
from penstock.policy.flow import FallBack, Outcome, Queued, RequestFacts, Requeued, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.lifecycle.transitions import ASKED_MAX, Accounts, Fallbacks
from penstock.policy.placement.pick import LeastLoaded
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.request import Evict, request_of
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

S = NS_PER_S
W, V = WorkerId("w"), WorkerId("v")


def made(*, small: int = 4, **queue) -> FlowControl:
    """`large` has a worker of one stream and falls back to `small`, whose context is 100 tokens, and which
    has no tools.
    """
    config = QueueTerms(**{"worker_credit": 0, "no_worker_wait_s": 30, **queue})
    routing = RoutingConfig(
        models=(ModelRoute(model="large", fallback="small"), ModelRoute(model="small", tools=False))
    )
    facts = {"large": ModelFacts(adapters=frozenset(("a",))), "small": ModelFacts(max_model_len=100)}
    admission = AdmissionControl(AdmissionConfig(ttft_target_ms=0), routing, config, facts.get)
    control = FlowControl(config, Policies(admission=admission))
    control.set_worker(0, "large", W, WorkerView(max_running=1))
    if small:
        control.set_worker(0, "small", V, WorkerView(max_running=small))
    return control


def arrival(name: str, route: str = "large", **facts) -> RequestFacts:
    facts = {"prompt_tokens": 20, "max_tokens": 10, "context_tokens": 30, **facts}
    return RequestFacts(id=RequestId(name), route=route, requested_model="large", **facts)


def waiting(control: FlowControl, *names: str, **facts) -> None:
    """They wait behind one that runs, and then the worker is gone."""
    assert isinstance(control.arrive(0, arrival("runs")), Queued)
    control.dispatch(0)
    control.first_output(0, RequestId("runs"))
    for name in names:
        assert isinstance(control.arrive(0, arrival(name, **facts)), Queued)
    control.dispatch(0)
    control.set_worker(S, "large", W, None)
    assert isinstance(control.failed(S, RequestId("runs"), StreamBroken("gone"), retry=True), Requeued)


def test_what_waits_moves_to_the_fallback_and_is_one_request_all_along() -> None:
    control = made()
    waiting(control, "a", "b")
    assert control.dispatch(S) == [FallBack(RequestId(each), "small", "unavailable") for each in "ab"]
    assert control.dispatch(S) == [], "each is asked once"
    moved = arrival("a", "small", diverted="unavailable", prompt_tokens=25)
    assert control.move(S, moved)
    (start,) = control.dispatch(S)
    assert (start.id, start.route, start.worker_id) == ("a", "small", V)
    control.first_output(S, RequestId("a"))
    settled = control.ended(
        2 * S, RequestId("a"), Outcome.FINISHED, Usage(prompt_tokens=25, completion_tokens=3)
    )
    record = settled.request.record(0)
    assert (record.served_model, record.requested_model, record.route_reason) == (
        "small",
        "large",
        "unavailable",
    )
    assert (record.prompt_tokens, record.attempts, record.queue_us) == (25, 1, 1_000_000)
    for route in ("large", "small"):
        control.model_queue(route).check_invariants()


def test_the_rules_are_those_of_admission() -> None:
    for facts in (
        {"degrade": "never"}, {"needs_tools": True}, {"context_tokens": 200}, {"adapter": "a"},
    ):  # fmt: skip
        control = made()
        waiting(control, "a", **facts)
        assert control.dispatch(S) == [], facts
    control = made(small=0)
    waiting(control, "a")
    assert control.dispatch(S) == [], "nobody is there either"


def test_who_cannot_move_waits_for_a_worker_and_is_told_when_none_comes() -> None:
    control = made()
    waiting(control, "a", degrade="never")
    control.dispatch(S)
    assert control.next_ns(S) == 31 * S
    reported = control.dispatch(31 * S)
    assert {(each.id, each.reason) for each in reported} == {("a", "no_worker"), ("runs", "no_worker")}
    assert all(isinstance(each, Evict) and isinstance(each.error, WorkerUnavailable) for each in reported)
    assert not len(control)


def test_where_nobody_waits_for_a_worker_it_fails_at_once() -> None:
    control = made(no_worker_wait_s=0)
    waiting(control, "a", "b", degrade="never")
    reported = control.dispatch(S)
    assert [(each.id, each.reason) for each in reported] == [("a", "no_worker"), ("b", "no_worker")]


def test_a_worker_that_comes_back_in_time_gets_it() -> None:
    control = made()
    waiting(control, "a")
    control.dispatch(S)
    control.set_worker(2 * S, "large", W, WorkerView(max_running=4))
    assert not control.move(2 * S, arrival("a", "small", diverted="unavailable"))
    assert {each.id for each in control.dispatch(2 * S) if isinstance(each, Start)} == {"a", "runs"}
    assert not control.move(2 * S, arrival("gone", "small", diverted="unavailable"))


def test_what_has_begun_to_answer_stays_with_its_model() -> None:
    control = made()
    waiting(control)
    assert control.dispatch(S) == []


def test_a_long_queue_is_asked_in_pieces() -> None:
    control = made(small=200)
    waiting(control, *(f"r{i}" for i in range(ASKED_MAX + 5)))
    first, second = control.dispatch(S), control.dispatch(S)
    assert (len(first), len(second)) == (ASKED_MAX, 5)


class Counted(dict):
    """Counts how often requests are looked up."""

    num_gets = 0

    def get(self, key, default=None):
        self.num_gets += 1
        return super().get(key, default)


def test_what_has_been_asked_is_not_looked_at_again_at_each_dispatch() -> None:
    policies, requests = Policies(), Counted()
    accounts = Accounts(policies)
    fallbacks = Fallbacks(policies, accounts, requests, lambda *_: None, retries_max=2)
    model_queue = ModelQueue(QueueTerms(), "large", 0, LeastLoaded(), policies.health)

    def wait(name: str) -> None:
        facts = arrival(name)
        request = requests[facts.id] = request_of(facts, 0, model_queue)
        assert accounts.open(0, request) is None
        model_queue.queue.push(0, request)

    for i in range(ASKED_MAX - 1):
        wait(f"r{i}")
    found, stay, more = fallbacks.ask(S, model_queue)
    assert (found, len(stay), more) == ([], ASKED_MAX - 1, False), "it has no worker, and no other model"
    for i in range(50):
        wait(f"s{i}")
        assert [each.id for each in fallbacks.ask(S + i, model_queue)[1]] == [f"s{i}"]
    assert requests.num_gets == len(requests), "each is looked at once"
    model_queue.set_worker(2 * S, W, WorkerView(max_running=1))
    assert fallbacks.ask(2 * S, model_queue) == ([], [], False)
    model_queue.set_worker(3 * S, W, None)
    assert len(fallbacks.ask(3 * S, model_queue)[1]) == ASKED_MAX, "it is down again, so all are asked again"


def test_entries_that_a_moved_request_leaves_behind_count_no_more() -> None:
    """It is the same object in both queues, one after the other."""
    control = made(small=1)
    small_fills = arrival("fills", "small")
    control.arrive(0, small_fills)
    waiting(control, "a", "b", max_wait_ns=5 * S)
    control.dispatch(S)
    assert control.move(S, arrival("a", "small", diverted="unavailable", max_wait_ns=20 * S))
    large, small = control.model_queue("large"), control.model_queue("small")
    request = control.request(RequestId("a"))
    assert (large.queue.waits(request), small.queue.waits(request)) == (False, True)
    assert control.dispatch(S) == [], "the only row of the other model is taken"
    reported = control.dispatch(6 * S)
    assert [each.id for each in reported if isinstance(each, Evict)] == ["b"], "its wait here is another"
    control.set_worker(6 * S, "large", W, WorkerView(max_running=4))
    assert [each.id for each in control.dispatch(6 * S) if isinstance(each, Start)] == ["runs"]
    reported = control.dispatch(S + 20 * S)
    assert [each.id for each in reported if isinstance(each, Evict)] == ["a"]
    for model_queue in (large, small):
        model_queue.check_invariants()


def test_attempts_at_the_model_before_are_no_retries_of_this_one() -> None:
    control = made()
    control.set_worker(0, "small", WorkerId("u"), WorkerView(max_running=4))
    assert isinstance(control.arrive(0, arrival("a", "small")), Queued)
    control.dispatch(0)
    request = control.request(RequestId("a"))
    assert request is not None
    retries = QueueTerms().retries_max
    request.attempts, request.attempts_elsewhere = 1 + 5, 5
    assert control.can_move(0, request, now=True), "its first attempt here"
    request.attempts = retries + 5
    assert control.can_move(0, request, now=True), "one retry is left"
    request.attempts = 5 + retries + 1
    assert not control.can_move(0, request, now=True)
