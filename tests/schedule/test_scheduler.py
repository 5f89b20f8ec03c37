"""Examples of every rule. test_scheduler_any_order.py has the random ones."""

import pytest
from scheduled_engine import STEP_NS, ScheduledEngine

from penstock.config.engine_settings import EngineSettings
from penstock.errors import ContextTooLong, InvalidRequest, Overloaded
from penstock.kv.cache.manager import blocks_for
from penstock.kv.hashing import token_array
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import RequestOutput, Sampled, StepPlan, StepResult
from penstock.schedule.request import Request
from penstock.types import BLOCK_TOKENS, FinishReason, RequestId, SamplingParams, TokenLogprob, Usage

STOP = 5


def shape(plan: StepPlan | None) -> list[tuple[int, int]]:
    """A plan as (num_computed, num_tokens) of each work item."""
    assert plan is not None
    return [(work.num_computed, work.num_tokens) for work in plan.work]


# --- the budget -----------------------------------------------------------------------------------


def test_an_idle_scheduler_plans_nothing() -> None:
    engine = ScheduledEngine()
    assert engine.plan() is None
    assert not engine.scheduler.has_work


def test_a_prompt_is_computed_in_chunks_and_the_last_one_samples() -> None:
    engine = ScheduledEngine(step_tokens=16)
    engine.submit("a", range(40), max_tokens=2)
    plans = [engine.step() for _ in range(4)]
    assert [shape(plan) for plan in plans] == [[(0, 16)], [(16, 16)], [(32, 8)], [(40, 1)]]
    assert [plan.work[0].samples for plan in plans if plan] == [False, False, True, True]
    assert engine.step() is None
    assert engine.ends["a"].finish is FinishReason.LENGTH


def test_decode_rows_come_first_then_running_prompts_then_new_ones() -> None:
    engine = ScheduledEngine(step_tokens=20)
    engine.submit("a", range(10), max_tokens=9)
    engine.step()
    engine.submit("b", range(100, 130))
    assert shape(engine.step()) == [(10, 1), (0, 19)]
    engine.submit("c", range(200, 220))
    assert shape(engine.step()) == [(11, 1), (19, 11), (0, 8)]
    assert shape(engine.step()) == [(12, 1), (30, 1), (8, 12)]


def test_decode_rows_are_never_skipped_even_if_they_take_the_whole_budget() -> None:
    engine = ScheduledEngine(step_tokens=4, max_running=8)
    for index in range(6):
        engine.submit(f"r{index}", [index], max_tokens=9)
    engine.step()
    for _ in range(5):
        plan = engine.step()
        assert len(shape(plan)) == 4
    engine.run()
    assert all(engine.got[name] == list(engine.expected(name)) for name in engine.requests)


def test_the_head_of_the_queue_is_not_skipped_for_a_shorter_prompt() -> None:
    engine = ScheduledEngine(num_blocks=8, step_tokens=128)
    engine.submit("a", range(60), max_tokens=20)
    engine.step()
    engine.submit("long", range(100, 170), max_tokens=3)  # 5 blocks; "a" holds 4 of 8.
    engine.submit("short", [1, 2, 3], max_tokens=3)
    for _ in range(10):
        assert len(shape(engine.step())) == 1
    engine.run()
    started = {name: request.started_ns for name, request in engine.requests.items()}
    assert started["long"] == started["short"] == 7 + 20 * STEP_NS


def test_priority_goes_before_arrival() -> None:
    engine = ScheduledEngine(max_running=1)
    for name, priority in (("low", 1), ("mid", 0), ("high", -1)):
        engine.submit(name, [priority + 5], priority=priority)
    engine.run()
    assert list(engine.ends) == ["high", "mid", "low"]


def test_limits_from_a_config_keep_decode_rows_within_the_budget() -> None:
    assert BatchLimits.of(EngineSettings(step_tokens=8, max_running=64), 100) == BatchLimits(8, 8, 100)
    assert BatchLimits.of(EngineSettings(step_tokens=512, max_running=64), 100) == BatchLimits(512, 64, 100)


# --- ends -----------------------------------------------------------------------------------------


