"""How many requests run at once under a target per output token, on a scripted machine."""

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.clock import NS_PER_MS
from penstock.kv.hashing import token_array
from penstock.schedule.plan import StepPlan
from penstock.schedule.prefill_budget import UNTRUSTED_ROWS, LatencyTargets
from penstock.schedule.step_time import StepCost, StepLoad

LAW = StepCost(fixed_ns=6_000_000, token_ns=100_000, sequence_ns=900_000, kv_read_ns=100, pair_ns=0)
"""A row costs a millisecond: 30 of them and the fixed part are 36 ms, and their contexts come on top."""


class SlowRows(ScheduledEngine):
    """Steps take what `LAW` says, times `slowness`."""

    slowness = 1.0

    def __init__(self, **fields) -> None:
        sizes = {"num_blocks": 4000, "step_tokens": 512, "max_running": 64, "max_model_len": 20_000}
        super().__init__(**sizes, **fields, max_waiting=1000, check_every=20)

    def finish_step(self) -> None:
        assert self.in_flight is not None
        self.clock.advance(self.time_of(self.in_flight))
        super().finish_step()

    def time_of(self, plan: StepPlan) -> int:
        return round(LAW.predict_ns(StepLoad.of(plan.work)) * self.slowness)

    def taught(self) -> "SlowRows":
        """It has run batches of some sizes before."""
        for count in (1, 2, 4, 8):
            for index in range(count):
                self.submit(f"warm{count}.{index}", [index] * 20, max_tokens=40)
            self.run()
        return self

    def rows_over(self, steps: int) -> list[int]:
        return [len(self.step().work) for _ in range(steps)]


def tpot(target_ms: float, **fields) -> LatencyTargets:
    return LatencyTargets(tpot_ns=round(target_ms * NS_PER_MS), **fields)


def flood(engine: SlowRows, count: int = 100, max_tokens: int = 400, **fields) -> None:
    for index in range(count):
        engine.submit(f"r{index}", [index] * 20, max_tokens=max_tokens, **fields)


def test_as_many_run_as_keep_the_target_and_the_others_wait() -> None:
    engine = SlowRows(targets=tpot(40)).taught()
    flood(engine)
    engine.rows_over(60)
    times = [engine.time_of(engine.step()) for _ in range(100)]
    assert max(times) <= 40 * NS_PER_MS
    assert mean(times) > 0.8 * 40 * NS_PER_MS  # No fewer than need be.
    now = engine.scheduler.statistics()
    assert 25 <= now.running <= 30
    assert now.waiting == 100 - now.running
    assert now.rows_max == pytest.approx(now.running, abs=3)


def test_without_a_target_every_row_is_used() -> None:
    engine = SlowRows().taught()
    flood(engine)
    engine.rows_over(60)
    now = engine.scheduler.statistics()
    assert (now.running, now.rows_max) == (64, 64)


def test_a_target_that_does_not_bind_changes_no_step() -> None:
    plans = []
    for targets in (LatencyTargets(), tpot(1000)):
        engine = SlowRows(targets=targets).taught()
        flood(engine, max_tokens=60)
        engine.run()
        plans.append([each.work for each in engine.plans])
    assert plans[0] == plans[1]


def test_no_target_is_less_than_what_the_machine_can_keep() -> None:
    """Two and a half times a lone row's 7 ms: less would end batching, for the sake of a promise that is
    broken anyway.
    """
    engine = SlowRows(targets=tpot(1)).taught()
    flood(engine)
    engine.rows_over(60)
    assert 7 <= engine.scheduler.statistics().running <= 11


def test_one_request_runs_whatever_it_costs() -> None:
    engine = SlowRows(targets=tpot(1))
    engine.submit("long", [1] * 15_000, max_tokens=300)
    engine.run()
    assert tuple(engine.got["long"]) == engine.expected("long")


def test_who_waits_starts_when_one_ends_or_is_aborted() -> None:
    engine = SlowRows(targets=tpot(20)).taught()
    flood(engine, 30, max_tokens=2000)
    engine.rows_over(80)
    before = engine.scheduler.statistics().running
    assert before < 30
    running = [name for name in engine.got if engine.got[name] and name in engine.live]
    for name in running[:3]:
        engine.abort(name)
    engine.rows_over(20)
    assert engine.scheduler.statistics().running == pytest.approx(before, abs=1)


def test_steps_done_at_once_count_for_who_waits_to_ask_again() -> None:
    engine = SlowRows(targets=tpot(20)).taught()
    flood(engine, 30, max_tokens=2000)
    engine.rows_over(80)
    while not (left := engine.scheduler.fast_forward_max(1000)):
        engine.step()
    for count in range(1, left + 1):
        began_ns = engine.clock.now_ns()
        engine.clock.advance(20 * NS_PER_MS)
        times_ns = [began_ns, engine.clock.now_ns()]
        engine.scheduler.fast_forward(times_ns, lambda rows, num: [token_array([1] * num) for _ in rows])
        assert engine.scheduler.fast_forward_max(1000) == left - count


def test_on_an_unknown_machine_the_batch_grows_step_by_step() -> None:
    engine = SlowRows(targets=tpot(40))
    flood(engine, max_tokens=3000)
    rows = engine.rows_over(40)
    assert rows[0] <= UNTRUSTED_ROWS + 1
    assert rows[4] <= 2 * UNTRUSTED_ROWS
    assert max(rows) <= 30
    assert rows[-1] >= 20


def test_a_machine_that_slows_down_is_given_less() -> None:
    engine = SlowRows(targets=tpot(40)).taught()
    flood(engine, 300, max_tokens=100)
    before = mean(engine.rows_over(300)[200:])
    engine.slowness = 1.5
    engine.rows_over(300)
    times = [engine.time_of(engine.step()) for _ in range(100)]
    assert mean(times) <= 40 * NS_PER_MS
    assert mean(engine.rows_over(20)) < 0.8 * before


def test_the_strictest_class_that_runs_decides_and_one_that_waits_does_not() -> None:
    targets = LatencyTargets(default_ns=0, by_priority=((-1, 20_000_000),), tpot_ns=50_000_000)
    engine = SlowRows(targets=targets).taught()
    flood(engine, 80, max_tokens=2000)
    engine.rows_over(60)
    assert engine.scheduler.statistics().running > 30
    for index in range(3):
        engine.submit(f"strict{index}", [7 + index] * 20, max_tokens=400, priority=-1)
    engine.abort(next(name for name in engine.got if engine.got[name] and name in engine.live))
    while not engine.got["strict0"]:
        engine.step()  # The place that became free is its own, whatever the others make of its pace.
    assert engine.scheduler.statistics().running > 30
    for name in list(engine.live):
        if name[0] == "r" and engine.got[name]:
            engine.abort(name)  # And nobody takes theirs until its own target is kept.
    engine.rows_over(60)
    assert engine.got["strict2"]
    assert engine.scheduler.statistics().running <= 13
    assert engine.time_of(engine.step()) <= 20 * NS_PER_MS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=40),
    st.floats(1, 60),
    st.booleans(),
)
def test_everyone_is_answered_as_without_a_target(requests, target_ms, overlap) -> None:
    engine = SlowRows(targets=tpot(target_ms), overlap=overlap)
    for index, (prompt, answer, pause) in enumerate(requests):
        engine.submit(f"r{index}", [index % 50] * prompt, max_tokens=answer)
        for _ in range(pause):
            engine.step()
            now = engine.scheduler.statistics()
            assert now.running or not now.waiting, "somebody waits for nothing"
    engine.run(5000)
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)
