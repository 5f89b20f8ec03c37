"""A prompt of 131,072 tokens: what a step costs the host depends on the step, not on how long the context is.

Work is counted in executed lines of Python, so that a busy machine changes nothing.
"""

import sys
from collections.abc import Callable

import pytest

from penstock.clock import ManualClock
from penstock.kv.cache.manager import KVManager
from penstock.kv.hashing import BlockHasher, token_array
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import Sampled, StepPlan, StepResult
from penstock.schedule.queue import FCFSQueue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.types import RequestId, SamplingParams

LENGTH = 131_072
STEP_TOKENS = 2048


class CountingHasher(BlockHasher):
    """Counts the blocks that it hashes."""

    num_blocks = 0

    def extend(self, parent, tokens):
        hashes = super().extend(parent, tokens)
        self.num_blocks += len(hashes)
        return hashes


class Engine:
    def __init__(self) -> None:
        self.hasher = CountingHasher(key=bytes(32), identity="m float32")
        manager = KVManager.with_prefix_cache(2 * LENGTH // 16 + 64, self.hasher)
        self.clock = ManualClock()
        limits = BatchLimits(step_tokens=STEP_TOKENS, max_running=8, max_model_len=LENGTH + 1000)
        self.scheduler = Scheduler(limits, manager, self.clock, FCFSQueue(10))

    def submit(self, name: str, tokens, max_tokens: int = 300) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(request_id=RequestId(name), tokens=token_array(tokens), sampling=sampling)
        self.scheduler.submit(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.clock.advance(1_000_000 + 1000 * plan.num_tokens)
        self.scheduler.apply(
            StepResult(plan.step, tuple(Sampled(work.row, 7) for work in plan.work if work.samples))
        )
        return plan

    def decode_until(self, request: Request) -> None:
        while request.num_pending > 1 or not request.num_computed:
            self.step()


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes: every turn of a loop counts."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [index % 977 for index in range(LENGTH)]


def test_every_block_is_hashed_once_and_every_token_is_told_once(prompt) -> None:
    engine = Engine()
    request = engine.submit("long", prompt)
    plans = []
    while request.num_pending > 1 or not request.num_computed:
        plans.append(engine.step())
    assert len(plans) == LENGTH // STEP_TOKENS
    assert engine.hasher.num_blocks == LENGTH // 16
    assert sum(len(plan.new_rows) for plan in plans) == 1
    assert len(plans[0].new_rows[0].token_ids) == LENGTH
    assert sum(len(work.new_blocks) for plan in plans for work in plan.work) == LENGTH // 16
    engine.scheduler.check_invariants()


def test_a_chunk_costs_the_same_at_the_end_of_the_context_as_at_its_beginning(prompt) -> None:
    engine = Engine()
    request = engine.submit("long", prompt)
    engine.step()
    early = [lines_of(engine.step) for _ in range(5)]
    while request.num_computed < LENGTH - 8 * STEP_TOKENS:
        engine.step()
    late = [lines_of(engine.step) for _ in range(5)]
    assert max(late) < 1.05 * max(early)


def test_a_decode_step_costs_the_same_at_any_length(prompt) -> None:
    counts = []
    for tokens in (prompt[:1024], prompt):
        engine = Engine()
        engine.decode_until(engine.submit("r", tokens))
        counts.append(sum(lines_of(engine.step) for _ in range(64)))
    assert counts[1] < 1.05 * counts[0]


def test_a_long_prompt_that_waits_costs_nothing_per_step(prompt) -> None:
    """Looking its prefix up again in every step would be 8,192 blocks a time."""
    engine = Engine()
    engine.decode_until(engine.submit("first", prompt, max_tokens=900))
    engine.decode_until(engine.submit("other", reversed(prompt), max_tokens=200))
    alone = sum(lines_of(engine.step) for _ in range(16))
    waiting = engine.submit("waiting", [*prompt[: LENGTH // 2], *reversed(prompt[: LENGTH // 2 - 1])])
    engine.step()
    beside = sum(lines_of(engine.step) for _ in range(16))
    assert waiting.started_ns is None  # Half of it would be hits, and there is no room for the other half.
    assert beside < 1.5 * alone


def test_coming_back_after_a_preemption_is_a_hit_of_the_whole_prompt(prompt) -> None:
    engine = Engine()
    engine.decode_until(engine.submit("first", prompt, max_tokens=2))
    while engine.scheduler.has_work:
        engine.step()
    again = engine.submit("again", [*prompt, 3], max_tokens=2)
    hashed = engine.hasher.num_blocks
    engine.step()
    assert again.num_cached == LENGTH
    assert engine.hasher.num_blocks == hashed + LENGTH // 16  # Its own chain, once.
