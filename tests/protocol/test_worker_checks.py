"""A submission is checked by the worker itself: one number out of range would end its process."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.worker_parts import (
    INT32_MAX,
    INT64_MAX,
    SCALE_MAX,
    STOPS_MAX,
    sampling_problem,
    weight_of,
)
from penstock.types import SamplingParams

VOCAB = 100
WRONG = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.001),
    ("temperature", SCALE_MAX + 1),
    ("top_p", 1.001),
    ("top_p", math.nan),
    ("min_p", -1.0),
    ("presence_penalty", -SCALE_MAX - 1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("top_k", -1),
    ("top_k", INT32_MAX + 1),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", INT32_MAX + 1),
    ("seed", INT64_MAX + 1),
    ("seed", -INT64_MAX - 2),
    ("logprobs", -1),
    ("logprobs", VOCAB + 1),
    ("prompt_logprobs", VOCAB + 1),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (INT32_MAX + 1,)),
    ("stop_token_ids", (1,) * (STOPS_MAX + 1)),
    ("logit_bias", ((VOCAB, 1.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, math.nan),)),
    ("logit_bias", ((1, -SCALE_MAX - 1),)),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
]
RIGHT = [
    ("temperature", 0.0),
    ("temperature", SCALE_MAX),
    ("top_p", 0.0),
    ("top_p", 1.0),
    ("repetition_penalty", 1 / SCALE_MAX),
    ("top_k", INT32_MAX),
    ("max_tokens", 1),
    ("seed", INT64_MAX),
    ("seed", -INT64_MAX - 1),
    ("logprobs", VOCAB),
    ("logprobs", None),
    ("stop_token_ids", (0, INT32_MAX)),
    ("stop_token_ids", (1,) * STOPS_MAX),
    ("logit_bias", ((0, -SCALE_MAX), (VOCAB - 1, SCALE_MAX))),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_the_engine_cannot_compute_with_is_named(name, value) -> None:
    problem = sampling_problem(SamplingParams(**{name: value}), VOCAB)
    assert problem is not None
    assert problem[0] == name
    assert problem[1].startswith(name)


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_the_ends_of_every_range_are_allowed(name, value) -> None:
    assert sampling_problem(SamplingParams(**{name: value}), VOCAB) is None


@given(st.floats())
def test_a_weight_is_finite_and_above_zero_whatever_is_sent(said) -> None:
    weight = weight_of(said)
    assert 0 < weight <= SCALE_MAX**2
    assert weight == (said if 0 < said <= SCALE_MAX**2 else 1.0)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(),
        top_p=st.floats(),
        min_p=st.floats(),
        repetition_penalty=st.floats(),
        top_k=st.integers(),
        seed=st.integers(),
        max_tokens=st.integers(),
        logit_bias=st.lists(st.tuples(st.integers(-2, VOCAB + 1), st.floats()), max_size=3).map(tuple),
    )
)
def test_what_passes_fits_tensors(sampling) -> None:
    if sampling_problem(sampling, VOCAB) is None:
        floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        assert all(map(math.isfinite, (*floats, *(bias for _, bias in sampling.logit_bias))))
        assert -(2**63) <= sampling.seed < 2**63
        assert 0 <= sampling.top_k < 2**31
        assert all(0 <= token_id < VOCAB for token_id, _ in sampling.logit_bias)
