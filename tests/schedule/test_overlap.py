"""Two plans in flight: what is planned on tokens that are not known yet, and what becomes of it."""

import pytest
from scheduled_engine import ScheduledEngine

from penstock.kv.hashing import token_array
from penstock.schedule.batch import GROW_AFTER_STEPS, StepCap
from penstock.types import FinishReason, RequestId


def stop_of(engine: ScheduledEngine, name: str, index: int) -> int:
    """The token that will be drawn at `index` of the answer; it is drawn nowhere before."""
    expected = engine.expected(name)
    assert expected.index(expected[index]) == index
    return expected[index]


def stopping_engine(index: int, length: int = 20, **settings: object) -> ScheduledEngine:
    """An engine with request "a", whose stop token is drawn at `index` of its answer."""
    probe = ScheduledEngine()
    probe.submit("a", range(length), max_tokens=index + 1)
    engine = ScheduledEngine(overlap=True, **settings)
    engine.submit("a", range(length), max_tokens=90, stop_token_ids=(stop_of(probe, "a", index),))
    return engine


def test_a_row_that_samples_is_planned_one_more_token_before_that_is_known() -> None:
    engine = ScheduledEngine(step_tokens=16)
    engine.submit("a", range(20), max_tokens=9)
    engine.plan()
    second = engine.plan()
    assert [(work.num_computed, work.num_tokens, work.samples) for work in second.work] == [(16, 4, True)]
    engine.finish_step()
    third = engine.plan()
    assert [(work.num_computed, work.num_tokens, work.samples) for work in third.work] == [(20, 1, True)]
    assert not third.new_rows
    assert len(engine.requests["a"].tokens) == 20, "its input is not known here"


def test_nothing_is_planned_past_the_last_token() -> None:
    engine = ScheduledEngine(overlap=True)
    engine.submit("a", range(4), max_tokens=3)
    engine.run()
    assert sum(plan.num_tokens for plan in engine.plans) == 4 + 2
    assert engine.ends["a"].finish is FinishReason.LENGTH


def test_the_token_behind_a_stop_is_dropped_and_counts_nowhere() -> None:
    engine = stopping_engine(index=5)
    engine.run()
    end = engine.ends["a"]
    assert end.finish is FinishReason.STOP
    assert end.usage.completion_tokens == 6
    assert engine.got["a"] == list(engine.expected("a"))
    assert engine.scheduler.statistics().generated_tokens == 6
    assert sum(plan.num_tokens for plan in engine.plans) == 20 + 6, "one token was computed for nothing"


def test_a_block_that_a_dropped_token_completes_is_not_published() -> None:
    """The prompt and 12 tokens fill two blocks; the twelfth is the stop, and the step behind it stores it."""
    engine = stopping_engine(index=11)
    engine.run()
    request = engine.requests["a"]
    assert len(request.tokens) == 32
    assert engine.kv.statistics().cached == 1
    hits = engine.kv.match_prefix(engine.kv.open(b""), token_array([*request.tokens, 1]))
    assert hits.num_tokens == 16


def test_blocks_of_a_stopped_request_wait_for_the_step_that_still_uses_them() -> None:
    engine = stopping_engine(index=5)
    engine.submit("b", range(100, 110), max_tokens=60)
    while "a" not in engine.ends:
        engine.step()
    assert engine.kv.statistics().draining == 2
    engine.finish_step()
    assert engine.kv.statistics().draining == 0


def test_a_new_request_may_hit_blocks_that_drain() -> None:
    engine = stopping_engine(index=5, length=40)
    while "a" not in engine.ends:
        engine.step()
    engine.submit("b", range(40), max_tokens=60)
    engine.plan()
    assert engine.ends["a"].usage.completion_tokens == 6
    engine.run()
    assert engine.ends["b"].usage.cached_tokens == 32


def test_the_row_of_who_ended_has_its_next_request_while_its_last_step_is_in_flight() -> None:
    engine = stopping_engine(index=5, max_running=1)
    engine.submit("b", range(100, 110), max_tokens=3)
    engine.run()
    assert [new.row for plan in engine.plans for new in plan.new_rows] == [0, 0]
    assert engine.got["b"] == list(engine.expected("b"))


def test_abort_with_two_steps_in_flight() -> None:
    engine = ScheduledEngine(overlap=True)
    engine.submit("a", range(30), max_tokens=50)
    engine.submit("b", range(100, 130), max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.plan()
    assert len(engine.flights) == 2
    reported = len(engine.got["a"])
    output = engine.abort("a")
    assert output is not None
    assert output.usage.completion_tokens == reported
    assert engine.kv.statistics().draining == 3
    engine.finish_step()
    assert engine.kv.statistics().draining == 3, "the second step uses them too"
    engine.run()
    assert len(engine.got["a"]) == reported
    assert engine.got["b"] == list(engine.expected("b"))


def test_a_preemption_waits_until_nothing_is_in_flight() -> None:
    engine = ScheduledEngine(num_blocks=8, overlap=True)
    for name, start in (("a", 0), ("b", 200)):
        engine.submit(name, range(start, start + 20), max_tokens=90)
    before = 0
    while not before:
        assert engine.step() is not None
        before = engine.scheduler.statistics().preemptions
    # Every token that "b" drew is known, and all its full blocks can be found again.
    victim = engine.requests["b"]
    assert tuple(victim.tokens[20:]) == tuple(engine.got["b"])
    hits = engine.kv.match_prefix(victim.table, victim.tokens)
    assert (
        hits.num_tokens >= (len(victim.tokens) - 1) // 16 * 16 - 16
    )  # The first one in order needed one of them.
    engine.run()
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)


