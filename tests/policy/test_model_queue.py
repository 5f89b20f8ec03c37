"""What the lane does with a placement's answers: holds that block nobody, workers that are blocked or to
avoid.
"""

from collections.abc import Collection

from penstock.clock import NS_PER_MS
from penstock.config.routing import TTFT_TARGET_MS, AdmissionConfig
from penstock.policy.flow import RequestFacts
from penstock.policy.lifecycle.policies import AllHealthy
from penstock.policy.placement.pick import DecisionLog, LeastLoaded, explain
from penstock.policy.placement.route import Router
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import (
    CapacityTable,
    DeploymentTerms,
    Hold,
    WorkerCapacity,
    WorkerView,
)
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.queueing.pace import BACKLOG_SHARE, OVERDUE, Pace
from penstock.policy.tenant import Tenant
from penstock.policy.terms import PlacementTerms, QueueTerms
from penstock.types import RequestId, TenantId, WorkerId

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
CONFIG = QueueTerms(worker_credit=0, external_concurrency=2, aside_max=2, skips_max=2)


class Warm(LeastLoaded):
    """Requests whose id begins with "warm" want worker A, and are held for it for 100 ms."""

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | Hold | None:
        wanted = workers.get(A)
        if wanted is None or not work.id.startswith("warm"):
            return super().place(now_ns, work, workers, avoid, blocked)
        if wanted.fits(work):
            return wanted
        if not work.hold_ns:
            return Hold(A, now_ns + 100 * NS_PER_MS)
        return super().place(now_ns, work, workers, avoid, blocked)


class Blocking(AllHealthy):
    def __init__(self, *workers: WorkerId) -> None:
        self.workers = frozenset(workers)

    def blocked(self, now_ns: int, route: str, *, strict: bool = False) -> frozenset[WorkerId]:
        return self.workers


def work(name: str, tenant: str = "t") -> Work:
    return Work(id=RequestId(name), band="default", tenant=TenantId(tenant), arrived_ns=0)


def make(placement=None, health=None, views: Collection[WorkerId] = (A, B)) -> ModelQueue:
    model_queue = ModelQueue(CONFIG, "m", 0, placement or Warm(), health or AllHealthy())
    for worker in views:
        model_queue.set_worker(0, worker, WorkerView(max_running=2))
    return model_queue


def start(model_queue: ModelQueue, now_ns: int = 0) -> tuple[str, WorkerId] | None:
    started = model_queue.next_start(now_ns)
    model_queue.check_invariants()
    return None if started is None else (started[0].id, started[1].id)


def filled(model_queue: ModelQueue, now_ns: int = 0) -> list[Work]:
    """Fill worker A."""
    mine = [work("warm-1"), work("warm-2")]
    for each in mine:
        model_queue.queue.push(now_ns, each)
        assert start(model_queue, now_ns) == (each.id, A)
    return mine


def test_a_held_request_lets_the_others_pass_and_goes_anywhere_when_its_hold_is_over() -> None:
    model_queue = make()
    filled(model_queue)
    for name in ("warm-3", "x", "y"):
        model_queue.queue.push(0, work(name))
    assert start(model_queue) == ("x", B)
    assert model_queue.due_ns(0) == 100 * NS_PER_MS
    assert start(model_queue, 99 * NS_PER_MS) == ("y", B)
    assert start(model_queue, 99 * NS_PER_MS) is None
    model_queue.set_worker(0, C, WorkerView(max_running=2))
    assert start(model_queue, 99 * NS_PER_MS) is None, "it is held although C has room"
    assert start(model_queue, 100 * NS_PER_MS) == ("warm-3", C)


def test_a_held_request_starts_when_its_worker_has_room_or_has_left() -> None:
    model_queue = make()
    mine = filled(model_queue)
    for name in ("warm-3", "warm-4"):
        model_queue.queue.push(0, work(name))
    assert start(model_queue) is None
    model_queue.release(NS_PER_MS, A, mine[0])
    assert start(model_queue, NS_PER_MS) == ("warm-3", A)
    assert start(model_queue, NS_PER_MS) is None
    model_queue.set_worker(2 * NS_PER_MS, A, WorkerView(ready=False))
    assert start(model_queue, 2 * NS_PER_MS) == ("warm-4", B)


