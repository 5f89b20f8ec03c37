import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.errors import Overloaded
from penstock.kv.hashing import token_array
from penstock.schedule.queue import (
    ClassQueue,
    FairWaitingQueue,
    FCFSQueue,
    OrderedQueue,
    aged_order,
    by_class,
    waiting_queue,
)
from penstock.schedule.request import Request
from penstock.types import RequestId, SamplingParams


def make(number: int, *, key: str = "", priority: int = 0, arrival_ns: int = 0) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        tokens=token_array([1]),
        sampling=SamplingParams(),
        fairness_key=key,
        order=(priority, arrival_ns, number),
    )


def names(queue, count: int | None = None) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue) if count is None else count)]


# --- ageing ---------------------------------------------------------------------------------------


def test_waiting_makes_up_for_class() -> None:
    queue = OrderedQueue(10, aged_order(100, 10_000))
    for request in (
        make(1, priority=1, arrival_ns=0),
        make(2, arrival_ns=90),
        make(3, arrival_ns=110),
        make(4, priority=-1, arrival_ns=195),
    ):
        queue.push(request)
    assert names(queue) == ["r2", "r4", "r1", "r3"]


def test_with_one_class_it_is_first_come_first_served() -> None:
    queue = OrderedQueue(10, aged_order(100, 1000))
    for number in (3, 1, 2):
        queue.push(make(number, priority=7, arrival_ns=number))
    assert names(queue) == ["r1", "r2", "r3"]


arrivals = st.tuples(st.integers(-(10**9), 10**9), st.integers(0, 10**6))


@given(arrivals, arrivals, st.integers(0, 10**5), st.integers(0, 10**6))
def test_nobody_waits_for_who_came_later_than_the_starvation_time(one, other, ageing_ns, starvation_ns):
    key = aged_order(ageing_ns, starvation_ns)
    a = make(1, priority=one[0], arrival_ns=one[1])
    b = make(2, priority=other[0], arrival_ns=other[1])
    if b.order[1] - a.order[1] > starvation_ns:
        assert key(a) < key(b)
    if a.order[1] <= b.order[1] and a.order[0] <= b.order[0]:
        assert key(a) < key(b)


# --- shares ---------------------------------------------------------------------------------------


def fair(**weights: float) -> FairWaitingQueue:
    return FairWaitingQueue(100, by_class, weights)


def test_one_tenant_is_served_in_its_own_order() -> None:
    queue = fair()
    for number in (3, 1, 2):
        queue.push(make(number, key="a", arrival_ns=number))
    assert names(queue) == ["r1", "r2", "r3"]
    assert queue.peek() is None


def test_who_was_served_less_goes_first_although_it_came_last() -> None:
    queue = fair()
    for number in range(5):
        queue.push(make(number, key="greedy", arrival_ns=number))
    queue.charge(queue.pop(), prompt=100)
    queue.push(make(9, key="modest", arrival_ns=9))
    assert queue.served("modest") == queue.served("greedy") == 100  # Lifted to those that wait.
    queue.charge(queue.pop(), generated=1)
    assert names(queue, 1) == ["r9"]


def test_costs_are_those_of_the_paper_and_cached_tokens_are_cheap() -> None:
    queue = fair(heavy=2.0)
    queue.charge(make(1, key="a"), prompt=10, cached=10, generated=10)
    queue.charge(make(2, key="heavy"), prompt=10, cached=10, generated=10)
    assert queue.served("a") == 10 + 1 + 20
    assert queue.served("heavy") == queue.served("a") / 2


def test_idleness_earns_no_credit_even_when_the_queue_was_empty() -> None:
    queue = fair()
    queue.push(make(1, key="busy"))
    queue.charge(queue.pop(), prompt=1000)
    queue.push(make(2, key="idle"))
    assert queue.served("idle") == 1000


def test_a_preempted_request_comes_back_without_a_lift() -> None:
    queue = fair()
    first = make(1, key="a")
    queue.push(first)
    queue.pop()
    queue.push(make(2, key="b"))
    queue.charge(make(2, key="b"), prompt=50)
    queue.requeue(first)
    assert queue.served("a") == 0
    assert names(queue) == ["r1", "r2"]