def finish_with(engine: ScheduledEngine, *draws: Sampled) -> list[RequestOutput]:
    """Apply made-up draws, one per step."""
    outputs: list[RequestOutput] = []
    for draw in draws:
        plan = engine.scheduler.schedule()
        assert plan is not None
        outputs += engine.scheduler.apply(StepResult(plan.step, (draw,))).outputs
        engine.scheduler.check_invariants()
    return outputs


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(4), max_tokens=9, stop_token_ids=(STOP,))
    more, end = finish_with(
        engine, Sampled(0, 11, TokenLogprob(11, -1.0)), Sampled(0, STOP, TokenLogprob(STOP, -2.0))
    )
    assert more == RequestOutput(RequestId("a"), (11,), TokenLogprob(11, -1.0))
    assert (end.token_ids, end.logprob, end.finish, end.stop_token_id) == ((), None, FinishReason.STOP, STOP)
    assert end.usage is not None
    assert end.usage.completion_tokens == 2
    assert engine.plan() is None


def test_max_tokens_ends_the_answer_with_its_last_token() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(4), max_tokens=1)
    (end,) = finish_with(engine, Sampled(0, 11, TokenLogprob(11, -1.0)))
    assert (end.token_ids, end.logprob, end.finish) == ((11,), TokenLogprob(11, -1.0), FinishReason.LENGTH)
    assert end.stop_token_id is None


def test_the_context_ends_the_answer() -> None:
    engine = ScheduledEngine(max_model_len=10)
    engine.submit("a", range(7), max_tokens=500)
    engine.run()
    assert engine.ends["a"].finish is FinishReason.LENGTH
    assert len(engine.got["a"]) == 3


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(4), max_tokens=1, stop_token_ids=(STOP,))
    (end,) = finish_with(engine, Sampled(0, STOP))
    assert end.finish is FinishReason.STOP


def test_broken_logits_fail_that_request_alone_and_its_blocks_are_not_kept() -> None:
    engine = ScheduledEngine()
    engine.submit("good", range(40), max_tokens=5)
    engine.submit("bad", range(100, 140), max_tokens=5)
    engine.runner.broken.add(RequestId("bad"))
    engine.run()
    assert engine.ends["bad"].finish is FinishReason.ERROR
    assert engine.ends["bad"].error == "the logits are not numbers"
    assert engine.got["good"] == list(engine.expected("good"))
    probe = engine.kv.open(b"")
    assert engine.kv.match_prefix(probe, token_array(range(100, 140))).num_tokens == 0
    assert engine.kv.match_prefix(engine.kv.open(b""), token_array(range(40))).num_tokens == 32


def test_usage_divides_a_life_into_queue_prefill_and_decode() -> None:
    engine = ScheduledEngine(step_tokens=16, max_running=1)
    engine.submit("first", [1], max_tokens=3)
    engine.submit("a", range(40), max_tokens=4)
    engine.run()
    assert engine.ends["a"].usage == Usage(
        prompt_tokens=40,
        completion_tokens=4,
        queue_ns=3 * STEP_NS,
        prefill_ns=3 * STEP_NS,
        decode_ns=3 * STEP_NS,
        steps=6,
        computed_tokens=43,
        kv_block_ns=(1 + 2 + 3 + 3 + 3 + 3) * STEP_NS,
    )
    engine.submit("again", range(40), max_tokens=1)
    engine.run()
    assert engine.ends["again"].usage == Usage(
        prompt_tokens=40,
        completion_tokens=1,
        cached_tokens=32,
        prefill_ns=STEP_NS,
        steps=1,
        computed_tokens=8,
        kv_block_ns=3 * STEP_NS,
    )


def test_queueing_counts_from_when_the_request_arrived() -> None:
    engine = ScheduledEngine(max_running=1)
    engine.clock.advance(100)
    for name, arrived_ns in (("b", 60), ("a", 50)):
        request = Request(
            request_id=RequestId(name), tokens=token_array([1]), sampling=SamplingParams(max_tokens=1)
        )
        engine.scheduler.submit(request, arrived_ns=arrived_ns)
    while engine.step() is not None:
        pass
    assert list(engine.ends) == ["a", "b"]
    assert [end.usage.queue_ns for end in engine.ends.values() if end.usage] == [57, 47 + STEP_NS]


# --- refusals -------------------------------------------------------------------------------------


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = ScheduledEngine(num_blocks=4, max_model_len=100)
    engine.submit("a", [1])
    for name, prompt, max_tokens, error, message in (
        ("a", [1], 4, InvalidRequest, "already running"),
        ("b", [], 4, InvalidRequest, "empty"),
        ("b", [1], 0, InvalidRequest, "max_tokens"),
        ("b", range(100), 1, ContextTooLong, "the model takes 100"),
        ("b", range(70), 1, ContextTooLong, "which holds 64"),
        ("b", range(60), 6, ContextTooLong, "which holds 64"),
    ):
        with pytest.raises(error, match=message):
            engine.submit(name, prompt, max_tokens=max_tokens)
    engine.scheduler.check_invariants()
    assert engine.num_inside == len(engine.live) == 1


