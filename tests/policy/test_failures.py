"""Flow control with its health parts: what fails is tried elsewhere, within bounds, and what kills is not
passed on.
"""

from penstock.clock import NS_PER_S
from penstock.errors import CrashingRequest, InvalidRequest, PenstockError, StreamBroken, WorkerUnavailable
from penstock.policy.extras.quarantine import Quarantine, QuarantineTerms, fingerprint
from penstock.policy.flow import Outcome, Refused, RequestFacts, Requeued, Start
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.request import Evict, Settled
from penstock.policy.resilience.health import FleetHealth, HealthTerms, RetryTerms
from penstock.policy.terms import QueueTerms
from penstock.types import RequestId, Usage, WorkerId

S = NS_PER_S
W, V, U = WorkerId("w"), WorkerId("v"), WorkerId("u")
GONE = WorkerUnavailable("gone")


def control(*workers: WorkerId, slots: int = 100, **health) -> FlowControl:
    quarantine = health.pop("quarantine", QuarantineTerms())
    parts = Policies(health=FleetHealth(HealthTerms(**health), lambda: 0.0), poison=Quarantine(quarantine))
    made = FlowControl(QueueTerms(worker_credit=0, retries_max=2), parts)
    for worker in workers:
        made.set_worker(0, "m", worker, WorkerView(max_running=slots))
    return made


def accept(made: FlowControl, name: str, now_ns: int = 0, prompt: tuple[int, ...] = ()) -> None:
    made.arrive(now_ns, arrival(name, prompt))


def arrival(name: str, prompt: tuple[int, ...] = ()) -> RequestFacts:
    return RequestFacts(
        id=RequestId(name), route="m", prompt_tokens=32, max_tokens=10, prompts=(prompt,) if prompt else ()
    )


def starts(made: FlowControl, now_ns: int = 0) -> dict[str, WorkerId]:
    return {each.id: each.worker_id for each in made.dispatch(now_ns) if isinstance(each, Start)}


def finish(made: FlowControl, name: str, now_ns: int = 0) -> None:
    made.ended(now_ns, RequestId(name), Outcome.FINISHED, Usage(completion_tokens=1), finish_reason="stop")


def test_a_worker_that_fails_is_left_alone_then_probed_by_one() -> None:
    made = control(W, V, U, retry=RetryTerms(floor_per_s=100))
    for i in range(30):
        accept(made, f"r{i}")
    placed = starts(made)
    for name, worker in placed.items():
        if worker == W:
            made.failed(0, RequestId(name), GONE, retry=False)
        else:
            finish(made, name)
    for i in range(6):
        accept(made, f"s{i}")
    assert W not in starts(made, S).values()
    for i in range(6):
        accept(made, f"t{i}", 6 * S)
    assert list(starts(made, 6 * S).values()).count(W) == 1


def test_what_waits_for_a_worker_that_is_left_alone_has_a_time_to_be_looked_at() -> None:
    made = control(W, V, slots=10)
    for i in range(20):
        accept(made, f"r{i}")
    for name, worker in starts(made).items():
        if worker == W:
            made.failed(0, RequestId(name), GONE, retry=False)
    accept(made, "waits")
    assert starts(made) == {}, "v is full and w is left alone"
    assert made.next_ns(0) == 5 * S
    assert starts(made, 5 * S) == {"waits": W}


def test_retries_are_granted_while_the_budget_lasts() -> None:
    made = control(W, V, retry=RetryTerms(floor_per_s=1))
    for name in ("a", "b"):
        accept(made, name)
    starts(made)
    assert isinstance(made.failed(0, RequestId("a"), GONE, retry=True), Requeued)
    refused = made.failed(0, RequestId("b"), GONE, retry=True)
    assert isinstance(refused, Settled)
    assert refused.request.error == "WorkerUnavailable"


def test_moving_a_stream_takes_nothing_of_the_retry_budget() -> None:
    made = control(W, V, retry=RetryTerms(floor_per_s=0, share=0.0))
    accept(made, "a")
    starts(made)
    made.first_output(0, RequestId("a"))
    assert isinstance(made.failed(0, RequestId("a"), StreamBroken("gone"), retry=True), Requeued)


def test_a_stream_that_moves_waits_for_a_worker_that_can_go_on_with_it() -> None:
    made = control(W)
    made.set_worker(0, "m", V, WorkerView(max_running=100, resumes=False))
    made.set_worker(0, "m", U, WorkerView(max_running=100, resumes=False))
    for i in range(9):
        accept(made, f"r{i}")
    mine = next(name for name, worker in starts(made).items() if worker == W)
    made.first_output(0, RequestId(mine))
    made.set_worker(0, "m", W, WorkerView(ready=False))
    assert isinstance(made.failed(0, RequestId(mine), StreamBroken("gone"), retry=True), Requeued)
    accept(made, "new")
    assert starts(made).keys() == {"new"}, "the others would have to refuse it"
    made.set_worker(S, "m", W, WorkerView(max_running=100))
    assert starts(made, S) == {mine: W}


