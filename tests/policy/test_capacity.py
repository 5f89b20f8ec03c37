from collections.abc import Collection
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, WorkerView
from penstock.policy.terms import DeploymentTerms, QueueTerms, part_of, slots_of
from penstock.types import RequestId, TenantId, WorkerId

A, B = WorkerId("a"), WorkerId("b")
CONFIG = QueueTerms(worker_credit=1, external_concurrency=3)


def work(name: str, *, streams: int = 1, blocks: int = 0) -> Work:
    return Work(
        id=RequestId(name), band="default", tenant=TenantId("t"), arrived_ns=0, streams=streams, blocks=blocks
    )


def start(workers: CapacityTable, each: Work, avoid: Collection[WorkerId] = ()) -> WorkerId | None:
    worker = workers.place(each, avoid)
    if worker is None:
        return None
    workers.book(worker, each)
    return worker.id


def test_streams_go_to_the_least_loaded_up_to_the_credit() -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, WorkerView(max_running=1))
    workers.set(B, WorkerView(max_running=3))
    assert workers.num_slots == 6
    got = [start(workers, work(f"r{i}")) for i in range(7)]
    assert got == [A, B, B, A, B, B, None]
    assert not workers.has_room()


@pytest.mark.parametrize(
    ("view", "slots"), [(WorkerView(max_running=8), 9), (WorkerView(), 3), (WorkerView(ready=False), 0)]
)
def test_how_many_streams_a_worker_is_given(view, slots) -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, view)
    assert workers.num_slots == slots


def test_an_external_worker_is_given_no_more_than_it_runs_and_keeps_some_of_that_free() -> None:
    rows = {0: (3, 4), 1: (1, 1), 3: (3, 3), 4: (3, 4), 16: (15, 16), 64: (59, 64)}
    for max_running, expected in rows.items():
        found = slots_of(max_running, is_external=True, terms=CONFIG)
        assert (found.given, found.limit) == expected, max_running
        assert not max_running or found.given - found.spare == max_running, "what is kept free are its rows"
    lends_all = QueueTerms(headroom=0.0)
    assert slots_of(64, is_external=True, terms=lends_all) == (64, 64, 0)
    assert slots_of(64, is_external=False, terms=lends_all) == (68, 64 + 4 + 4 * 64, 4), (
        "ours takes rows back"
    )


def test_several_gateway_processes_divide_the_rows_of_an_external_worker() -> None:
    assert [part_of(16, processes) for processes in (1, 2, 3, 16, 64)] == [16, 8, 5, 1, 1]
    assert part_of(0, 8) == 0, "nothing is known to divide"


def test_gateway_processes_divide_a_deployments_limits() -> None:
    terms = DeploymentTerms(order=1, weight=3, rpm=600)
    assert terms.part(4) == DeploymentTerms(order=1, weight=3, rpm=150)
    assert DeploymentTerms(rpm=2, tpm=1001).part(2) == DeploymentTerms(rpm=1, tpm=500)
    assert DeploymentTerms(rpm=1, tpm=3).part(4) == DeploymentTerms(rpm=1, tpm=1), "none is left without any"
    assert terms.part(1) == terms
    assert DeploymentTerms(order=1).part(4) == DeploymentTerms(order=1), "no limit stays none"


def test_streams_of_others_count_and_ours_are_not_counted_twice() -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, WorkerView(max_running=4))
    mine = [work(f"r{i}") for i in range(2)]
    for each in mine:
        start(workers, each)
    worker = workers.set(A, WorkerView(max_running=4, running=4, waiting=0))
    assert worker is not None
    assert (worker.booked, worker.others, worker.num_free) == (2, 2, 1)
    workers.release(worker, mine[0])
    assert worker.num_free == 2
    workers.check_invariants()


