"""The checker is checked: every way in which a plan can be wrong must be noticed."""

import pytest
from checking_runner import CheckingRunner, expected_tokens

from penstock.schedule.plan import NewRow, RowWork, StepPlan
from penstock.types import RequestId, SamplingParams

PROMPT = tuple(range(20))
SAMPLING = SamplingParams(max_tokens=3)


def new(row: int, name: str = "a", tokens: tuple[int, ...] = PROMPT) -> NewRow:
    return NewRow(RequestId(name), row, tokens, len(tokens), SAMPLING)


def runner() -> CheckingRunner:
    """A runner with the first 18 tokens of `PROMPT` computed in row 0, blocks 0 and 1."""
    made = CheckingRunner(num_blocks=4, max_running=2)
    result = made.run(StepPlan(1, (new(0),), (RowWork(0, 0, 18, False, (0, 1)),)))
    assert result.sampled == ()
    return made


def test_a_right_plan_gives_the_expected_tokens() -> None:
    made = runner()
    tokens = [made.run(StepPlan(2, (), (RowWork(0, 18, 2, True),))).sampled[0].token_id]
    tokens += [made.run(StepPlan(n, (), (RowWork(0, n + 17, 1, True),))).sampled[0].token_id for n in (3, 4)]
    assert tuple(tokens) == expected_tokens(PROMPT, SAMPLING)


def test_a_right_prefix_hit_passes() -> None:
    made = runner()
    plan = StepPlan(2, (new(1, "b"),), (RowWork(1, 16, 4, True, (0, 2)),))
    assert made.run(plan).sampled[0].token_id == expected_tokens(PROMPT, SAMPLING)[0]


def test_broken_logits_are_an_error_of_that_row() -> None:
    made = runner()
    made.broken.add(RequestId("a"))
    (sampled,) = made.run(StepPlan(2, (), (RowWork(0, 18, 2, True),))).sampled
    assert sampled.error


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(2, (), (RowWork(0, 18, 1, True),)), "wrong token"),
        (StepPlan(2, (), (RowWork(0, 18, 2, False),)), "wrong token"),
        (StepPlan(2, (), (RowWork(0, 17, 3, True),)), "skipped or computed twice"),
        (StepPlan(2, (), (RowWork(0, 18, 3, True),)), "more tokens"),
        (StepPlan(2, (), (RowWork(0, 18, 0, False),)), "without work"),
        (StepPlan(2, (), (RowWork(0, 18, 1, False), RowWork(0, 19, 1, True))), "twice in one step"),
        (StepPlan(2, (new(0),), ()), "given away twice"),
        (StepPlan(2, (new(2),), ()), "out of bounds"),
        (StepPlan(2, (), (), (1,)), "was not in use"),
        (StepPlan(2, (new(1, "b"),), (RowWork(1, 0, 20, True, (2,)),)), "too short"),
        (StepPlan(2, (new(1, "b"),), (RowWork(1, 16, 4, True, (3, 2)),)), "foreign KV at 0"),
        (StepPlan(2, (new(1, "b", PROMPT[::-1]),), (RowWork(1, 16, 4, True, (0, 2)),)), "foreign KV at 0"),
        (
            StepPlan(2, (new(1, "b"),), (RowWork(0, 18, 2, True), RowWork(1, 0, 20, True, (2, 1)))),
            "same slot",
        ),
        (
            StepPlan(2, (new(1, "b"),), (RowWork(0, 18, 2, True), RowWork(1, 19, 1, True, (0, 1)))),
            "same slot",
        ),
    ],
)
def test_a_wrong_plan_is_caught(plan: StepPlan, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        runner().run(plan)


def test_reading_what_another_row_writes_in_the_same_step_is_caught() -> None:
    made = CheckingRunner(num_blocks=4, max_running=2)
    work = (RowWork(0, 0, 20, True, (0, 1)), RowWork(1, 16, 4, True, (0, 2)))
    with pytest.raises(AssertionError, match="same step"):
        made.run(StepPlan(1, (new(0), new(1, "b")), work))


def test_another_namespace_is_foreign() -> None:
    made = runner()
    made.salts[RequestId("b")] = b"bob"
    with pytest.raises(AssertionError, match="foreign KV"):
        made.run(StepPlan(2, (new(1, "b"),), (RowWork(1, 16, 4, True, (0, 2)),)))
