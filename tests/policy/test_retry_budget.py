from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.config.fleet import HealthConfig
from penstock.errors import WorkerUnavailable
from penstock.policy.resilience.health import FleetHealth, RetryBudget, RetryTerms
from penstock.rng import stream
from penstock.types import WorkerId

S = NS_PER_S


def test_a_tenth_of_the_successes_beside_a_floor() -> None:
    budget = RetryBudget(RetryTerms(floor_per_s=3))
    assert [budget.take(0) for _ in range(4)] == [True, True, True, False]
    for _ in range(20):
        budget.succeeded()
    assert [budget.take(0) for _ in range(3)] == [True, True, False]
    assert [budget.take(2 * S) for _ in range(4)] == [True, True, True, False], "a second's worth, not two"


def test_good_times_save_up_so_much_and_no_more() -> None:
    budget = RetryBudget(RetryTerms(saved_max=5))
    for _ in range(1000):
        budget.succeeded()
    assert budget.level(0) == 5


def test_no_share_and_no_floor_grants_nothing() -> None:
    budget = RetryBudget(RetryTerms(share=0.0, floor_per_s=0))
    budget.succeeded()
    assert not budget.take(100 * S)


@given(st.lists(st.tuples(st.sampled_from("sr"), st.integers(0, S)), max_size=200), st.integers(0, 5))
def test_over_any_time_retries_are_bounded(events: list[tuple[str, int]], floor: int) -> None:
    budget, now, successes, granted = RetryBudget(RetryTerms(floor_per_s=floor)), 0, 0, 0
    for kind, ns in events:
        now += ns
        if kind == "s":
            successes += 1
            budget.succeeded()
        else:
            granted += budget.take(now)
    assert granted <= floor + floor * now / S + 0.1 * successes + 1e-6


@given(seed=st.integers(0, 2**32 - 1), workers=st.integers(3, 12))
@settings(max_examples=20, deadline=None)
def test_with_three_of_ten_workers_failing_the_offered_load_is_at_most_a_tenth_more(
    seed: int, workers: int
) -> None:
    """A minute, a hundred requests a second, placed at random on workers that are not blocked; each failure
    asks for a retry.
    """
    random = stream(seed, "failing")
    health = FleetHealth(HealthConfig(), random.random)
    ids = [WorkerId(f"w{i}") for i in range(workers)]
    failing = set(ids[: max(1, workers * 3 // 10)])
    for each in ids:
        health.worker("m", each, ready=True)
    requests = attempts = now = lost = 0
    while now < 60 * S:
        now += S // 100
        requests += 1
        tried = set[WorkerId]()
        while True:
            blocked = health.blocked(now, "m") | tried
            worker = random.choice([each for each in ids if each not in blocked] or ids)
            attempts += 1
            health.started(now, "m", worker)
            if worker not in failing:
                health.began(now, "m", worker, 50_000_000)
                health.ended(now, "m", worker, None)
                health.succeeded()
                break
            health.ended(now, "m", worker, WorkerUnavailable("gone"))
            tried.add(worker)
            if len(tried) > 2 or not health.may_retry(now):
                lost += 1
                break
    assert attempts <= 1.1 * requests + 3
    assert lost <= 0.02 * requests, "nearly all are saved, for breakers keep the rest away"