def test_a_request_that_just_fits_the_whole_pool_runs_alone() -> None:
    engine = ScheduledEngine(num_blocks=4, step_tokens=7)
    engine.submit("a", range(60), max_tokens=5)  # The 65th token is drawn but never stored.
    engine.submit("b", range(60), max_tokens=5)
    engine.run()
    assert engine.got["a"] == engine.got["b"] == list(engine.expected("a"))


def test_a_full_queue_refuses_and_forgets() -> None:
    engine = ScheduledEngine(max_waiting=1)
    engine.submit("a", [1])
    with pytest.raises(Overloaded):
        engine.submit("b", [2])
    engine.scheduler.check_invariants()
    engine.run()
    assert list(engine.ends) == ["a"]


# --- prefix cache and preemption ------------------------------------------------------------------


def test_a_shared_prefix_is_computed_once_per_tenant() -> None:
    engine = ScheduledEngine()
    prefix = list(range(48))
    for name, salt in (("a1", b"alice"), ("a2", b"alice"), ("b1", b"bob")):
        engine.submit(name, [*prefix, 90], salt=salt)
        engine.run()
    cached = {name: end.usage.cached_tokens for name, end in engine.ends.items() if end.usage}
    assert cached == {"a1": 0, "a2": 48, "b1": 0}
    assert engine.scheduler.statistics().cached_tokens == 48
    assert engine.scheduler.statistics().prompt_tokens == 3 * 49


def test_an_answer_is_cached_when_it_leaves_and_its_prompt_before() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(32), max_tokens=40)
    while len(engine.requests["a"].tokens) < 32 + 34:
        engine.step()
    assert len(engine.kv.pool.names()) == 2, "only the prompt's"
    engine.abort("a")
    assert len(engine.kv.pool.names()) == 4
    tokens = engine.requests["a"].tokens
    assert engine.kv.match_prefix(engine.kv.open(b""), tokens).num_tokens == 64


def test_what_ran_when_the_cache_was_cleared_is_not_cached() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(16), max_tokens=40)
    while len(engine.requests["a"].tokens) < 40:
        engine.step()
    engine.kv.clear_cache()
    engine.run()
    assert engine.kv.pool.names() == ()
    engine.submit("b", range(16), max_tokens=1)
    engine.run()
    assert len(engine.kv.pool.names()) == 1


def test_tenants_share_exactly_the_public_blocks() -> None:
    engine = ScheduledEngine()
    tokens = list(range(64))
    names = [
        ("a1", b"alice", 40),
        ("b1", b"bob", 40),
        ("b2", b"bob", 40),
        ("c1", b"carol", 0),
        ("d", b"", 64),
    ]
    for name, salt, public_tokens in names:
        engine.submit(name, [*tokens, 90], salt=salt, public_tokens=public_tokens)
        engine.run()
    cached = {name: end.usage.cached_tokens for name, end in engine.ends.items() if end.usage}
    assert cached == {"a1": 0, "b1": 32, "b2": 64, "c1": 0, "d": 32}


def test_blocks_run_out_and_the_last_that_came_is_preempted_and_resumes() -> None:
    engine = ScheduledEngine(num_blocks=8, step_tokens=32)
    for name, start in (("a", 0), ("b", 200)):
        engine.submit(name, range(start, start + 20), max_tokens=90)
    engine.step_until_preempted("b")
    assert engine.scheduler.statistics().preemptions == 1
    assert engine.requests["a"].num_preemptions == 0
    assert engine.plans[-1].freed_rows == (1,)
    assert len(engine.plans[-1].work) == 1
    engine.run()
    assert engine.got["a"] == list(engine.expected("a"))
    assert engine.got["b"] == list(engine.expected("b"))
    resumed = [new for plan in engine.plans for new in plan.new_rows if new.request_id == "b"][-1]
    assert len(resumed.token_ids) > 20  # What it had generated is known, and not generated again.
    assert resumed.num_prompt_tokens == 20
    end = engine.ends["b"].usage
    assert end is not None
    assert end.cached_tokens == 0  # Its own blocks, found again after the preemption, are no saving.


