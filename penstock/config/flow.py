"""Queues, admission, limits' sharing and degradation: the sections `queue`, `admission`, `routing` and `shared`."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Fraction, Positive


class RateLimitsConfig(Branch, frozen=True, kw_only=True):
    """How the limits per tenant are counted. The limits themselves stand in `tenants` and `tiers`; see docs/limits.md."""

    burst_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    """What a tenant that was idle may spend at once, in seconds of its rate. 60: one minute's worth, as with OpenAI."""
    slice_tokens: Positive = 256
    """An answer longer than what was reserved for it is charged in slices of this many tokens while it streams."""
    retry_after_max_s: Annotated[float, Meta(ge=1)] = 600.0
    """The line of refused requests that are told when to come back is at most this long."""
    tenants_max: Positive = 65_536
    """Tenants whose use is remembered; over it those that have nothing running and were seen longest ago are forgotten."""
    output_quantile: Fraction = 0.9
    """What is reserved for an answer: this quantile of the tenant's last answers of that model, or `max_tokens` if less."""
    output_window: Annotated[int, Meta(ge=8, le=65_536)] = 64
    """Answers that the quantile is taken of."""
    output_windows_max: Annotated[int, Meta(ge=2)] = 8192
    """Pairs of tenant and model whose answers are remembered (about 0.7 KB each)."""
    output_tokens_default: Positive = 256
    """What is reserved while no answer of that model was seen."""
