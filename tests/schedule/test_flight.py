"""What the requests of one step are charged of its time."""

from hypothesis import given
from hypothesis import strategies as st
from scheduled_engine import ScheduledEngine

from penstock.schedule.step import Flight, share_times
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
    share_times([(engine.scheduler.oldest, 1_000_000)])
    assert row.device_ns - before == 1_000_000 * weights[0] // sum(weights)
    assert chunk.device_ns == 1_000_000 * weights[1] // sum(weights)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 10**9))
def test_a_steps_time_is_divided_but_for_less_than_a_nanosecond_each(lengths, chunk, time_ns) -> None:
    engine = planned(lengths, chunk)
    before = sum(request.device_ns for request in engine.requests.values())
    share_times([(engine.scheduler.oldest, time_ns)])
    shared = sum(request.device_ns for request in engine.requests.values()) - before
    assert time_ns - len(engine.requests) < shared <= time_ns


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
    share_times([(engine.scheduler.oldest, time_ns)])
    shared = [
        engine.requests[name].device_ns - was for name, was in zip(("row", "prompt"), before, strict=True)
    ]
    assert shared == [time_ns * weight // sum(weights) for weight in weights]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**9), min_size=2, max_size=9),
)
def test_steps_of_the_same_rows_are_divided_at_once_as_they_are_one_by_one(lengths, times_ns) -> None:
    engine = planned(lengths, chunk=0)
    flights = list[Flight]()
    for _ in times_ns:
        flights.append(engine.scheduler.oldest)
        engine.finish_step()
        assert engine.plan() is not None
    steps, rows = list(zip(flights, times_ns, strict=True)), list(engine.requests.values())
    before = [request.device_ns for request in rows]
    for flight, time_ns in steps:
        flight.share(time_ns)
    one_by_one = [request.device_ns for request in rows]
    share_times(steps)
    at_once = [request.device_ns for request in rows]
    for was, each, all_of_them in zip(before, one_by_one, at_once, strict=True):
        assert 0 <= (all_of_them - each) - (each - was) < len(steps), "only rounding is another"
    assert sum(at_once) - sum(one_by_one) <= sum(times_ns)


def test_a_step_is_not_taken_for_the_next_of_one_that_it_does_again() -> None:
    """As where the first did not fit in memory."""
    engine = planned([10, 20], chunk=0)
    flight, rows = engine.scheduler.oldest, list(engine.requests.values())
    before = [request.device_ns for request in rows]
    flight.share(1000)
    once = [request.device_ns - was for request, was in zip(rows, before, strict=True)]
    share_times([(flight, 1000), (flight, 1000)])
    assert [request.device_ns - was for request, was in zip(rows, before, strict=True)] == [
        3 * each for each in once
    ]
