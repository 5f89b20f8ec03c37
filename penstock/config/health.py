"""What happens when something fails: the section `health`. docs/failures.md has the story."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Count


class HealthConfig(Branch, frozen=True, kw_only=True):
    """What is done about failures, beside what is always done."""

    migrations_max: Count = 3
    """Workers that one stream may lose and still continue behind its last token; 0: a stream ends with its
    worker."""
    quarantine_crashes: Annotated[int, Meta(ge=1, le=100)] = 2
    """Worker crashes that a request was present at, the last of them as the likeliest cause, before it is
    refused."""
    hedge_share: Annotated[float, Meta(ge=0, le=0.1)] = 0.0
    """Hedged requests (Dean and Barroso, "The Tail at Scale", CACM 2013): second attempts per start, at most,
    which is the load that they may add; 0: none, 0.02: two in a hundred. A request that has had no first
    output for longer than nearly all others is also started on another worker, if that has room. The first
    answer counts, the other attempt is aborted. Providers that are paid by the token are paid for both."""
    hedge_after_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0
    """How long a hedged request has had no output; 0: as long as 98 of 100 requests of the model with prompts
    of about that length take."""