def test_no_worker_is_kept_free_for_whoever_only_waits_by_choice() -> None:
    model_queue = make(views=(A, B, C))
    filled(model_queue)
    for name in ("warm-3", "v", "w", "x", "y"):
        model_queue.queue.push(0, work(name))
    assert [start(model_queue) for _ in range(5)] == [("v", B), ("w", C), ("x", B), ("y", C), None]
    assert model_queue.held is None


def test_holds_that_would_be_in_the_way_are_not_granted() -> None:
    model_queue = make(views=(A, B, C))
    filled(model_queue)
    for name in ("warm-3", "warm-4", "warm-5", "x"):
        model_queue.queue.push(0, work(name))
    assert start(model_queue) == ("warm-5", B), "two wait aside already"
    assert start(model_queue) == ("x", C)


def test_a_blocked_worker_is_given_nothing() -> None:
    model_queue = make(LeastLoaded(), Blocking(A))
    for name in ("u", "v", "w"):
        model_queue.queue.push(0, work(name))
    assert [start(model_queue) for _ in range(3)] == [("u", B), ("v", B), None]


def test_a_request_avoids_every_worker_on_which_it_failed() -> None:
    model_queue = make(LeastLoaded(), views=(A, B, C))
    mine = work("r")
    model_queue.queue.push(0, mine)
    tried = list[WorkerId]()
    for _ in range(4):
        started = model_queue.next_start(0)
        assert started is not None
        tried.append(started[1].id)
        model_queue.release(0, started[1].id, mine)
        model_queue.failed(started[1].id, mine)
        model_queue.queue.requeue(0, mine)
    assert tried == [A, B, C, A]


# --- beyond the slots -------------------------------------------------------------------------------


def push_all(model_queue: ModelQueue, tenant: str, count: int) -> None:
    for number in range(count):
        model_queue.queue.push(0, work(f"{tenant}-{number}", tenant))


def start_all(model_queue: ModelQueue) -> list[str]:
    found: list[str] = []
    while (started := start(model_queue)) is not None:
        found.append(started[0])
    return found


def flooded(view: WorkerView, **terms) -> ModelQueue:
    """One worker whose slots one tenant has, with more of it waiting."""
    config = QueueTerms(worker_credit=0, external_concurrency=16, **terms)
    model_queue = ModelQueue(config, "m", 0, LeastLoaded(), AllHealthy())
    model_queue.set_worker(0, A, view)
    push_all(model_queue, "big", 40)
    assert len(start_all(model_queue)) == 16, "alone a tenant has every slot, and no more"
    return model_queue


def test_a_tenant_that_runs_nothing_is_started_although_all_slots_are_taken() -> None:
    model_queue = flooded(WorkerView(max_running=16))
    push_all(model_queue, "small", 20)
    assert start_all(model_queue) == ["small-0"], "its further ones are next when a slot is free"


def test_an_engine_is_given_so_many_streams_per_row_at_most() -> None:
    model_queue = flooded(WorkerView(max_running=16), extra_per_row=2)
    for number in range(40):
        push_all(model_queue, f"t{number:02}", 1)
    assert len(start_all(model_queue)) == 2 * 16


def test_an_external_worker_has_slots_that_are_kept_for_tenants_that_run_nothing() -> None:
    model_queue = flooded(WorkerView())
    for number in range(3):
        push_all(model_queue, f"t{number}", 2)
    assert start_all(model_queue) == ["t0-0", "t1-0"], "an eighth of 16 slots is two"


def test_also_within_the_rows_that_it_says_to_have() -> None:
    model_queue = ModelQueue(QueueTerms(), "m", 0, LeastLoaded(), AllHealthy())
    model_queue.set_worker(0, A, WorkerView(max_running=32, is_external=True))
    push_all(model_queue, "big", 40)
    assert len(start_all(model_queue)) == 30, "alone a tenant has all but those that are kept free"
    push_all(model_queue, "t0", 2)
    assert start_all(model_queue) == ["t0-0"]
    push_all(model_queue, "t1", 2)
    assert start_all(model_queue) == ["t1-0"]
    push_all(model_queue, "t2", 1)
    assert start_all(model_queue) == [], "its rows are all taken: who comes now waits for one stream to end"


