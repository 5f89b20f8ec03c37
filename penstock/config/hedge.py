"""A second attempt beside one that says nothing: the section `health.hedge`. docs/failures.md has the story."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Fraction, Positive


class HedgeConfig(Branch, frozen=True, kw_only=True):
    """Hedged requests (Dean and Barroso, "The Tail at Scale", CACM 2013): whoever has had no first output for longer than nearly all
    others is also started on another worker, if that has room. Whichever answers first goes on, the other is aborted.

    Providers that are paid by the token are paid for both.
    """

    enabled: bool = False
    after_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0
    """How long a request has had no output then; 0: as long as `quantile` of the model's requests take."""
    quantile: Fraction = 0.98
    """Of the times from start to first output of the model's last `window` requests with prompts of about that length (within a
    factor of two, what is cached left out). Well under 1 - `share` the budget goes to requests that are only a little late."""
    window: Annotated[int, Meta(ge=20, le=65_536)] = 512
    samples_min: Positive = 50
    """With fewer of them nothing is hedged."""
    after_min_ms: Annotated[int, Meta(ge=0, le=600_000)] = 20
    """Nothing that is quicker is hedged."""
    share: Annotated[float, Meta(ge=0, le=0.1)] = 0.02
    """Second attempts per start, at most: the load that they may add."""
    saved_max: Annotated[int, Meta(ge=1, le=1000)] = 10
    """What times without any can save up."""
