"""What a model's pace keeps of the last first tokens: sorted at all times, and the same as if it were sorted
when it is asked.
"""

from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_S
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import WorkerCapacity, WorkerView
from penstock.policy.queueing.pace import _SCORED, Pace, _Latest
from penstock.types import RequestId, TenantId, WorkerId


@given(st.lists(st.floats(0, 1e6) | st.integers(0, 5), min_size=1, max_size=3 * _SCORED))
def test_nine_of_ten_of_the_last_values_are_no_larger(values: list[float]) -> None:
    latest = _Latest()
    for i, value in enumerate(values, 1):
        latest.add(value)
        ordered = sorted(values[max(0, i - _SCORED) : i])
        assert latest.ordered == ordered
        assert latest.p90() == ordered[(9 * len(ordered) - 1) // 10]


def test_a_first_token_is_learned_from_before_anything_is_asked_or_earlier() -> None:
    def seen(*, learns: bool) -> int:
        pace, worker = Pace(), WorkerCapacity(WorkerId("w"), 0)
        worker.view, worker.booked, worker.pending_tokens = WorkerView(kind="slow"), 1, 500
        request = Work(id=RequestId("r"), band="default", tenant=TenantId("a"), arrived_ns=0)
        request.prompt_tokens = 500
        pace.started(0, request, worker)
        assert not pace.has_lesson
        pace.began(NS_PER_S, request, worker)
        assert pace.has_lesson
        if learns:
            pace.learn()
            assert not pace.has_lesson
        return pace.idle_ttft_ns(500, 500)

    assert seen(learns=False) == seen(learns=True) > NS_PER_S // 2
