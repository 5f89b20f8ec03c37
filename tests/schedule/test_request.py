import pytest

from penstock.kv.hashing import token_array
from penstock.schedule.request import TRANSITIONS, Request, Status
from penstock.types import RequestId, SamplingParams, Usage


def make(num_prompt: int = 5, **fields) -> Request:
    tokens = token_array(range(num_prompt))
    return Request(
        request_id=RequestId("r"), tokens=tokens, sampling=SamplingParams(stop_token_ids=(7,)), **fields
    )


def test_counts_follow_the_tokens() -> None:
    request = make()
    assert (request.num_prompt, request.num_pending, request.num_generated) == (5, 5, 0)
    request.tokens.append(9)
    request.restart_from(5)
    assert (request.num_prompt, request.num_pending, request.num_generated) == (5, 1, 1)
    assert request.stop_token_ids == {7}


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_only_the_table_moves_a_request(before: Status, after: Status) -> None:
    request = make(status=before)
    if after in TRANSITIONS[before]:
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(AssertionError):
            request.move_to(after)


def test_every_status_is_in_the_table_and_the_end_is_final() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert TRANSITIONS[Status.FINISHED] == ()


def test_usage_of_a_request_that_never_started() -> None:
    assert make(arrival_ns=10).usage(35) == Usage(prompt_tokens=5, queue_ns=25)


def test_usage_without_a_first_token() -> None:
    assert make(arrival_ns=10, started_ns=15).usage(35) == Usage(prompt_tokens=5, queue_ns=5, prefill_ns=20)


def test_usage_of_a_whole_life() -> None:
    request = make(arrival_ns=10, started_ns=15, first_token_ns=22, num_cached=3)
    request.tokens.extend([1, 2])
    assert request.usage(35) == Usage(
        prompt_tokens=5, completion_tokens=2, cached_tokens=3, queue_ns=5, prefill_ns=7, decode_ns=13
    )