def test_nothing_is_ahead_of_a_tenant_that_runs_nothing_while_it_may_start_beyond_the_slots() -> None:
    """Else admission would refuse it for a neighbour's backlog."""
    model_queue = flooded(WorkerView())

    def ahead(tenant: str) -> tuple[int, bool]:
        who = Tenant(id=TenantId(tenant))
        asked = RequestFacts(id=RequestId("asked"), tenant=who, route="m", prompt_tokens=1, max_tokens=1)
        load = model_queue.load(0, asked)
        return load.requests_ahead, load.wait_ns > 0

    assert ahead("big")[0] > 1
    assert ahead("t0") == (0, False)
    push_all(model_queue, "t0", 2)
    assert ahead("t0")[0] >= 2, "its own go before it"
    assert start_all(model_queue) == ["t0-0"]
    push_all(model_queue, "t1", 1)
    assert start_all(model_queue) == ["t1-0"]
    assert ahead("t2")[0] >= 1, "the slots that were kept are taken"


def test_also_beside_the_streams_of_other_gateways() -> None:
    model_queue = ModelQueue(QueueTerms(worker_credit=0), "m", 0, LeastLoaded(), AllHealthy())
    model_queue.set_worker(0, A, WorkerView(max_running=16, running=16, waiting=4))
    push_all(model_queue, "small", 20)
    assert start_all(model_queue) == ["small-0"]


def test_what_found_no_place_beyond_the_slots_may_still_wait_for_a_warm_worker() -> None:
    config = QueueTerms(worker_credit=0, extra_per_row=1)
    model_queue = ModelQueue(config, "m", 0, Warm(), AllHealthy())
    model_queue.set_worker(0, A, WorkerView(max_running=2, kv_blocks_total=10, kv_blocks_used=8))
    push_all(model_queue, "big", 2)
    assert start_all(model_queue) == ["big-0", "big-1"]
    large = work("warm-large", "other")
    large.blocks = 5
    model_queue.queue.push(0, large)
    assert start_all(model_queue) == [], "there is a row beyond the slots, but no memory"
    assert (large.hold_ns, large.takes_row) == (0, False)


# --- a worker that is kept free ---------------------------------------------------------------------


def test_what_passes_a_held_request_goes_by_the_same_rules_as_any_other() -> None:
    model_queue = ModelQueue(
        QueueTerms(worker_credit=0, kept_share=0, skip_s=1), "m", 0, LeastLoaded(), AllHealthy()
    )
    view = WorkerView(max_running=0, kv_blocks_total=10, terms=DeploymentTerms(rpm=2))
    model_queue.set_worker(0, A, view)
    model_queue.queue.push(0, work("runs"))
    assert start(model_queue) == ("runs", A)
    large, first = work("large"), work("first")
    large.blocks, first.band = 11, "priority"
    model_queue.queue.push(0, large)
    assert start(model_queue) is None
    now_ns = 2000 * NS_PER_MS
    model_queue.queue.push(now_ns, first)
    model_queue.leaving.add(first.id)
    assert start(model_queue, now_ns) is None, "its prompt is being made for another model"
    assert model_queue.held is large
    model_queue.leaving.clear()
    assert start(model_queue, now_ns) == ("first", A)
    again = work("again")
    again.band = "priority"
    model_queue.queue.push(now_ns, again)
    assert start(model_queue, now_ns) is None, "two requests a minute were started"


def kept_free(health: Blocking | None = None) -> tuple[ModelQueue, Work, WorkerId, int]:
    """A queue that keeps a worker free for a request that fits nowhere yet: which, and at what time."""
    queue = ModelQueue(
        QueueTerms(worker_credit=0, kept_share=0, skip_s=1), "m", 0, LeastLoaded(), health or AllHealthy()
    )
    for worker in (A, B):
        queue.set_worker(0, worker, WorkerView(max_running=2, kv_blocks_total=10))
    for name in ("runs-a", "runs-b"):
        small = work(name)
        small.blocks = 5
        queue.queue.push(0, small)
    assert start_all(queue) == ["runs-a", "runs-b"]
    large = work("large")
    large.blocks = 8
    queue.queue.push(0, large)
    assert start(queue) is None
    now_ns = 2000 * NS_PER_MS
    assert start(queue, now_ns) is None
    assert queue.held is large
    kept = queue.workers.held
    assert kept is not None
    return queue, large, kept.id, now_ns


def test_no_worker_is_kept_free_for_a_request_that_has_left() -> None:
    queue, large, kept, now_ns = kept_free()
    queue.queue.remove(large)
    queue.queue.push(now_ns, small := work("small"))
    small.blocks = 5
    assert start(queue, now_ns) is not None
    assert queue.held is None
    assert queue.workers.held is None, kept