def test_broken_logits_with_a_step_in_flight_keep_no_blocks() -> None:
    engine = ScheduledEngine(overlap=True)
    engine.submit("bad", range(40), max_tokens=30)
    engine.submit("good", range(100, 140), max_tokens=30)
    for _ in range(3):
        engine.step()
    engine.runner.broken.add(RequestId("bad"))
    engine.run()
    assert engine.ends["bad"].finish is FinishReason.ERROR
    assert engine.kv.match_prefix(engine.kv.open(b""), token_array(range(40))).num_tokens == 0
    assert engine.got["good"] == list(engine.expected("good"))


# --- steps that do not fit the memory ---------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_does_not_fit_is_done_again_in_smaller_ones(overlap: bool) -> None:
    engine = ScheduledEngine(overlap=overlap, step_tokens=64)
    engine.runner.step_tokens_max = 10
    for index in range(3):
        engine.submit(f"r{index}", range(index, index + 50), max_tokens=20)
    engine.run()
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)
    assert max(plan.num_tokens for plan in engine.plans) == 64, "that is what was tried"


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_do_not_fit_one_step_are_preempted_and_end_later(overlap: bool) -> None:
    engine = ScheduledEngine(overlap=overlap)
    for index in range(6):
        engine.submit(f"r{index}", [index] * 20, max_tokens=30)
    for _ in range(3):
        engine.step()
    engine.runner.step_tokens_max = 2
    engine.run()
    assert engine.scheduler.statistics().preemptions >= 3
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)


def test_what_does_not_fit_alone_fails_and_the_engine_goes_on() -> None:
    engine = ScheduledEngine(overlap=True)
    engine.submit("a", range(20), max_tokens=50)
    for _ in range(3):
        engine.step()
    engine.runner.step_tokens_max = 0
    engine.submit("b", range(100, 120), max_tokens=5)
    while "a" not in engine.ends:
        engine.step()
    assert engine.ends["a"].finish is FinishReason.ERROR
    assert engine.ends["a"].error == "the engine is out of memory: as told"
    engine.runner.step_tokens_max = 100
    engine.run()
    assert engine.got["b"] == list(engine.expected("b"))


def test_an_abort_while_a_step_fails() -> None:
    engine = ScheduledEngine(overlap=True)
    engine.submit("a", range(30), max_tokens=9)
    engine.submit("b", range(100, 130), max_tokens=9)
    engine.runner.step_tokens_max = 1
    engine.plan()
    engine.plan()
    engine.abort("a")
    engine.runner.step_tokens_max = 100
    engine.run()
    assert engine.got["b"] == list(engine.expected("b"))


def test_the_cap_grows_again_when_memory_was_enough_for_a_while() -> None:
    cap = StepCap(64)
    assert cap.step_failed(50)
    assert cap.tokens == 25
    for _ in range(GROW_AFTER_STEPS - 1):
        cap.step_fitted()
    assert cap.tokens == 25
    cap.step_fitted()
    assert cap.tokens == 50
    for _ in range(GROW_AFTER_STEPS):
        cap.step_fitted()
    assert cap.tokens == 64
    assert not cap.step_failed(1)
    assert cap.tokens == 1


def test_prompts_wait_with_the_row_that_waits_for_memory() -> None:
    """A row that decodes needs a block and there is none: the step in flight ends before one gives way. No
    prompt takes a part of the plan in between.
    """
    engine = ScheduledEngine(
        num_blocks=12, step_tokens=5, max_running=4, max_model_len=192, overlap=True, prefix_cache=False
    )
    engine.submit("waits", [0] * 16, max_tokens=96)
    engine.submit("decodes", [1] * 13, max_tokens=96)
    while len(engine.got["decodes"]) < 2:
        engine.step()
    engine.submit("prompt", [2] * 99, max_tokens=8)
    waits, decodes, prompt = (engine.requests[name] for name in ("waits", "decodes", "prompt"))
    rows = {waits.row, decodes.row}
    while rows <= (planned := {work.row for work in engine.plans[-1].work}):
        engine.step()
    assert prompt.num_computed < prompt.num_prompt, "it still computes its prompt"
    assert planned == {decodes.row}
    engine.run()
    assert set(engine.ends) == {"waits", "decodes", "prompt"}
