"""Where copies of requests run: on what is to spare, and only as long as it is."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from penstock.config.flow import QueueConfig
from penstock.policy.flow import RequestFacts, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.queueing.spare import FREE, ShadowCopies, num_in_the_way, spare_worker
from penstock.policy.tenant import Tenant
from penstock.policy.terms import CellView, DeploymentTerms
from penstock.types import RequestId, TenantId, WorkerId

ONE, TWO = WorkerId("one"), WorkerId("two")
NOTHING: frozenset[str] = frozenset()


class Fleet:
    """One model's workers, and requests that run there."""

    def __init__(self, **workers: WorkerView) -> None:
        self.control, self._number = FlowControl(QueueConfig(), Policies()), 0
        for name, view in workers.items():
            self.control.set_worker(0, "m", WorkerId(name), view)

    @property
    def queue(self) -> ModelQueue:
        found = self.control.model_queue("m")
        assert found is not None
        return found

    def ask(self, num: int) -> list[WorkerId]:
        """The workers of those that start."""
        for _ in range(num):
            self._number += 1
            facts = RequestFacts(
                id=RequestId(f"r{self._number}"), tenant=Tenant(id=TenantId("t")), route="m",
                prompt_tokens=16, max_tokens=16,
            )  # fmt: skip
            self.control.arrive(0, facts)
        return [each.worker_id for each in self.control.dispatch(0) if isinstance(each, Start)]

    def spare(
        self, copies: Mapping[WorkerId, ShadowCopies], *, blocks: int = 1, needs: frozenset[str] = NOTHING
    ):
        found = spare_worker(self.queue, copies, blocks, needs)
        return None if found is None else found.id


def test_a_copy_goes_where_most_is_to_spare_and_a_quarter_of_the_rows_stays_free() -> None:
    fleet = Fleet(one=WorkerView(max_running=4), two=WorkerView(max_running=8))
    assert fleet.spare({}) == TWO
    assert fleet.spare({TWO: ShadowCopies(num=4)}) == ONE, "three to spare, and two"
    assert fleet.spare({TWO: ShadowCopies(num=6), ONE: ShadowCopies(num=2)}) == ONE
    assert fleet.spare({TWO: ShadowCopies(num=6), ONE: ShadowCopies(num=3)}) is None
    fleet.ask(6)
    running = {each.id: each.booked for each in fleet.queue.workers}
    for worker, rows in ((ONE, 4), (TWO, 8)):
        full = ShadowCopies(num=rows - rows // FREE - running[worker])
        other = TWO if worker == ONE else ONE
        assert fleet.spare({worker: full, other: ShadowCopies(num=99)}) is None


def test_copies_that_the_worker_reports_as_streams_of_others_are_counted_once() -> None:
    """Gateway processes share workers, so what a worker runs is known by its reports, too."""
    fleet = Fleet(one=WorkerView(max_running=16))
    copies = ShadowCopies(num=12)
    assert fleet.spare({ONE: copies}) is None
    fleet.control.set_worker(0, "m", ONE, WorkerView(max_running=16, running=12))
    assert num_in_the_way(fleet.queue, ONE, copies) == 0
    assert fleet.spare({ONE: ShadowCopies(num=11)}) is None, "one is another process's"
    fleet.control.set_worker(0, "m", ONE, WorkerView(max_running=16, running=18))
    assert num_in_the_way(fleet.queue, ONE, copies) == 2


def test_a_deployment_with_limits_of_its_own_gets_no_copies() -> None:
    limited = WorkerView(max_running=16, terms=DeploymentTerms(rpm=60))
    assert Fleet(one=limited).spare({}) is None
    assert Fleet(one=limited, two=WorkerView(max_running=2)).spare({}) == TWO


def test_a_worker_with_one_row_gets_none() -> None:
    assert Fleet(one=WorkerView(max_running=1)).spare({}) is None
    assert Fleet(one=WorkerView(max_running=2)).spare({}) == ONE


def test_nothing_is_copied_while_requests_wait_and_what_runs_is_ended() -> None:
    fleet = Fleet(one=WorkerView(max_running=2))
    assert fleet.spare({}) == ONE
    fleet.ask(40)
    assert fleet.queue.queue.num_waiting
    assert fleet.spare({}) is None
    assert num_in_the_way(fleet.queue, ONE, ShadowCopies(num=2)) == 2


def test_copies_end_as_soon_as_requests_need_their_rows() -> None:
    fleet = Fleet(one=WorkerView(max_running=4))
    copies = ShadowCopies(num=3)
    assert num_in_the_way(fleet.queue, ONE, copies) == 0
    assert len(fleet.ask(1)) == 1
    assert num_in_the_way(fleet.queue, ONE, copies) == 0, "one row each"
    assert len(fleet.ask(1)) == 1
    assert num_in_the_way(fleet.queue, ONE, copies) == 1
    assert num_in_the_way(fleet.queue, WorkerId("gone"), copies) == 3
    assert num_in_the_way(None, ONE, copies) == 3


def test_memory_abilities_and_other_cells_count() -> None:
    view = WorkerView(max_running=8, kv_blocks_total=100, kv_blocks_used=40)
    assert Fleet(one=view).spare({}, blocks=35) == ONE
    assert Fleet(one=view).spare({}, blocks=36) is None, "a quarter of it stays free"
    assert Fleet(one=view).spare({ONE: ShadowCopies(num=1, blocks=30)}, blocks=6) is None
    assert Fleet(one=view).spare({}, needs=frozenset({"eyes"})) is None
    peer = WorkerView(max_running=8, cell=CellView(name="eu", rtt_ns=1))
    assert Fleet(one=peer).spare({}) is None, "another cell's rows are no spare ones"
    assert Fleet(one=WorkerView(max_running=8, ready=False)).spare({}) is None


@given(rows=st.integers(1, 40), running=st.integers(0, 60), steps=st.integers(0, 60))
def test_requests_and_copies_never_need_more_rows_than_there_are(rows: int, running: int, steps: int) -> None:
    fleet, copies = Fleet(one=WorkerView(max_running=rows)), ShadowCopies()
    for step in range(steps):
        if step == steps // 2:
            fleet.ask(running)
        if fleet.spare({ONE: copies}) is not None:
            copies.num += 1
        copies.num -= num_in_the_way(fleet.queue, ONE, copies)
        (worker,) = fleet.queue.workers
        assert copies.num == 0 or worker.booked + copies.num <= rows
