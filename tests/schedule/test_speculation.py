"""How many drafts a row gets: as many as pay by the fitted law, and never more than fit."""

from random import Random

import pytest
from scheduled_engine import ScheduledEngine

from penstock.config.engine_settings import EngineSettings
from penstock.schedule.request import Request
from penstock.schedule.speculation import (
    CAUTIOUS,
    PROBE_STEPS,
    ROW_DRAFTS_MAX,
    STEP_DRAFTS_MAX,
    Speculation,
    learn,
)
from penstock.schedule.step_time import StepLoad, StepTimeModel
from penstock.types import RequestId, SamplingParams


def row(hits: int, misses: int, *, left: int = 100) -> Request:
    """A request that decodes, of whose drafts so many were right."""
    made = Request(request_id=RequestId("r"), tokens=[1] * 50, sampling=SamplingParams(max_tokens=left))
    made.first_token_ns, made.num_planned = 1, 49
    made.num_tokens_max = 50 + left
    for _ in range(misses):
        learn(made, 1, 0)
    for _ in range(hits):
        learn(made, 4, 4)
    return made


def law(fixed_ns: int, token_ns: int) -> StepTimeModel:
    """A machine whose steps take so long, and so much more for each token."""
    model = StepTimeModel()
    for num_rows in (1, 2, 4, 8, 16, 32) * 4:
        load = StepLoad(num_rows, num_rows, 50 * num_rows)
        model.observe(load, fixed_ns + token_ns * num_rows)
    return model


def chosen(model: StepTimeModel, rows: list[Request], room: int = 500) -> dict[int, int]:
    load = StepLoad(len(rows), len(rows), 50 * len(rows))
    return dict(Speculation(model, EngineSettings().draft_worth).choose(rows, load, room))


def test_a_lone_row_has_more_drafts_the_more_often_they_are_right() -> None:
    model = law(fixed_ns=10_000_000, token_ns=300_000)
    counts = [chosen(model, [row(hits, 10)]).get(0, 0) for hits in (0, 2, 6, 30)]
    assert counts == sorted(counts)
    assert counts[0] <= 2 < counts[-1] == ROW_DRAFTS_MAX


def test_drafts_end_where_tokens_cost_as_much_as_the_step_gives_for_them() -> None:
    """In a full batch a draft takes the time of a row's token: only rows that are nearly always right pay."""
    model = law(fixed_ns=1_000_000, token_ns=1_000_000)
    assert chosen(model, [row(3, 3) for _ in range(32)]) == {}
    assert chosen(model, [row(30, 0) for _ in range(32)]) == {}
    bandwidth = law(fixed_ns=50_000_000, token_ns=100_000)
    few = chosen(bandwidth, [row(30, 0) for _ in range(32)])
    assert sum(few.values()) == STEP_DRAFTS_MAX


def test_the_rows_that_are_right_most_often_come_first() -> None:
    model = law(fixed_ns=10_000_000, token_ns=300_000)
    found = chosen(model, [row(0, 9), row(30, 0), row(3, 3)], room=20)
    assert found[1] == ROW_DRAFTS_MAX
    assert found.get(0, 0) <= found.get(2, 0)
    assert sum(found.values()) <= 20


def test_no_draft_goes_past_the_end_of_the_answer() -> None:
    model = law(fixed_ns=10_000_000, token_ns=300_000)
    assert chosen(model, [row(30, 0, left=1)]) == {}
    assert chosen(model, [row(30, 0, left=4)]) == {0: 3}


def test_who_has_not_begun_to_answer_has_none() -> None:
    waiting = row(30, 0)
    waiting.first_token_ns = None
    assert chosen(law(10_000_000, 300_000), [waiting]) == {}


def test_a_row_without_drafts_has_one_now_and_then() -> None:
    model = law(fixed_ns=1_000_000, token_ns=1_000_000)
    for num_rows in (2, 8):
        rows = [row(0, 20) for _ in range(num_rows)]
        found = [chosen(model, rows) for _ in range(num_rows * PROBE_STEPS)]
        assert found[:-1] == [{}] * (num_rows * PROBE_STEPS - 1)
        assert found[-1] == dict.fromkeys(range(num_rows), 1)


def test_before_the_law_is_known_few_rows_have_few() -> None:
    assert chosen(StepTimeModel(), [row(0, 0)]) == {0: CAUTIOUS}
    assert chosen(StepTimeModel(), [row(0, 0) for _ in range(CAUTIOUS + 1)]) == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_without_drafts_in_fewer_steps(overlap: bool) -> None:
    """And wrong drafts count as rejected, and as nothing else."""
    counts: list[int] = []
    for guesses in (None, Random(1)):
        engine = ScheduledEngine(overlap=overlap, guesses=guesses)
        engine.submit("a", range(30), max_tokens=80, stop_token_ids=())
        engine.submit("b", range(7), max_tokens=80, seed=3)
        engine.run()
        for name in ("a", "b"):
            assert tuple(engine.got[name]) == engine.expected(name)
            usage = engine.ends[name].usage
            assert usage is not None
            assert usage.completion_tokens == 80
            assert usage.computed_tokens == usage.prompt_tokens + 79
            if guesses is None:
                assert (usage.accepted_drafts, usage.rejected_drafts) == (0, 0)
            else:
                assert 0 < usage.accepted_drafts < 80
                assert usage.rejected_drafts > 0
        counts.append(len(engine.plans))
    assert counts[1] < 0.8 * counts[0]


def test_a_stop_token_among_accepted_drafts_ends_the_answer_there() -> None:
    for seed in range(20):
        engine = ScheduledEngine(guesses=Random(seed))
        engine.submit("a", range(9), max_tokens=90, seed=seed, stop_token_ids=tuple(range(4)))
        engine.run()
        assert tuple(engine.got["a"]) == engine.expected("a")


def test_log_probabilities_are_told_one_by_one() -> None:
    engine = ScheduledEngine(guesses=Random(2))
    engine.submit("a", range(9), max_tokens=40, logprobs=0)
    told = 0
    while engine.plan() is not None:
        result = engine.runner.collect()
        engine.flights.clear()
        for output in engine.scheduler.apply(result).outputs:
            assert len(output.token_ids) == 1
            told += 1
    assert told == 40


def test_drafts_and_their_time_are_charged_to_who_has_them() -> None:
    """A row with drafts takes a larger part of its step."""
    engine = ScheduledEngine(guesses=Random(3))
    for name in ("a", "b"):
        engine.submit(name, range(9), max_tokens=60, seed=5)
    while engine.scheduler.has_work:
        engine.plan()
        flight, result = engine.scheduler.oldest, engine.runner.collect()
        engine.scheduler.count_drafts(result)
        before = [request.device_ns for request in flight.requests]
        assert engine.scheduler.share_time(1_000_000)
        shares = [request.device_ns - was for request, was in zip(flight.requests, before, strict=True)]
        assert sum(shares) <= 1_000_000
        if len(flight.drafted) == 2 and flight.drafted[0] != flight.drafted[1]:
            more = flight.drafted.index(max(flight.drafted))
            assert shares[more] > shares[1 - more]
        engine.flights.clear()
        engine.scheduler.apply(result)
