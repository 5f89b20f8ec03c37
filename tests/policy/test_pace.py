"""What a model's pace keeps of the last first tokens: sorted at all times, and the same as if it were sorted
when it is asked.
"""

from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.queueing.pace import _SCORED, _Latest


@given(st.lists(st.floats(0, 1e6) | st.integers(0, 5), min_size=1, max_size=3 * _SCORED))
def test_nine_of_ten_of_the_last_values_are_no_larger(values: list[float]) -> None:
    latest = _Latest()
    for i, value in enumerate(values, 1):
        latest.add(value)
        ordered = sorted(values[max(0, i - _SCORED) : i])
        assert latest.ordered == ordered
        assert latest.p90() == ordered[(9 * len(ordered) - 1) // 10]
