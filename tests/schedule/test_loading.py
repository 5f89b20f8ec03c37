"""Requests whose prefix comes back from host memory."""

import pytest
from scheduled_engine import IDLE_NS, ScheduledEngine

from penstock.schedule.request import Status
from penstock.types import FinishReason

PROMPT = tuple(range(40))
OTHER = tuple(range(100, 140))


def engine_with_idle_session(**limits: int) -> ScheduledEngine:
    """PROMPT and its answer are in host memory, and nowhere else."""
    engine = ScheduledEngine(**{"host_slots": 16, "num_blocks": 8} | limits)
    engine.submit("first", PROMPT)
    engine.run()
    engine.clock.advance(IDLE_NS)
    engine.run()
    assert engine.scheduler.statistics().host.stores == 2
    evict_all(engine)
    return engine


def evict_all(engine: ScheduledEngine) -> None:
    pool = engine.kv.pool
    pool.free(pool.allocate(pool.num_available) or ())


def test_an_idle_session_moves_without_any_request() -> None:
    engine = ScheduledEngine(host_slots=16)
    assert engine.scheduler.due_ns is None
    engine.submit("a", PROMPT)
    engine.run()
    ended_ns = engine.clock.now_ns()
    assert engine.scheduler.due_ns == ended_ns - 1000 + IDLE_NS, "since the last step was planned"
    assert engine.step() is None
    engine.clock.advance(IDLE_NS)
    plan = engine.step()
    assert plan is not None
    assert (plan.work, len(plan.copies_out)) == ((), 2)
    assert engine.scheduler.statistics().host.stores == 1, "waiting ends with the first copy"
    engine.run()
    assert engine.scheduler.statistics().host.stores == 2
    assert engine.scheduler.due_ns is None


def test_a_prefix_in_host_memory_is_loaded_and_then_hit() -> None:
    engine = engine_with_idle_session()
    engine.submit("again", PROMPT)
    plan = engine.plan()
    assert plan is not None
    assert plan.work == ()
    assert len(plan.copies_in) == 2
    assert plan.new_rows[0].blocks == tuple(copy.block for copy in plan.copies_in)
    assert engine.requests["again"].status is Status.LOADING
    engine.finish_step()
    engine.run()
    assert engine.got["again"] == list(engine.expected("again"))
    usage = engine.ends["again"].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.host_cached_tokens) == (32, 32)
    now = engine.scheduler.statistics()
    assert (now.cached_tokens, now.host_cached_tokens, now.host.loads) == (32, 32, 2)


def test_public_blocks_come_back_from_host_memory_for_every_tenant_and_nothing_after_them() -> None:
    engine = ScheduledEngine(host_slots=16, num_blocks=8)
    engine.submit("first", PROMPT, salt=b"alice", public_tokens=20)
    engine.run()
    engine.clock.advance(IDLE_NS)
    engine.run()
    for name, salt, cached in (("same", b"alice", 32), ("other", b"bob", 16)):
        evict_all(engine)
        engine.submit(name, PROMPT, salt=salt, public_tokens=20)
        engine.run()
        usage = engine.ends[name].usage
        assert usage is not None
        assert (usage.cached_tokens, usage.host_cached_tokens) == (cached, cached)


def test_the_other_tenant_gets_nothing_from_host_memory() -> None:
    engine = ScheduledEngine(host_slots=16, num_blocks=8)
    engine.submit("first", PROMPT, salt=b"alice")
    engine.run()
    engine.clock.advance(IDLE_NS)
    engine.run()
    for name, salt, cached in (("same", b"alice", 32), ("other", b"bob", 0)):
        evict_all(engine)
        engine.submit(name, PROMPT, salt=salt)
        engine.run()
        usage = engine.ends[name].usage
        assert usage is not None
        assert (usage.cached_tokens, usage.host_cached_tokens) == (cached, cached)


def test_loading_does_not_hold_others_up() -> None:
    engine = engine_with_idle_session(num_blocks=16)
    engine.runner.copy_steps = 50
    engine.submit("running", OTHER, max_tokens=3)
    engine.submit("loading", PROMPT)
    engine.submit("behind", range(200, 230), max_tokens=3)
    for _ in range(4):
        engine.step()
    assert set(engine.ends) == {"first", "running", "behind"}
    assert engine.requests["loading"].status is Status.LOADING
    engine.run()
    assert engine.got["loading"] == list(engine.expected("loading"))


def test_a_failed_copy_means_computing() -> None:
    engine = engine_with_idle_session()
    engine.runner.broken_slots = set(range(16))
    engine.submit("again", PROMPT)
    engine.run()
    assert engine.got["again"] == list(engine.expected("again"))
    usage = engine.ends["again"].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.host_cached_tokens) == (0, 0)
    now = engine.scheduler.statistics()
    assert (now.host.failures, now.preemptions, now.cached_tokens) == (2, 0, 0)


@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_while_loading(in_flight: bool) -> None:
    engine = engine_with_idle_session()
    engine.runner.copy_steps = 3
    engine.submit("again", PROMPT)
    engine.submit("running", OTHER, max_tokens=2)
    engine.plan()
    if not in_flight:
        engine.finish_step()
        assert engine.requests["again"].status is Status.LOADING
    output = engine.abort("again")
    assert output is not None
    assert output.finish is FinishReason.ABORT
    if in_flight:
        engine.finish_step()
    engine.scheduler.check_invariants()
    engine.run()
    engine.submit("third", PROMPT)
    engine.run()
    assert engine.got["third"] == list(engine.expected("third"))


def test_a_loading_request_gives_way_to_one_that_runs() -> None:
    engine = engine_with_idle_session(num_blocks=7)
    engine.runner.copy_steps = 100
    engine.submit("running", OTHER, max_tokens=60)
    engine.step()
    engine.submit("loading", PROMPT)
    engine.step()
    assert engine.requests["loading"].status is Status.LOADING
    engine.step_until_preempted("loading")
    engine.run()
    for name in ("running", "loading"):
        assert engine.got[name] == list(engine.expected(name))


def test_a_head_that_finds_no_room_waits_for_copies_that_nobody_awaits() -> None:
    engine = engine_with_idle_session(num_blocks=3)
    engine.runner.copy_steps = 10
    engine.submit("loading", PROMPT, max_tokens=1)
    engine.step()
    engine.abort("loading")
    engine.submit("next", OTHER, max_tokens=1)
    engine.run()
    assert engine.got["next"] == list(engine.expected("next"))


def test_preempted_work_comes_back_from_host_memory() -> None:
    """The copy is done before the others have taken the blocks: then nothing of it is computed again."""
    engine = ScheduledEngine(num_blocks=9, host_slots=16)
    engine.submit("first", PROMPT, max_tokens=80)
    engine.submit("second", OTHER, max_tokens=80)
    engine.step_until_preempted("second")
    engine.run()
    assert engine.scheduler.statistics().host.loads > 0
    for name in ("first", "second"):
        assert engine.got[name] == list(engine.expected(name))


def test_two_of_one_tenant_share_a_load() -> None:
    engine = engine_with_idle_session()
    engine.submit("one", PROMPT, seed=1)
    engine.submit("two", PROMPT, seed=2)
    engine.run()
    assert engine.scheduler.statistics().host.loads == 2
    for name in ("one", "two"):
        assert engine.got[name] == list(engine.expected(name))
        usage = engine.ends[name].usage
        assert usage is not None
        assert usage.host_cached_tokens == 32
