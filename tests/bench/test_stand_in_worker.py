"""The stand-in worker's batches: evenly spread, one step per period whatever the clock's grain, and tokens
that say when they were sent.
"""

import asyncio
import time
from pathlib import Path

import pytest

from bench.relay.stand_in_worker import Steps, Worker


def make(num_batches: int, period_s: float) -> Worker:
    async def inside() -> Worker:
        return Worker(period_s, num_batches, None)

    return asyncio.run(inside())


def test_batches_step_at_their_own_place_in_every_period() -> None:
    worker = make(4, 1.0)
    began_s = worker._began_s
    places = [worker._due_s(batch, began_s) - began_s for batch in worker._batches]
    assert places == pytest.approx([1.0, 0.25, 0.5, 0.75])


def test_a_batch_steps_once_per_period_also_where_the_clock_stands_just_before_its_time() -> None:
    worker = make(1, 0.2)
    (batch,) = worker._batches
    due_s = worker._due_s(batch, worker._began_s + 0.05)
    for number in range(2, 50):
        due_s = worker._due_s(batch, due_s - 0.0005)
        assert due_s - worker._began_s == pytest.approx(0.2 * number)
    late_s = worker._due_s(batch, due_s + 1.05)
    assert late_s - due_s == pytest.approx(1.2), "what was missed is not caught up"


def test_a_step_notes_when_its_token_was_sent_and_the_first_answers_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(b"".join(Steps.ENTRY.pack(text, token, 0.0) for text, token in ((b"ab", 7), (b"cd", 9))))
    steps = Steps(path, num_cut=50)
    before_us = time.monotonic_ns() / 1000
    assert [steps.take() for _ in range(3)] == [7, 9, 7]
    sent = [sent_us for _, _, sent_us in Steps.ENTRY.iter_unpack(path.read_bytes())]
    assert before_us <= sent[1] <= sent[0] <= time.monotonic_ns() / 1000
    cut = [steps.length(100) for _ in range(50)]
    assert min(cut) >= 1
    assert len(set(cut)) > 25
    assert steps.length(100) == 100