def test_a_gateway_always_has_requests_in_the_queue_of_an_engine_that_others_fill() -> None:
    workers = CapacityTable(QueueTerms(worker_credit=2))
    worker = workers.set(A, WorkerView(max_running=4, running=4, waiting=2))
    assert worker is not None
    mine = [work(f"r{i}") for i in range(3)]
    for each in mine[:2]:
        assert workers.place(each) is worker
        start(workers, each)
    assert workers.place(mine[2]) is None, "two of its own wait there"
    workers.begin(worker, mine[0])
    assert workers.place(mine[2]) is worker, "the engine gave one a row"
    workers.check_invariants()
    external = workers.set(B, WorkerView(max_running=4, running=4, waiting=2, is_external=True))
    assert external is not None
    assert external.num_free <= 0, "what waits in an engine of others cannot be reordered"


def test_kv_blocks_count_from_the_start_until_the_first_output_and_then_by_report() -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, WorkerView(max_running=8, kv_blocks_total=100))
    first = work("first", blocks=70)
    assert start(workers, first) == A
    assert workers.place(work("second", blocks=31)) is None
    assert workers.place(work("third", blocks=30)) is not None
    worker = workers.get(A)
    assert worker is not None
    workers.begin(worker, first)
    workers.set(A, WorkerView(max_running=8, kv_blocks_total=100, kv_blocks_used=60, running=1))
    assert workers.place(work("second", blocks=31)) is not None


def test_an_idle_worker_takes_anything() -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, WorkerView(max_running=2, kv_blocks_total=10))
    assert start(workers, work("huge", streams=99, blocks=1000)) == A


def test_a_retry_goes_elsewhere_if_it_can() -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, WorkerView(max_running=4))
    assert start(workers, work("only one"), avoid=[A]) == A
    workers.set(B, WorkerView(max_running=1, running=1))
    assert start(workers, work("r"), avoid=[A]) == B


def test_a_worker_that_is_kept_free_takes_nothing_else() -> None:
    workers = CapacityTable(CONFIG)
    for worker in (A, B):
        workers.set(worker, WorkerView(max_running=4, kv_blocks_total=10, kv_blocks_used=9, running=1))
    workers.set(B, WorkerView(max_running=4, kv_blocks_total=10, kv_blocks_used=5, running=1))
    capacity = workers.hold(work("large", blocks=8))
    assert capacity is not None
    assert capacity.id == B, "it lacks least there"
    assert [start(workers, work(f"r{i}")) for i in range(5)] == [A] * 4 + [None]
    workers.unhold()
    assert start(workers, work("r5")) == B


def test_a_worker_that_left_is_forgotten_once_nothing_of_it_is_open() -> None:
    workers = CapacityTable(CONFIG)
    workers.set(A, WorkerView(max_running=4))
    mine = work("r")
    start(workers, mine)
    worker = workers.set(A, None)
    assert worker is not None
    assert (workers.num_ready, workers.num_slots, workers.has_room()) == (0, 0, False)
    workers.release(worker, mine)
    assert list(workers) == []


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_the_sums_agree_whatever_happens(seed) -> None:
    random, workers = Random(seed), CapacityTable(CONFIG)
    here: list[tuple[WorkerId, Work]] = []
    for step in range(120):
        kind = random.randrange(6)
        if kind == 0:
            view = WorkerView(
                ready=random.random() < 0.8, max_running=random.randrange(4), running=random.randrange(5),
                kv_blocks_total=random.choice([0, 20]), kv_blocks_used=random.randrange(20),
                is_external=random.random() < 0.3,
            )  # fmt: skip
            workers.set(WorkerId(random.choice("abcd")), view if random.random() < 0.9 else None)
        elif kind < 4:
            each = work(f"r{step}", streams=random.choice([1, 1, 2]), blocks=random.randrange(12))
            free = {capacity.id: capacity.num_free for capacity in workers}
            if (worker := start(workers, each, avoid=random.choice([[A], []]))) is not None:
                assert free[worker] >= 1
                here.append((worker, each))
        elif kind == 4 and here:
            worker, each = here.pop(random.randrange(len(here)))
            capacity = workers.get(worker)
            assert capacity is not None, "a room stays while something of it is open"
            workers.release(capacity, each)
        elif kind == 5:
            if workers.held is None:
                workers.hold(work("large", blocks=15))
            else:
                workers.unhold()
        workers.check_invariants()
