import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Overloaded
from penstock.kv.hashing import token_array
from penstock.schedule.queue import FCFSQueue
from penstock.schedule.request import Request
from penstock.types import RequestId, SamplingParams


def make(number: int, *, priority: int = 0, arrival_ns: int = 0) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        tokens=token_array([1]),
        sampling=SamplingParams(),
        order=(priority, arrival_ns, number),
    )


def drain(queue: FCFSQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_priority_then_arrival_then_submission() -> None:
    queue = FCFSQueue(10)
    for request in (make(1, priority=1), make(2, arrival_ns=5), make(4, arrival_ns=3), make(3, arrival_ns=3)):
        queue.push(request)
    assert drain(queue) == ["r3", "r4", "r2", "r1"]
    assert queue.peek() is None


def test_a_full_queue_refuses_what_is_new_but_never_what_was_preempted() -> None:
    queue = FCFSQueue(2)
    queue.push(make(1))
    queue.push(make(2))
    with pytest.raises(Overloaded, match="2 requests"):
        queue.push(make(3))
    assert len(queue) == 2
    queue.requeue(make(0))
    assert drain(queue) == ["r0", "r1", "r2"]


def test_a_preempted_request_goes_before_its_class() -> None:
    queue = FCFSQueue(10)
    first = make(1)
    queue.push(first)
    assert queue.pop() is first
    queue.push(make(2))
    queue.push(make(3, priority=-1))
    queue.requeue(first)
    assert drain(queue) == ["r3", "r1", "r2"]


def test_an_id_may_come_back_after_it_left() -> None:
    queue = FCFSQueue(10)
    old = make(1)
    queue.push(old)
    queue.remove(old)
    new = Request(request_id=old.request_id, tokens=old.tokens, sampling=old.sampling, order=(0, 9, 9))
    queue.push(make(2))
    queue.push(new)
    assert drain(queue) == ["r2", "r1"]


def test_aborts_do_not_grow_the_heap() -> None:
    queue = FCFSQueue(10)
    for number in range(10_000):
        request = make(number)
        queue.push(request)
        queue.remove(request)
    assert len(queue) == 0
    assert len(queue._heap) < 50


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 2), st.integers(0, 3))))
def test_behaves_like_a_sorted_list(steps) -> None:
    queue = FCFSQueue(1000)
    model: list[Request] = []
    for number, (step, priority, arrival_ns) in enumerate(steps):
        if step == "push":
            model.append(make(number, priority=priority, arrival_ns=arrival_ns))
            queue.push(model[-1])
            model.sort(key=lambda request: request.order)
        elif model and step == "pop":
            assert queue.pop() is model.pop(0)
        elif model:
            queue.remove(model.pop((priority * 7 + arrival_ns) % len(model)))
        assert queue.peek() is (model[0] if model else None)
        assert len(queue) == len(model)
