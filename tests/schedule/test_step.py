import pytest

from penstock.kv.cache.block_pool import Epoch
from penstock.kv.hashing import token_array
from penstock.schedule.plan import NewRow, RowWork
from penstock.schedule.request import Request
from penstock.schedule.step import StepBuilder
from penstock.types import RequestId, SamplingParams


def make(row: int, num_computed: int = 0) -> Request:
    request = Request(
        request_id=RequestId(f"r{row}"), tokens=token_array(range(10)), sampling=SamplingParams()
    )
    request.row = row
    request.restart_from(num_computed)
    return request


def test_work_is_taken_from_the_budget_and_samples_at_the_last_token() -> None:
    step = StepBuilder(12, 64)
    assert step.is_empty
    step.add(make(0, 9), 1, ())
    step.add(make(1, 0), 6, (4,))
    step.add_new(make(2, 6), 4, (2, 3))
    assert step.budget == 1
    flight = step.build(7, (5,), Epoch(3))
    plan = flight.plan
    assert [request.row for request in flight.requests] == [0, 1, 2]
    assert plan.work == (
        RowWork(0, 9, 1, True),
        RowWork(1, 0, 6, False, (4,)),
        RowWork(2, 6, 4, True, (2, 3)),
    )
    assert plan.new_rows == (NewRow(RequestId("r2"), 2, token_array(range(10)), 10, SamplingParams()),)
    assert (plan.step, plan.freed_rows, plan.num_tokens) == (7, (5,), 11)


def test_dropped_work_gives_its_budget_back() -> None:
    step = StepBuilder(12, 64)
    keep, drop = make(0), make(1)
    step.add(keep, 4, ())
    step.add(drop, 6, ())
    step.drop(drop)
    step.drop(make(2))  # Had no work: nothing to take out.
    assert step.budget == 8
    assert [work.row for work in step.build(1, (), Epoch(1)).plan.work] == [0]


def test_going_over_the_budget_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="budget"):
        StepBuilder(3, 64).add(make(0), 4, ())


def test_rows_that_decode_may_come_one_by_one_or_together() -> None:
    one, many = StepBuilder(12, 64), StepBuilder(12, 64)
    for row in range(4):
        one.add_decoding(make(row, 9), ())
    many.add_all_decoding([make(0, 9), make(1, 9)])
    many.add_decoding(make(2, 9), ())
    many.add_all_decoding([make(3, 9)])
    for step in (one, many):
        step.drop(make(1))
        step.add(make(7), 6, ())
    single, together = (step.build(1, (), Epoch(1)) for step in (one, many))
    assert single.plan == together.plan
    assert single.load == together.load
    assert single.num_decoding == together.num_decoding == 3
    assert [request.row for request in together.requests] == [0, 2, 3, 7]


def test_a_row_that_decodes_behind_a_chunk_is_a_bug() -> None:
    step = StepBuilder(12, 64)
    step.add(make(0), 4, ())
    with pytest.raises(AssertionError, match="come first"):
        step.add_decoding(make(1, 9), ())
