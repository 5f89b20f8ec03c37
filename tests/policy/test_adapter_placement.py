"""Which workers keep which adapters, and what is ordered before it is needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.policy.placement.adapters import HALF_LIFE_S, AdapterPlacement, ResidencyOrder
from penstock.policy.queueing.capacity import CapacityTable, WorkerView
from penstock.types import WorkerId

ROOM, LOAD_NS = 8, NS_PER_S // 2
TOKENS = 100


class Fleet:
    """Workers that do as they are told, after a while."""

    def __init__(self, count: int, worker: int = ROOM) -> None:
        self.workers = CapacityTable(QueueConfig())
        self.orders: list[ResidencyOrder] = []
        self.placement = AdapterPlacement(load_s=2.0)
        self.placement.on_order = self.orders.append
        self.now_ns = 0
        for i in range(count):
            self.tell(i, worker=worker)

    def tell(self, number: int, *loaded: str, worker: int = ROOM, ready: bool = True) -> None:
        view = WorkerView(
            ready=ready,
            max_running=8,
            adapters=frozenset(loaded),
            adapters_max=worker,
            adapter_load_ns=LOAD_NS,
        )
        self.workers.set(WorkerId(f"w{number}"), view)

    def ask(self, name: str, times: int = 1, *, after_s: float = 0.0) -> None:
        for _ in range(times):
            self.now_ns += int(after_s * NS_PER_S)
            self.placement.asked(self.now_ns, name, TOKENS, self.workers)

    def homes(self, name: str) -> list[str]:
        return sorted(self.placement.homes(name))

    def wait_s(self, worker: int, name: str) -> float:
        capacity = self.workers.get(WorkerId(f"w{worker}"))
        assert capacity is not None
        return self.placement.wait_ns(self.now_ns, capacity, name) / NS_PER_S

    def start(self, worker: int, name: str) -> None:
        capacity = self.workers.get(WorkerId(f"w{worker}"))
        assert capacity is not None
        self.placement.started(self.now_ns, name, capacity)


def test_a_load_is_ordered_when_a_request_comes_and_only_once() -> None:
    fleet = Fleet(2)
    fleet.ask("a", 3)
    wanted = [order for order in fleet.orders if not order.keep]
    assert [order.names for order in wanted] == [("a",)]
    assert fleet.wait_s(0, "a") == 0.25, "it is on its way: half of what is left counts"
    assert fleet.wait_s(1, "a") == 0.4, "a second load would take as long, and another place"
    fleet.ask("b")
    assert [order.worker for order in fleet.orders if not order.keep] == ["w0", "w1"], "where none is loaded"


def test_waits_are_those_of_the_loads_before() -> None:
    fleet = Fleet(1)
    assert fleet.wait_s(0, "a") == 0.5
    fleet.start(0, "a")
    fleet.start(0, "b")
    assert fleet.wait_s(0, "b") == 0.5, "half of the two loads"
    assert fleet.wait_s(0, "c") == 1.5
    fleet.tell(0, "a", "b")
    assert fleet.wait_s(0, "a") == 0.0
    assert fleet.wait_s(0, "c") == 0.5
    fleet.start(0, "c")
    fleet.now_ns += 100 * NS_PER_S
    assert fleet.wait_s(0, "c") == 0.5, "what was ordered long ago and never came is not expected"


def test_one_that_is_wanted_most_has_replicas_and_the_rest_one_home_each() -> None:
    fleet = Fleet(4)
    for _ in range(10):
        fleet.ask("hot", 8)
        for i in range(12):
            fleet.ask(f"cool{i}")
    fleet.ask("hot", after_s=2)
    assert len(fleet.homes("hot")) == 4, "40 % of the tokens, in parts of an eighth"
    assert all(len(fleet.homes(f"cool{i}")) == 1 for i in range(12))
    kept = {order.worker: order.names for order in fleet.orders if order.keep}
    assert all(names[0] == "hot" for names in kept.values()), "the most wanted first"
    assert {len(names) for names in kept.values()} == {4}, "the others are spread evenly"


def test_a_home_is_given_up_for_one_that_is_wanted_much_more_and_not_for_a_little() -> None:
    fleet = Fleet(1, worker=2)  # One place is nobody's.
    fleet.ask("old", 10)
    fleet.ask("new", 10)
    fleet.ask("new", after_s=2)
    assert fleet.homes("old") == ["w0"]
    fleet.ask("new", 10)
    fleet.ask("new", after_s=2)
    assert (fleet.homes("old"), fleet.homes("new")) == ([], ["w0"])
    assert fleet.orders[-1] == ResidencyOrder(WorkerId("w0"), ("new",), keep=True)


def test_demand_is_of_late() -> None:
    fleet = Fleet(1, worker=2)
    fleet.ask("past", 40)
    fleet.ask("present", 10, after_s=HALF_LIFE_S / 2)
    fleet.ask("present", after_s=2)
    assert fleet.homes("present") == ["w0"]


def test_what_a_worker_that_is_lost_had_finds_another_home() -> None:
    fleet = Fleet(2)
    fleet.ask("a", 4)
    fleet.ask("b", 4)
    fleet.ask("b", after_s=2)
    lost = int(fleet.homes("a")[0][1])
    fleet.tell(lost, ready=False)
    fleet.ask("a", after_s=2)
    assert fleet.homes("a") == [f"w{1 - lost}"]


@pytest.mark.parametrize("reported", [None, frozenset[str]()])
def test_a_worker_that_does_not_say_what_it_has_room_for_gets_no_orders(
    reported: frozenset[str] | None,
) -> None:
    fleet = Fleet(0)
    fleet.workers.set(WorkerId("w0"), WorkerView(max_running=8, adapters=reported))
    fleet.ask("a")
    fleet.ask("a", after_s=2)
    assert not fleet.orders
    assert fleet.wait_s(0, "a") == 2.0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), max_size=60),
    st.integers(1, 4),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_no_worker_is_told_to_keep_more_than_it_has_room_for(
    asked: list[tuple[int, int, bool]], workers: int, capacity: int
) -> None:
    fleet = Fleet(workers, capacity)
    for name, times, later in asked:
        fleet.ask(f"a{name}", times, after_s=2.0 if later else 0.0)
        for order in fleet.orders:
            assert len(order.names) == len(set(order.names))
            assert len(order.names) <= (max(1, capacity - 1) if order.keep else 1)
        for worker in {order.worker for order in fleet.orders if order.keep}:
            last = next(order for order in reversed(fleet.orders) if order.keep and order.worker == worker)
            assert all(worker in fleet.placement.homes(each) for each in last.names)


def test_a_load_that_never_came_counts_for_a_minute() -> None:
    fleet = Fleet(1)
    fleet.start(0, "a")
    fleet.now_ns = LOAD_NS + 60 * NS_PER_S - 1
    assert fleet.wait_s(0, "a") == LOAD_NS / 16 / NS_PER_S, "it must be there at any moment"
    fleet.now_ns += 1
    assert fleet.wait_s(0, "a") == LOAD_NS / NS_PER_S, "it is loaded anew"
