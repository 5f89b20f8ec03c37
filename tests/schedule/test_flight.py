"""What the requests of one step are charged of its time."""

from hypothesis import given
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.schedule.step_time import chunk_pairs
from penstock.types import TOKEN_WEIGHT


def planned(lengths: list[int], chunk: int) -> ScheduledEngine:
    """Rows that decode after prompts of these lengths, and a prompt of `chunk` tokens that joins them; one
    step is in flight.
    """
    engine = ScheduledEngine(step_tokens=256, num_blocks=128)
    for i, length in enumerate(lengths):
        engine.submit(f"row{i}", range(1000 * i, 1000 * i + length), max_tokens=50)
    while any(request.num_pending > 1 for request in engine.requests.values()):
        engine.step()
    if chunk:
        engine.submit("chunk", range(90_000, 90_000 + chunk), max_tokens=50)
    assert engine.plan() is not None
    return engine


def test_a_chunk_pays_for_its_tokens_and_what_each_of_them_reads() -> None:
    engine = planned([10], chunk=32)
    work = {item.row: item for item in engine.plans[-1].work}
    row, chunk = engine.requests["row0"], engine.requests["chunk"]
    read = work[row.row].num_computed + 1
    weights = TOKEN_WEIGHT + read, TOKEN_WEIGHT * 32 + chunk_pairs(0, 32)
    before = row.device_ns
    assert engine.scheduler.share_time(1_000_000)
    assert row.device_ns - before == 1_000_000 * weights[0] // sum(weights)
    assert chunk.device_ns == 1_000_000 * weights[1] // sum(weights)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 10**9))
def test_a_steps_time_is_divided_but_for_less_than_a_nanosecond_each(lengths, chunk, time_ns) -> None:
    engine = planned(lengths, chunk)
    before = sum(request.device_ns for request in engine.requests.values())
    assert engine.scheduler.share_time(time_ns)
    shared = sum(request.device_ns for request in engine.requests.values()) - before
    assert time_ns - len(engine.requests) < shared <= time_ns


def test_a_step_that_computes_nothing_charges_nobody() -> None:
    """Its request waits for its prefix to come back from host memory."""
    engine = ScheduledEngine(host_slots=8, num_blocks=8)
    engine.submit("a", range(64), max_tokens=2)
    engine.run()
    for _ in range(40):  # Idle for long enough to be stored.
        engine.clock.advance(1000)
        engine.step()
    engine.submit("b", range(500, 600), max_tokens=4)
    engine.run()
    engine.submit("c", range(64), max_tokens=2)
    seen_empty = False
    for _ in range(20):
        plan = engine.plan()
        if plan is None:
            break
        charged = engine.scheduler.share_time(1000)
        assert charged == bool(plan.work)
        seen_empty |= not plan.work
        engine.finish_step()
    assert seen_empty


def test_a_later_chunk_pays_for_what_it_reads_of_the_ones_before() -> None:
    engine = ScheduledEngine(step_tokens=32, num_blocks=128)
    engine.submit("row", range(10), max_tokens=50)
    engine.step()
    engine.submit("prompt", range(500, 600), max_tokens=50)
    engine.step()
    plan = engine.plan()
    assert plan is not None
    (row, chunk), time_ns = plan.work, 1_000_000
    assert chunk.num_computed > 0
    weights = (
        TOKEN_WEIGHT + row.num_computed + 1,
        TOKEN_WEIGHT * chunk.num_tokens + chunk_pairs(chunk.num_computed, chunk.num_tokens),
    )
    before = [engine.requests[name].device_ns for name in ("row", "prompt")]
    assert engine.scheduler.share_time(time_ns)
    shared = [
        engine.requests[name].device_ns - was for name, was in zip(("row", "prompt"), before, strict=True)
    ]
    assert shared == [time_ns * weight // sum(weights) for weight in weights]
