from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_S, ManualClock
from penstock.fleet.launchers.supervised import RESTART_WINDOW_NS, RestartBudget, StallDetector


def test_restarts_wait_longer_each_time_until_there_are_none_left() -> None:
    budget = RestartBudget(4, ManualClock())
    assert [budget.take() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, None, None]


def test_a_restart_is_forgotten_after_ten_minutes() -> None:
    clock = ManualClock()
    budget = RestartBudget(1, clock)
    assert budget.take() == 0.25
    clock.advance(RESTART_WINDOW_NS - 1)
    assert budget.take() is None
    clock.advance(1)
    assert budget.take() == 0.25


@given(st.integers(0, 6), st.lists(st.integers(0, RESTART_WINDOW_NS), max_size=40))
def test_no_ten_minutes_have_more_restarts_than_the_bound(restarts_max: int, waits: list[int]) -> None:
    clock = ManualClock()
    budget, taken = RestartBudget(restarts_max, clock), []
    for wait in waits:
        clock.advance(wait)
        if budget.take() is not None:
            taken.append(clock.now_ns())
    for start in taken:
        assert sum(start <= each < start + RESTART_WINDOW_NS for each in taken) <= restarts_max


def test_work_without_progress_is_a_stall_after_the_timeout() -> None:
    clock = ManualClock()
    stall = StallDetector(10, clock)
    assert not stall.observe(3, has_work=True)
    clock.advance(10 * NS_PER_S - 1)
    assert not stall.observe(3, has_work=True)
    clock.advance(1)
    assert stall.observe(3, has_work=True)


def test_progress_and_idleness_start_the_watch_again() -> None:
    clock = ManualClock()
    stall = StallDetector(10, clock)
    for step, has_work in [(1, True), (2, True), (2, False), (2, True), (3, True)]:
        clock.advance(9 * NS_PER_S)
        assert not stall.observe(step, has_work=has_work)


def test_no_timeout_finds_no_stall() -> None:
    clock = ManualClock()
    stall = StallDetector(0, clock)
    clock.advance(RESTART_WINDOW_NS)
    assert not stall.observe(0, has_work=True)
