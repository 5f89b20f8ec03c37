"""What happens when something fails: the section `health`. docs/failures.md has the story."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Count


class HealthConfig(Branch, frozen=True, kw_only=True):
    """What is done about failures, beside what is always done."""

    migrations_max: Count = 3
    """Workers that one stream may lose and still continue behind its last token; 0: a stream ends with its
    worker."""
    hedge_share: Annotated[float, Meta(ge=0, le=0.1)] = 0.0
    """Hedged requests (Dean and Barroso, "The Tail at Scale", CACM 2013): second attempts per start, at most,
    which is the load that they may add; 0: none, 0.02: two in a hundred. A request that has had no first
    output for longer than nearly all others is also started on another worker, if that has room. The first
    answer counts, the other attempt is aborted. Providers that are paid by the token are paid for both."""