def test_a_full_queue_refuses_and_counters_do_not_grow_for_ever() -> None:
    queue = FairWaitingQueue(1, by_class)
    queue.push(make(0, key="a"))
    with pytest.raises(Overloaded, match="1 requests"):
        queue.push(make(1, key="b"))
    queue.pop()
    for number in range(10_000):
        request = make(number, key=f"k{number}")
        queue.push(request)
        queue.charge(request, prompt=number)
        queue.remove(request)
    assert len(queue._counters) <= 4097
    assert len(queue._heads) < 50
    assert queue.served("k9999") > 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "remove", "charge"]), st.integers(0, 3), st.integers(0, 2))
    )
)
def test_the_head_is_always_of_the_key_that_was_served_least(steps) -> None:
    queue = FairWaitingQueue(1000, by_class)
    waiting: list[Request] = []
    for number, (step, key, priority) in enumerate(steps):
        if step == "push":
            waiting.append(make(number, key=f"k{key}", priority=priority))
            queue.push(waiting[-1])
        elif step == "charge":
            queue.charge(make(number, key=f"k{key}"), generated=priority + 1)
        elif waiting:
            request = queue.pop() if step == "pop" else waiting[key % len(waiting)]
            if step == "remove":
                queue.remove(request)
            waiting.remove(request)
        assert len(queue) == len(waiting)
        head = queue.peek()
        assert (head is None) == (not waiting)
        if head is not None:
            least = min(queue.served(request.fairness_key) for request in waiting)
            assert queue.served(head.fairness_key) == least
            own = [request for request in waiting if request.fairness_key == head.fairness_key]
            assert head is min(own, key=lambda request: request.order)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_service_of_two_tenants_that_always_wait_differs_by_a_bound(of_a, of_b, max_running) -> None:
    """Theorem 4.4 of the paper, with its bound: 2 x max(dearest prompt, a batch full of answers)."""
    queue = FairWaitingQueue(1000, by_class)
    engine = ScheduledEngine(
        num_blocks=200, max_running=max_running, queue=queue, prefix_cache=False, check_every=20
    )
    for number in range(30):
        for key, kinds in (("a", of_a), ("b", of_b)):
            prompt, answer = kinds[number % len(kinds)]
            engine.submit(f"{key}{number}", [number] * prompt, max_tokens=answer, fairness_key=key)
    dearest_prompt = max(prompt for prompt, _ in of_a + of_b)
    answers = 2 * max_running * max(answer for _, answer in of_a + of_b)
    bound = 2 * max(dearest_prompt, answers) + dearest_prompt
    while {request.fairness_key for request in engine.requests.values() if request.started_ns is None} == {
        "a",
        "b",
    }:
        engine.step()
        assert abs(queue.served("a") - queue.served("b")) <= bound


# --- classes --------------------------------------------------------------------------------------


def test_a_better_class_does_not_wait_for_who_was_served_less() -> None:
    queue = ClassQueue(100, aged_order(1000, 100_000))
    queue.charge(make(0, key="gold", priority=-1), generated=10_000)
    for number in range(1, 4):
        queue.push(make(number, key=f"free{number}", arrival_ns=number))
    queue.push(make(9, key="gold", priority=-1, arrival_ns=50))
    assert names(queue) == ["r9", "r1", "r2", "r3"]


def test_a_class_that_waited_long_enough_goes_first_and_shares_hold_in_it() -> None:
    queue = ClassQueue(100, aged_order(1000, 100_000))
    queue.push(make(1, key="greedy", arrival_ns=0))
    queue.push(make(2, key="modest", arrival_ns=900))
    queue.charge(make(1, key="greedy"), prompt=100)
    queue.push(make(3, key="gold", priority=-1, arrival_ns=1500))
    # The oldest of class 0 has waited more than one class's worth longer; whose turn it is there is a matter
    # of shares.
    assert names(queue, 1) == ["r2"]
    assert names(queue) == ["r1", "r3"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "requeue", "pop", "remove"]), st.integers(0, 3), st.integers(-2, 2)
        )
    )
)
def test_the_head_is_of_the_class_with_the_oldest_claim(steps) -> None:
    order = aged_order(10, 1000)
    queue, waiting = ClassQueue(1000, order), list[Request]()
    for number, (step, key, priority) in enumerate(steps):
        if step in ("push", "requeue"):
            waiting.append(make(number, key=f"k{key}", priority=priority, arrival_ns=number))
            getattr(queue, step)(waiting[-1])
        elif waiting:
            request = queue.pop() if step == "pop" else waiting[key % len(waiting)]
            if step == "remove":
                queue.remove(request)
            queue.charge(request, generated=1)
            waiting.remove(request)
        assert len(queue) == len(waiting)
        head = queue.peek()
        assert (head is None) == (not waiting)
        if head is not None:
            assert head.order[0] == min(waiting, key=order).order[0]


def test_a_full_queue_counts_all_classes_and_forgets_empty_ones() -> None:
    queue = ClassQueue(2, aged_order(10, 1000))
    queue.push(make(1, priority=1))
    queue.push(make(2, priority=2))
    with pytest.raises(Overloaded, match="2 requests"):
        queue.push(make(3, priority=3))
    names(queue)
    for number in range(1000):
        queue.push(make(number, priority=number))
        queue.pop()
    assert len(queue._classes) <= 64


# --- wiring ---------------------------------------------------------------------------------------


def test_the_config_chooses_the_order() -> None:
    assert type(waiting_queue(EngineSettings(scheduling="fcfs"))) is FCFSQueue
    aged = waiting_queue(EngineSettings(scheduling="priority", priority_ageing_s=1.0))
    aged.push(make(1, priority=1, arrival_ns=0))
    aged.push(make(2, arrival_ns=NS_PER_S + 1))
    assert names(aged) == ["r1", "r2"]
    queue = waiting_queue(EngineSettings(fair_weights={"gold": 4}))
    assert isinstance(queue, ClassQueue)
    queue.charge(make(1, key="gold"), prompt=8)
    assert queue.served("gold") == 2