def test_another_worker_is_kept_free_when_the_first_is_blocked() -> None:
    health = Blocking()
    queue, large, kept, now_ns = kept_free(health)
    health.workers = frozenset({kept})
    assert start(queue, now_ns) is None
    assert queue.held is large
    assert queue.workers.held is not None
    assert queue.workers.held.id == ({A, B} - {kept}).pop()


def test_nothing_is_kept_free_while_every_worker_is_blocked() -> None:
    health = Blocking()
    queue, large, _, now_ns = kept_free(health)
    health.workers = frozenset({A, B})
    assert start(queue, now_ns) is None
    assert queue.held is None
    health.workers = frozenset()
    assert start(queue, now_ns) is None
    assert queue.held is large


def test_a_start_on_a_worker_that_was_kept_free_is_a_decision_too() -> None:
    """So `penstock explain` tells it, of a stream too that waits long for its worker to come back."""
    log = DecisionLog(kept_max=8)
    router = Router("m", PlacementTerms(), lambda limit: 0, log=log)
    model_queue = ModelQueue(
        QueueTerms(worker_credit=0, kept_share=0, skip_s=1), "m", 0, router, AllHealthy()
    )
    for worker in (A, B):
        model_queue.set_worker(0, worker, WorkerView(max_running=2, kv_blocks_total=10))
    large = work("large")
    large.blocks = 8
    runs = [work("runs-a"), work("runs-b")]
    for each in runs:
        each.blocks = 5
        model_queue.queue.push(0, each)
    assert start_all(model_queue) == ["runs-a", "runs-b"]
    model_queue.queue.push(0, large)
    assert start(model_queue) is None
    now_ns = 2000 * NS_PER_MS
    assert start(model_queue, now_ns) is None
    assert (kept := model_queue.workers.held) is not None
    first = work("first")
    first.band = "priority"
    model_queue.queue.push(now_ns, first)
    assert start(model_queue, now_ns) is not None
    for each, worker in zip(runs, (log.of(each.id)[0].picked for each in runs), strict=True):
        assert worker is not None
        model_queue.release(now_ns, worker.worker, each)
    started = start(model_queue, now_ns)
    assert started is not None
    assert started[0] == "large"
    last = log.of(large.id)[-1]
    assert last.picked is not None
    assert last.picked.worker == started[1]
    assert explain(last)["replay"]["is_equal"]
    assert log.of(first.id)[-1].picked is not None
    assert kept.id in (A, B)


# --- a prompt that its worker has had for long ------------------------------------------------------


def test_a_worker_is_given_one_more_beside_a_prompt_that_has_waited_long_alone() -> None:
    backlog_ms = BACKLOG_SHARE * TTFT_TARGET_MS
    late_ns = round(OVERDUE * backlog_ms * NS_PER_MS) + 1
    model_queue = ModelQueue(CONFIG, "m", 0, LeastLoaded(), AllHealthy(), Pace(AdmissionConfig()))
    model_queue.set_worker(0, A, WorkerView(max_running=16))
    long, first, second = work("long"), work("first"), work("second")
    long.prompt_tokens = 8192
    model_queue.queue.push(0, long)
    assert model_queue.next_start(0) is not None
    for each in (first, second):
        model_queue.queue.push(1, each)
    assert model_queue.due_ns(1) == late_ns, "by then the worker may have room again"
    assert start(model_queue, late_ns) == ("first", A)
    model_queue.workers.look_again(A)
    assert start(model_queue, late_ns) is None, "two that wait there are a queue"
    model_queue.begin(late_ns, A, first)
    assert start(model_queue, late_ns) == ("second", A)


def test_a_wait_that_ends_before_the_promise_times_out_and_is_not_late() -> None:
    queue = make(views=(A,))
    for name in ("runs", "runs too"):
        queue.queue.push(0, work(name))
        assert start(queue) == (name, A)
    waits = work("waits")
    # Its client's word is shorter than the promise.
    waits.start_by_ns, waits.max_wait_ns = 2000 * NS_PER_MS, 1000 * NS_PER_MS
    queue.queue.push(10_000 * NS_PER_MS, waits)
    assert queue.next_expired(11_000 * NS_PER_MS - 1) is None
    assert queue.next_expired(11_000 * NS_PER_MS) == (waits, "timeout")