def test_a_stream_that_moves_goes_on_only_where_the_same_is_computed() -> None:
    """One name, two identities: at a worker of the other one its next tokens would not be those that were
    promised.
    """
    made = control()
    made.set_worker(0, "m", W, WorkerView(max_running=100, identity="one"))
    made.set_worker(0, "m", V, WorkerView(max_running=100, identity="two"))
    for i in range(4):
        accept(made, f"r{i}")
    mine = next(name for name, worker in starts(made).items() if worker == W)
    made.first_output(0, RequestId(mine))
    made.set_worker(0, "m", W, None)
    assert isinstance(made.failed(0, RequestId(mine), StreamBroken("gone"), retry=True), Requeued)
    accept(made, "new")
    assert starts(made) == {"new": V}
    made.set_worker(0, "m", U, WorkerView(max_running=100, identity="two"))
    assert starts(made) == {}
    made.set_worker(S, "m", W, WorkerView(max_running=100, identity="one"))
    assert starts(made, S) == {mine: W}


def test_what_had_not_begun_may_start_again_at_any_worker() -> None:
    made = control(retry=RetryTerms(floor_per_s=100))
    made.set_worker(0, "m", W, WorkerView(max_running=100, identity="one"))
    accept(made, "a")
    assert starts(made) == {"a": W}
    made.set_worker(0, "m", W, None)
    made.set_worker(0, "m", V, WorkerView(max_running=100, identity="two"))
    assert isinstance(made.failed(0, RequestId("a"), GONE, retry=True), Requeued)
    assert starts(made) == {"a": V}


def test_a_clients_own_fault_is_nobodys_failure() -> None:
    made = control(W, V)
    for i in range(40):
        accept(made, f"r{i}")
        starts(made)
        made.ended(0, RequestId(f"r{i}"), Outcome.FAILED, error="InvalidRequest", fault=InvalidRequest("no"))
    accept(made, "next")
    accept(made, "and next")
    assert set(starts(made).values()) == {W, V}


def died() -> PenstockError:
    return StreamBroken("the worker closed the connection", died=True)


def test_a_request_that_killed_two_workers_does_not_reach_the_third_and_is_refused_for_a_while() -> None:
    made = control(W, V, U, quarantine=QuarantineTerms(refuse_s=60))
    accept(made, "a", prompt=(6, 6, 6))
    for now_ns in (0, S):
        (worker,) = starts(made, now_ns).values()
        made.first_output(now_ns, RequestId("a"))
        made.set_worker(now_ns, "m", worker, None)
        made.failed(now_ns, RequestId("a"), died(), retry=True)
    (evict,) = made.dispatch(S)
    assert isinstance(evict, Evict)
    assert (evict.reason, type(evict.error)) == ("quarantine", CrashingRequest)
    again = made.arrive(2 * S, arrival("b", (6, 6, 6)))
    assert isinstance(again, Refused)
    assert (again.reason, str(again.error)) == (
        "quarantine",
        "Workers have ended while they computed this prompt. It is refused for another 59 s.",
    )
    accept(made, "c", 2 * S, prompt=(6, 6, 7))
    assert starts(made, 2 * S) == {"c": U}
    accept(made, "d", 62 * S, prompt=(6, 6, 6))
    assert starts(made, 62 * S) == {"d": U}


def test_workers_that_are_killed_under_load_convict_nobody() -> None:
    made = control(W, V, U)
    for i in range(30):
        accept(made, f"r{i}", prompt=(i,))
    running = starts(made)
    for worker in (W, V):
        made.set_worker(0, "m", worker, None)
        for name in [name for name, where in running.items() if where == worker]:
            made.first_output(0, RequestId(name))
            made.failed(0, RequestId(name), died(), retry=True)
        answers = made.dispatch(0)
        assert all(isinstance(each, Start) for each in answers)
        running |= {each.id: each.worker_id for each in answers}
    assert set(running.values()) == {U}


def test_fingerprints_keep_tenants_models_and_prompts_apart() -> None:
    from msgspec.structs import replace

    one = RequestFacts(id=RequestId("a"), route="m", prompt_tokens=2, max_tokens=1, prompts=((1, 2), (3,)))
    others = [
        replace(one, route="n"),
        replace(one, prompts=((1,), (2, 3))),
        replace(one, prompts=((1, 2), (4,))),
    ]
    assert len({fingerprint(each) for each in [one, replace(one, id=RequestId("b")), *others]}) == 4
    assert fingerprint(replace(one, prompts=())) is None


def test_the_quarantine_is_there_from_the_first_crash_on_and_for_every_model() -> None:
    made = control(W, V)
    made.set_worker(0, "other", W, WorkerView(max_running=1))
    accept(made, "r0", prompt=(1, 2))
    starts(made)
    made.failed(0, RequestId("r0"), GONE, retry=True)
    assert made.model_queue("m").apart is None, "a connection was lost, and no process ended"
    starts(made)
    made.failed(0, RequestId("r0"), WorkerUnavailable("ended", died=True), retry=True)
    made.dispatch(0)
    apart = made.model_queue("m").apart
    assert apart is not None
    assert apart is made.model_queue("other").apart
    assert apart.is_apart(RequestId("r0"))
