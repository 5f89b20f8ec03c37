"""What one request of a tenant may ask for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ContextTooLong, Forbidden, InvalidRequest
from penstock.policy.tenant import (
    ANONYMOUS,
    Tenant,
    check_adapter,
    check_model,
    check_tokens,
    may_use_model,
    output_room,
)
from penstock.types import TenantId


def tenant(**fields) -> Tenant:
    return Tenant(id=TenantId("acme"), tier="free", **fields)


def test_allowlists() -> None:
    listed = tenant(models=frozenset({"small"}), adapters=frozenset({"legal"}))
    check_model(listed, "small")
    check_adapter(listed, "legal")
    assert may_use_model(listed, "small")
    assert not may_use_model(listed, "large")
    with pytest.raises(Forbidden, match=r"model 'large' is not allowed for your tier 'free'") as refused:
        check_model(listed, "large")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_allowed")
    with pytest.raises(Forbidden, match=r"adapter 'med' is not allowed for your tier 'free'"):
        check_adapter(listed, "med")
    for name in ("small", "large"):
        check_model(ANONYMOUS, name)
        check_adapter(ANONYMOUS, name)


@pytest.mark.parametrize(
    ("limits", "prompt", "asked", "error", "words"),
    [
        ({"context_tokens_max": 32_768}, 33_000, None, ContextTooLong, (r"tier 'free' is 32768 tokens "
        r"\(context_tokens_max")),
        ({"context_tokens_max": 32_768}, 32_768, None, ContextTooLong, r"resulted in 32768 tokens"),
        ({"context_tokens_max": 100}, 60, 41, ContextTooLong, (r"requested 101 tokens \(60 in the messages, "
        r"41 in the")),
        ({"output_tokens_max": 10}, 1, 11, InvalidRequest, (r"'max_tokens': .* 10 tokens "
        r"\(output_tokens_max\), but got 11")),
    ],
)  # fmt: skip
def test_token_limits_name_the_limit_and_the_tier(limits, prompt, asked, error, words) -> None:
    with pytest.raises(error, match=words) as refused:
        check_tokens(tenant(**limits), prompt, asked)
    code = "context_length_exceeded" if error is ContextTooLong else "invalid_value"
    assert refused.value.code == code


limit = st.integers(0, 50)


@given(limit, limit, st.integers(1, 60), st.none() | st.integers(1, 60), st.integers(1, 60))
def test_what_passes_is_within_every_limit(most_out, context, prompt, asked, rest) -> None:
    """Nothing that is refused would have fitted, and what is let through fits with the room it is given."""
    who = tenant(output_tokens_max=most_out, context_tokens_max=context)
    needed = prompt + (asked or 1)
    fits = (not most_out or (asked or 0) <= most_out) and (not context or needed <= context)
    try:
        check_tokens(who, prompt, asked)
    except InvalidRequest:
        assert not fits
        return
    assert fits
    tokens = output_room(who, prompt, rest)
    assert 1 <= tokens <= rest
    assert not context or prompt + tokens <= context
    assert not most_out or tokens <= most_out
