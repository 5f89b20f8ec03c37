"""Rows that decode beside prompts are counted together, and leave what they would have left one by one."""

from array import array

import pytest
from scheduled_engine import STEP_NS, ScheduledEngine

from penstock.schedule.plan import Sampled, StepResult
from penstock.types import FinishReason

STOP = 5


def token(request, place: int) -> int:
    """Of its answer: `STOP` at the tenth for some."""
    return (
        STOP if request.num_prompt % 3 == 0 and place == 10 else 100 + (7 * place + request.num_prompt) % 50
    )


def draw(requests, count: int) -> list[array]:
    return [array("i", [token(each, each.num_generated + i) for i in range(count)]) for each in requests]


def played(engine: ScheduledEngine, *, together: bool, listed: frozenset[int] = frozenset()):
    """To the end: what ended how, what is cached, and all counts. The steps of `listed` are listed after all,
    while they are in flight.
    """
    scheduler, ends, num_beside = engine.scheduler, {}, 0
    scheduler.decode_together(draw if together else None)
    for i in range(12):
        engine.submit(f"r{i}", range(100 * i, 100 * i + 17 + 10 * i), max_tokens=30, stop_token_ids=(STOP,))
    while scheduler.schedule() is not None:
        flight = scheduler.oldest
        num_beside += bool(flight.beside)
        if flight.plan.step in listed and together:
            scheduler.decode_together(None)
            assert not flight.beside
        scheduler.check_invariants()
        rows = {each.row: each for each in engine.requests.values() if each.row >= 0}
        sampled = [
            Sampled(work.row, token(rows[work.row], rows[work.row].num_generated))
            for work in flight.plan.work
            if work.samples
        ]
        engine.clock.advance(STEP_NS)
        for output in scheduler.apply(StepResult(flight.plan.step, tuple(sampled))).outputs:
            if output.finish is not None:
                ends[output.request_id] = (output.finish, output.stop_token_id, output.usage)
        scheduler.check_invariants()
        if together:
            scheduler.decode_together(draw)
    tokens = {name: request.tokens for name, request in engine.requests.items()}
    return (ends, tokens, scheduler.statistics(), engine.kv.pool.names()), num_beside


@pytest.mark.parametrize("num_blocks", [64, 11])
def test_both_ways_leave_the_same(num_blocks: int) -> None:
    kinds = {"num_blocks": num_blocks, "step_tokens": 24}
    one_by_one, none = played(ScheduledEngine(**kinds), together=False)
    together, num_beside = played(ScheduledEngine(**kinds), together=True)
    changed, _ = played(ScheduledEngine(**kinds), together=True, listed=frozenset(range(3, 60, 4)))
    assert none == 0 < num_beside
    assert together == one_by_one == changed
    ends, _, statistics, _ = together
    assert {reason for reason, _, _ in ends.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(ends) == 12
    assert bool(statistics.preemptions) == (num_blocks < 20)