def test_the_lower_class_is_preempted_even_if_it_came_first() -> None:
    engine = ScheduledEngine(num_blocks=8, step_tokens=32)
    engine.submit("low", range(20), max_tokens=90, priority=1)
    engine.step()
    engine.submit("high", range(200, 220), max_tokens=90)
    engine.run()
    assert engine.requests["low"].num_preemptions > 0
    assert engine.requests["high"].num_preemptions == 0
    assert list(engine.ends) == ["high", "low"]


def test_a_victim_whose_work_was_planned_already_leaves_the_plan() -> None:
    engine = ScheduledEngine(num_blocks=7, step_tokens=2)
    engine.submit("low", range(8), max_tokens=90, priority=1)
    while not engine.got["low"]:
        engine.step()
    engine.submit("high", range(100, 160), max_tokens=3)
    engine.step_until_preempted("low")  # By a chunk of "high", after its own decode token was planned.
    assert shape(engine.plans[-1]) == [(48, 1)]
    assert len(shape(engine.plans[-2])) == 2
    assert engine.plans[-1].freed_rows == (0,)
    engine.run()
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)


def test_a_preempted_request_goes_before_who_came_later() -> None:
    engine = ScheduledEngine(num_blocks=8, step_tokens=32, max_running=2)
    engine.submit("a", range(20), max_tokens=90)
    engine.submit("b", range(200, 220), max_tokens=90)
    engine.step_until_preempted("b")
    engine.submit("c", [1])
    assert not engine.plans[-1].new_rows
    engine.run()
    entered = [new.request_id for plan in engine.plans for new in plan.new_rows]
    assert entered == ["a", "b", "b", "c"]


def test_admission_leaves_room_for_those_that_run() -> None:
    engine = ScheduledEngine(num_blocks=8)
    engine.submit("a", range(60), max_tokens=6)  # 4 blocks, and soon a fifth.
    engine.step()
    engine.submit("b", range(100, 160), max_tokens=2)  # Would take all 4 that are left.
    engine.step()
    assert engine.requests["b"].started_ns is None
    engine.run()
    assert engine.scheduler.statistics().preemptions == 0


