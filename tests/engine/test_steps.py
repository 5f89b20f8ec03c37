"""The figures of an engine's steps, counted several at a time."""

from scheduled_engine import ScheduledEngine

from penstock.engine.steps import NOTED_MAX, StepMeters
from penstock.planning.roofline import MODELS, CostFloor, Placed, accelerator
from penstock.schedule.step import StepShape
from penstock.types import BLOCK_TOKENS

PLACED = Placed(model=MODELS["0.5b"], device=accelerator("l4"))


def floor() -> CostFloor:
    return CostFloor(PLACED, rows=8, kv_tokens=64 * BLOCK_TOKENS)


def decoding(*names: str) -> ScheduledEngine:
    """These requests decode from the next step on."""
    engine = ScheduledEngine(num_blocks=128)
    for i, name in enumerate(names):
        engine.submit(name, range(1000 * i, 1000 * i + 20), max_tokens=50)
    engine.step()
    return engine


def step(engine: ScheduledEngine, meters: StepMeters, spent_ns: int | None) -> StepShape:
    """One step; what it was, in the law's terms."""
    assert engine.plan() is not None
    flight = engine.scheduler.oldest
    meters.step_over(flight, spent_ns, engine.kv.pool.num_used)
    shape = StepShape.of(flight.plan.work)
    engine.finish_step()
    return shape


def charged(engine: ScheduledEngine) -> int:
    return sum(request.device_ns for request in engine.requests.values())


def test_steps_are_counted_a_few_later_and_when_it_is_asked_for() -> None:
    engine, meters, alone = decoding("a", "b"), StepMeters(floor(), BLOCK_TOKENS), floor()
    for _ in range(NOTED_MAX - 1):
        alone.count(step(engine, meters, 1000))
    assert charged(engine) == meters.floor_ns == meters.memory_ns == 0
    alone.count(step(engine, meters, 1000))
    assert 0 <= NOTED_MAX * 1000 - charged(engine) < 2
    assert (meters.floor_ns, meters.memory_ns) == (int(alone.floor_ns), int(alone.memory_ns)) > (0, 0)
    step(engine, meters, 1000)
    meters.count()
    assert 0 <= (NOTED_MAX + 1) * 1000 - charged(engine) < 4
    meters.count()
    assert charged(engine) <= (NOTED_MAX + 1) * 1000, "no step is counted twice"
    assert meters.kv_held_tokens == (NOTED_MAX + 1) * 2 * 2 * BLOCK_TOKENS, "two blocks each"


def test_a_step_with_a_prompt_is_counted_at_once_and_with_it_those_before() -> None:
    """Who sends a long prompt and leaves with the first token has paid for it."""
    engine, meters = decoding("a"), StepMeters(None, BLOCK_TOKENS)
    step(engine, meters, 1000)
    engine.submit("b", range(5000, 5030), max_tokens=50)
    step(engine, meters, 1000)
    assert 0 <= 2000 - charged(engine) < 3
    assert engine.requests["b"].device_ns > 900 > engine.requests["a"].device_ns - 1000
    assert (meters.floor_ns, meters.memory_ns) == (0, 0), "nobody knows it of this device"


def test_the_time_of_requests_that_left_is_charged_to_nobody() -> None:
    engine, meters = decoding("a"), StepMeters(None, BLOCK_TOKENS)
    step(engine, meters, None)
    step(engine, meters, 1000)
    meters.count()
    assert charged(engine) == 1000


def test_a_step_that_computes_nothing_charges_those_of_the_next() -> None:
    """Its request waits for its prefix to come back from host memory."""
    engine, meters = ScheduledEngine(host_slots=8, num_blocks=8), StepMeters(floor(), BLOCK_TOKENS)
    engine.submit("a", range(64), max_tokens=2)
    engine.run()
    for _ in range(40):  # Idle for long enough to be stored.
        engine.clock.advance(1000)
        engine.step()
    engine.submit("b", range(500, 600), max_tokens=4)
    engine.run()
    engine.submit("c", range(64), max_tokens=2)
    num_steps = num_empty = 0
    while engine.scheduler.has_work:
        empty = not step(engine, meters, 1000).decode_rows
        num_steps += 1
        num_empty += empty and not charged(engine)
    meters.count()
    assert num_empty
    assert 0 <= num_steps * 1000 - charged(engine) < num_steps
