"""Workers of one model that are not alike: order, weights, and limits of their own."""

from collections import Counter

import pytest

from penstock.clock import NS_PER_S
from penstock.errors import WorkerUnavailable
from penstock.policy.flow import Outcome, RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import hedge_of
from penstock.policy.terms import DeploymentTerms, QueueTerms
from penstock.types import RequestId, Usage, WorkerId

S = NS_PER_S


def made(**workers: DeploymentTerms) -> FlowControl:
    control = FlowControl(QueueTerms(worker_credit=0), Policies())
    for name, terms in workers.items():
        control.set_worker(0, "m", WorkerId(name), WorkerView(max_running=2, terms=terms))
    return control


def starts(control: FlowControl, now_ns: int) -> list[str]:
    return [action.worker_id for action in control.dispatch(now_ns) if isinstance(action, Start)]


def next_start_ns(control: FlowControl, now_ns: int) -> int:
    """When something starts by time alone."""
    while not starts(control, now_ns):
        due_ns = control.next_ns(now_ns)
        assert due_ns is not None
        assert due_ns > now_ns
        now_ns = due_ns
    return now_ns


def arrive(control: FlowControl, now_ns: int, name: str) -> list[str]:
    """Where it started, and whatever else did."""
    control.arrive(now_ns, RequestFacts(id=RequestId(name), route="m", prompt_tokens=20, max_tokens=10))
    return starts(control, now_ns)


def end(control: FlowControl, now_ns: int, name: str, completion_tokens: int = 1) -> None:
    """With one token of its ten, unless told otherwise."""
    control.first_output(now_ns, RequestId(name))
    usage = Usage(prompt_tokens=20, completion_tokens=completion_tokens)
    control.ended(now_ns, RequestId(name), Outcome.FINISHED, usage)


def test_the_first_order_goes_first_and_the_next_gets_what_it_cannot_take() -> None:
    control = made(dear=DeploymentTerms(order=2), cheap=DeploymentTerms(), middle=DeploymentTerms(order=1))
    started = [arrive(control, i, f"r{i}") for i in range(7)]
    assert started == [["cheap"], ["cheap"], ["middle"], ["middle"], ["dear"], ["dear"], []]
    end(control, 10, "r1")
    assert starts(control, 10) == ["cheap"]


def test_a_request_that_failed_goes_to_the_next_order() -> None:
    control = made(cheap=DeploymentTerms(), dear=DeploymentTerms(order=1))
    assert arrive(control, 0, "a") == ["cheap"]
    control.failed(1, RequestId("a"), WorkerUnavailable("500"), retry=True)
    assert starts(control, 1) == ["dear"]
    control.failed(2, RequestId("a"), WorkerUnavailable("500"), retry=True)
    assert starts(control, 2) == ["cheap"], "it failed everywhere"


def test_starts_go_by_weights() -> None:
    control = made(three=DeploymentTerms(weight=3), one=DeploymentTerms(order=0, rpm=1000))
    found = Counter[str]()
    for i in range(40):
        found.update(arrive(control, i, f"r{i}"))
        end(control, i, f"r{i}")
    assert found == {"three": 30, "one": 10}


def test_requests_a_minute_are_its_own() -> None:
    control = made(small=DeploymentTerms(rpm=3))
    for i in range(3):
        assert arrive(control, i, f"r{i}") == ["small"]
        end(control, i, f"r{i}")
    assert arrive(control, 3, "late") == []
    now_ns = 3
    while not (started := starts(control, now_ns)):
        now_ns = control.next_ns(now_ns) or 0
        assert now_ns > 3
    assert started == ["small"]
    assert now_ns == pytest.approx(20 * S, rel=0.01), "a third of a minute for each"


def test_tokens_a_minute_are_settled_on_what_was_used() -> None:
    control = made(small=DeploymentTerms(tpm=60), spare=DeploymentTerms(order=1))
    assert [arrive(control, 0, name) for name in "abc"] == [["small"], ["small"], ["spare"]]
    end(control, 1, "a")
    end(control, 1, "b")
    assert arrive(control, 2, "d") == ["spare"], "18 of 60 are left, and it may need 30"
    assert arrive(control, 13 * S, "e") == ["small"]


def test_a_worker_that_may_start_again_and_has_no_room_is_not_asked_about_for_ever() -> None:
    control = FlowControl(QueueTerms(worker_credit=0, extra_per_row=0, skip_s=100))
    terms = DeploymentTerms(rpm=2)
    control.set_worker(0, "m", WorkerId("w"), WorkerView(max_running=1, terms=terms))
    for name in ("a", "b"):
        assert arrive(control, 0, name) == ["w"]
        end(control, 0, name)
    assert arrive(control, 1, "c") == []
    control.set_worker(2, "m", WorkerId("w"), WorkerView(max_running=1, running=9, terms=terms))
    assert starts(control, 2) == starts(control, 29 * S) == []
    for now_ns in (30 * S, 31 * S):
        assert arrive(control, now_ns, f"at {now_ns}") == []
        due_ns = control.next_ns(now_ns)
        assert due_ns is not None
        assert due_ns > now_ns, "others have its only row, and their ends are reported"


def test_the_soonest_of_those_that_wait_is_waited_for() -> None:
    control = made(w=DeploymentTerms(tpm=60))
    for name in ("a", "b"):
        assert arrive(control, 0, name) == ["w"]
        end(control, 0, name, completion_tokens=10)
    for name, max_tokens in (("short", 2), ("long", 30)):
        facts = RequestFacts(id=RequestId(name), route="m", prompt_tokens=20, max_tokens=max_tokens)
        control.arrive(0, facts)
    assert next_start_ns(control, 0) == pytest.approx(22 * S, rel=0.01)


def test_tokens_of_an_attempt_whose_usage_is_not_known_stay_taken() -> None:
    for usage in (None, Usage()):
        control = made(w=DeploymentTerms(tpm=60))
        assert arrive(control, 0, "a") == ["w"]
        control.ended(0, RequestId("a"), Outcome.CANCELLED, usage)
        assert arrive(control, 0, "b") == ["w"]
        assert arrive(control, 0, "c") == [], "a provider counts what was aborted too"


def test_a_hedge_and_a_retry_go_where_a_request_may_go() -> None:
    terms = DeploymentTerms(rpm=1)
    control = made(first=DeploymentTerms(), spent=terms)
    model_queue = control.model_queue("m")
    assert arrive(control, 0, "a") == ["first"]
    assert arrive(control, 0, "b") == ["spent"]
    end(control, 0, "b")
    request = control.request(RequestId("a"))
    assert not model_queue.has_other(0, request, besides=WorkerId("first"))
    second = hedge_of(request, RequestId("a~2"))
    assert model_queue.place_hedge(0, second, WorkerId("first")) is None
    control.set_worker(0, "m", WorkerId("dear"), WorkerView(max_running=2, terms=DeploymentTerms(order=1)))
    assert model_queue.place_hedge(0, second, WorkerId("first")).id == "dear"
    assert model_queue.has_other(0, request, besides=WorkerId("first"))
    assert model_queue.place_hedge(60 * S, second, WorkerId("first")).id == "spent", (
        "the first order has it again"
    )
