import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.fleet import HealthConfig
from penstock.errors import (
    EngineFault,
    InvalidRequest,
    Overloaded,
    PenstockError,
    WorkerBusy,
    WorkerUnavailable,
)
from penstock.policy.resilience.health import FleetHealth
from penstock.policy.resilience.worker_state import BreakerState
from penstock.types import WorkerId

S, MS = NS_PER_S, NS_PER_MS
IDS = [WorkerId(f"w{i}") for i in range(4)]


def health(num_workers: int = 4) -> FleetHealth:
    made = FleetHealth(HealthConfig(), lambda: 0.0)
    for each in IDS[:num_workers]:
        made.worker("m", each, ready=True)
    return made


def fail(made: FleetHealth, worker: WorkerId, error: PenstockError, now_ns: int = 0) -> None:
    for _ in range(10):
        made.started(now_ns, "m", worker)
        made.ended(now_ns, "m", worker, error)


def test_who_fails_is_left_alone_for_this_model() -> None:
    made = health()
    made.worker("n", IDS[0], ready=True)
    made.worker("n", IDS[1], ready=True)
    fail(made, IDS[0], WorkerUnavailable("gone"))
    assert made.blocked(0, "m") == {IDS[0]}
    assert made.blocked(0, "n") == frozenset()
    assert made.due_ns("m") == 5 * S
    assert made.blocked(5 * S, "m") == frozenset()
    assert {worker: state for route, worker, state in made.states() if route == "m"}[
        IDS[0]
    ] is BreakerState.PROBING


def test_what_the_client_did_and_want_of_room_never_count() -> None:
    made = health()
    fail(made, IDS[0], InvalidRequest("no"))
    fail(made, IDS[0], Overloaded("full"))
    assert made.blocked(0, "m") == frozenset()
    fail(made, IDS[0], EngineFault("NaN"))
    assert made.blocked(0, "m") == {IDS[0]}


def test_more_than_half_is_panic_and_nobody_is_left_alone() -> None:
    made = health()
    for count, worker in enumerate(IDS[:3], 1):
        fail(made, worker, WorkerUnavailable("gone"))
        assert len(made.blocked(0, "m")) == (count if count <= 2 else 0)
    alone = health(1)
    fail(alone, IDS[0], WorkerUnavailable("gone"))
    assert alone.blocked(0, "m") == frozenset()


def test_only_those_that_are_ready_count() -> None:
    made = health(2)
    fail(made, IDS[0], WorkerUnavailable("gone"))
    assert made.blocked(0, "m") == {IDS[0]}
    made.worker("m", IDS[1], ready=False)
    assert made.blocked(0, "m") == frozenset(), "there is nobody else"
    made.worker("m", IDS[0], ready=None)
    assert made.due_ns("m") is None


def test_a_worker_that_turns_slow_by_itself_is_left_alone_and_a_fleet_that_does_is_not() -> None:
    def warm() -> FleetHealth:
        made = health()
        for i in range(20):
            for worker in IDS:
                made.began(i * S, "m", worker, 100 * MS)
        return made

    alone, all_of_them = warm(), warm()
    for i in range(10):
        alone.began(40 * S + i, "m", IDS[0], 3 * S)
        for worker in IDS:
            all_of_them.began(40 * S + i, "m", worker, 3 * S)
    assert alone.blocked(40 * S + 9, "m") == {IDS[0]}
    assert all_of_them.blocked(40 * S + 9, "m") == frozenset()


def test_a_load_that_grows_everywhere_opens_nobody_though_one_worker_shows_it_first() -> None:
    """Found by the simulator in `priority-overload`: of two workers one was left alone in the first second of
    an overload.
    """
    made = health(2)
    for i in range(3):  # Idle workers answer at once: that is what is usual.
        for worker in IDS[:2]:
            made.began(i, "m", worker, 270 * MS)
    for i in range(10):  # Then both have a backlog; one is above three times the usual, the other just below.
        made.began(S + i, "m", IDS[0], 2000 * MS)
        made.began(S + i, "m", IDS[1], 800 * MS)
    assert {state for _, _, state in made.states()} == {BreakerState.CLOSED}


@pytest.mark.parametrize("ready", [False, None])
def test_a_worker_that_is_not_there_makes_nobody_wait_for_its_breaker(ready: bool | None) -> None:
    """What was lost with a worker is told when it is gone: nothing of it may be left that is due for ever."""
    made = health()
    made.worker("m", IDS[0], ready=ready)
    fail(made, IDS[0], WorkerUnavailable("gone"))
    assert made.due_ns("m") is None
    assert made.blocked(10 * S, "m") == frozenset()


def test_a_worker_that_rests_is_told_of_where_that_is_asked_for() -> None:
    made = health()
    made.ended(0, "m", IDS[1], WorkerBusy("full", retry_after_s=6.0))
    fail(made, IDS[0], WorkerUnavailable("gone"))
    assert made.left_alone(0, "m").keys() == {IDS[0], IDS[1]}
    assert made.left_alone(0, "m", rests=False).keys() == {IDS[0]}


def test_a_worker_is_not_asked_before_the_time_that_it_named() -> None:
    made = health()
    made.ended(0, "m", IDS[1], WorkerBusy("full", retry_after_s=600.0))
    assert made.blocked(599 * S, "m") == {IDS[1]}
    assert made.blocked(600 * S, "m") == frozenset()
    made.ended(600 * S, "m", IDS[1], WorkerBusy("full", retry_after_s=1e6))
    assert made.due_ns("m") == 4200 * S, "an hour is long enough to believe it"
