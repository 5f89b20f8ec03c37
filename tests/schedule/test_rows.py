import pytest

from penstock.kv.hashing import token_array
from penstock.schedule.batch import RowTable
from penstock.schedule.request import Request
from penstock.types import RequestId, SamplingParams


def make(name: str) -> Request:
    return Request(request_id=RequestId(name), tokens=token_array([1]), sampling=SamplingParams())


def test_the_lowest_free_row_is_taken_and_every_release_is_reported_once() -> None:
    rows = RowTable(3)
    a, b, c = make("a"), make("b"), make("c")
    assert [rows.assign(request) for request in (a, b, c)] == [0, 1, 2]
    rows.release(b)
    rows.release(a)
    assert (a.row, b.row) == (-1, -1)
    rows.check_invariants([c])
    assert rows.assign(b) == 0
    assert rows.report_freed() == (1, 0)
    assert rows.report_freed() == ()
    assert rows[0] is b
    assert rows[2] is c
    rows.check_invariants([b, c])


def test_bugs_are_caught() -> None:
    rows = RowTable(1)
    a = make("a")
    with pytest.raises(AssertionError):
        rows.release(a)
    rows.assign(a)
    with pytest.raises(AssertionError, match="differ"):
        rows.check_invariants([])
    with pytest.raises(IndexError):
        rows.assign(make("b"))
    rows.release(a)
    with pytest.raises(AssertionError, match="free"):
        rows[0]