def test_many_that_do_not_fit_together_all_end() -> None:
    engine = ScheduledEngine(num_blocks=10, step_tokens=24)
    for index in range(12):
        engine.submit(
            f"r{index}", range(index, index + 10 + 7 * (index % 5)), max_tokens=70, priority=index % 3
        )
    engine.run()
    assert engine.scheduler.statistics().preemptions > 3
    assert {name: tuple(tokens) for name, tokens in engine.got.items()} == {
        name: engine.expected(name) for name in engine.requests
    }


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("step_tokens", [1, 7, 16, 48, 1000])
@pytest.mark.parametrize("num_blocks", [7, 9, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_do_not_depend_on_batch_chunk_cache_overlap_or_preemption(
    prefix_cache: bool, step_tokens: int, num_blocks: int, overlap: bool
) -> None:
    engine = ScheduledEngine(
        num_blocks=num_blocks, step_tokens=step_tokens, prefix_cache=prefix_cache, overlap=overlap
    )
    for index in range(6):
        engine.submit(f"r{index}", [3] * 33 + [index // 2] * 5, max_tokens=60, seed=index)
    engine.run()
    assert all(tuple(engine.got[name]) == engine.expected(name) for name in engine.requests)
    assert (engine.scheduler.statistics().preemptions > 0) == (num_blocks < 100 and step_tokens > 1)


# --- abort ----------------------------------------------------------------------------------------


def test_abort_while_waiting() -> None:
    engine = ScheduledEngine(max_running=1)
    engine.submit("a", [1])
    engine.submit("b", [2])
    engine.step()
    engine.clock.advance(5)
    output = engine.abort("b")
    assert output is not None
    assert output.finish is FinishReason.ABORT
    assert output.usage == Usage(prompt_tokens=1, queue_ns=STEP_NS + 5)
    engine.run()
    assert list(engine.ends) == ["b", "a"]
    assert not engine.got["b"]


def test_abort_while_running_frees_its_blocks_at_once() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(30))
    engine.step()
    assert engine.kv.statistics().used == 2
    assert engine.abort("a") is not None
    assert engine.kv.statistics().used == 0
    assert engine.plan() is None


def test_abort_in_flight_keeps_the_blocks_until_the_step_is_over() -> None:
    engine = ScheduledEngine()
    engine.submit("a", range(30))
    engine.submit("b", range(100, 130), max_tokens=2)
    engine.plan()
    assert engine.abort("a") is not None
    engine.scheduler.check_invariants()
    assert engine.kv.statistics().used == 2
    assert engine.kv.statistics().draining == 2  # The step still writes them.
    engine.finish_step()
    assert engine.kv.statistics().draining == 0
    plan = engine.step()
    assert plan is not None
    assert plan.freed_rows == (0,)
    assert not engine.got["a"]
    engine.run()


def test_abort_of_a_preempted_request() -> None:
    engine = ScheduledEngine(num_blocks=8)
    engine.submit("a", range(20), max_tokens=90)
    engine.submit("b", range(200, 220), max_tokens=90)
    engine.step_until_preempted("b")
    engine.abort("b")
    assert engine.num_inside == len(engine.live) == 1
    engine.run()
    assert engine.got["b"] == list(engine.expected("b"))[: len(engine.got["b"])]


def test_abort_of_what_is_unknown_or_over_changes_nothing() -> None:
    engine = ScheduledEngine()
    assert engine.abort("nobody") is None
    engine.submit("a", [1], max_tokens=1)
    engine.run()
    assert engine.abort("a") is None


def test_an_id_may_be_used_again_after_its_end() -> None:
    engine = ScheduledEngine()
    engine.submit("a", [1])
    engine.plan()
    engine.abort("a")
    sampling = SamplingParams(max_tokens=2)
    engine.scheduler.submit(Request(request_id=RequestId("a"), tokens=token_array([1, 2]), sampling=sampling))
    engine.ends.clear()
    engine.finish_step()
    engine.run()
    assert engine.ends["a"].finish is FinishReason.LENGTH


# --- misuse is a bug ------------------------------------------------------------------------------


def test_two_plans_are_in_flight_at_most_and_come_back_in_order() -> None:
    engine = ScheduledEngine()
    with pytest.raises(AssertionError, match="no plan"):
        engine.scheduler.apply(StepResult(1, ()))
    engine.submit("a", [1], max_tokens=5)
    engine.plan()
    engine.plan()
    with pytest.raises(AssertionError, match="in flight"):
        engine.scheduler.schedule()
    with pytest.raises(AssertionError):
        engine.scheduler.apply(StepResult(2, (Sampled(0, 1),)))


@pytest.mark.parametrize("sampled", [(Sampled(1, 1),), (Sampled(0, 1), Sampled(1, 1))])
def test_a_result_that_is_not_the_plans_is_refused(sampled: tuple[Sampled, ...]) -> None:
    engine = ScheduledEngine()
    engine.submit("a", [1], max_tokens=5)
    engine.plan()
    with pytest.raises(AssertionError):
        engine.scheduler.apply(StepResult(1, sampled))


def test_statistics_add_up() -> None:
    engine = ScheduledEngine(max_running=1)
    engine.submit("a", range(20), max_tokens=3)
    engine.submit("b", range(20), max_tokens=3)
    engine.step()
    now = engine.scheduler.statistics()
    assert (now.step, now.running, now.waiting) == (1, 1, 1)
    assert (now.blocks_total, now.blocks_used, now.blocks_cached) == (64, 2, 0)
    engine.run()
    now = engine.scheduler.statistics()
    assert (now.running, now.waiting, now.prompt_tokens, now.cached_tokens) == (0, 0, 40, 16)
    assert now.generated_tokens == sum(
        end.usage.completion_tokens for end in engine.ends.values() if end.usage
    )


def test_steps_done_at_once_take_a_block_for_each_that_begins_one() -> None:
    """Also where the last of them does."""
    for count in range(1, 2 * BLOCK_TOKENS + 2):
        engine = ScheduledEngine()
        engine.submit("a", range(20), max_tokens=90)
        engine.step()
        request, start_ns = engine.requests["a"], engine.clock.now_ns()
        assert engine.scheduler.fast_forward_max(count) == count
        engine.clock.advance(count * STEP_NS)
        times_ns = [start_ns + step * STEP_NS for step in range(count + 1)]
        engine.scheduler.fast_forward(times_ns, lambda rows, num: [token_array([1] * num) for _ in rows])
        assert request.num_planned == 20 + count
        assert len(request.table.blocks) == blocks_for(20 + count)
        engine.scheduler.check_invariants()
