"""What happens when something fails: the section `health`. docs/failures.md has the story."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Count, Fraction, Positive
from penstock.config.hedge import HedgeConfig

Share = Annotated[float, Meta(ge=0, le=1)]
Beats = Annotated[int, Meta(ge=2, le=1000)]


class HeartbeatConfig(Branch, frozen=True, kw_only=True):
    """How a worker of our own that is connected and silent is found out. One that is killed closes its socket: that is seen at
    once. With the defaults a worker that stands still is given nothing new after 1 to 1.5 s, and lost after 2 to 2.5 s.
    """

    interval_s: Annotated[float, Meta(ge=0.01, le=60)] = 0.5
    """Time between two beats. A worker that was not heard since the last one is asked for a sign of life."""
    suspect_after: Beats = 2
    """Silent beats in a row after which it is given nothing new."""
    lost_after: Beats = 4
    """Silent beats in a row after which its connection is cut, and its streams go on elsewhere; more than `suspect_after`."""


class BreakerConfig(Branch, frozen=True, kw_only=True):
    """When one worker of one model is left alone for a while. What a client did never counts."""

    window_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    """Attempts of so long ago count."""
    buckets: Annotated[int, Meta(ge=1, le=100)] = 10
    """Parts of the window; the oldest is forgotten as a whole."""
    attempts_min: Positive = 10
    """With fewer attempts in the window nothing is judged."""
    rate: Fraction = 0.5
    """This share of them failed, or was slow: it is left alone."""
    slow_factor: Annotated[float, Meta(ge=1, le=1000)] = 3.0
    """A first token is slow that takes so many times what is usual for this worker, while its peers are fine."""
    slow_min_ms: Annotated[int, Meta(ge=0, le=600_000)] = 200
    """Nothing quicker than this is slow."""
    open_s: Annotated[float, Meta(ge=0.01, le=3600)] = 5.0
    """How long it is left alone the first time; twice as long each time that it fails again soon."""
    open_max_s: Annotated[float, Meta(ge=0.01, le=86_400)] = 60.0
    jitter: Share = 0.2
    """Up to this share is added to that time, drawn anew each time."""
    probes: Positive = 5
    """Attempts that must go well before it is used like the others; a single one goes first."""
    probe_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    """A probe that takes longer does not keep others waiting for its verdict."""


class RetryConfig(Branch, frozen=True, kw_only=True):
    """How many requests that failed before their first byte may be tried again, on another worker. `queue.retries_max` bounds
    the tries of each.
    """

    share: Share = 0.1
    """Of the requests that end well."""
    floor_per_s: Annotated[int, Meta(ge=0, le=10_000)] = 3
    """So many a second are granted in any case."""
    saved_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    """What good times can save up."""


class QuarantineConfig(Branch, frozen=True, kw_only=True):
    """What happens to a request whose worker's process dies, again and again."""

    deaths: Annotated[int, Meta(ge=1, le=100)] = 2
    """Deaths that it was present at, the last of them as the likeliest cause, before it is refused."""
    progress_tokens: Count = 16
    """Who has given so many more tokens than at the last death has shown that it was not the cause of that."""
    together_ms: Annotated[int, Meta(ge=0, le=60_000)] = 10
    """Deaths so close to each other may have one cause outside, such as a machine with several workers: they count once."""
    refuse_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    """For so long."""
    suspects_max: Positive = 10_000
    """Prompts that are remembered; the least recent is forgotten first."""


class HealthConfig(Branch, frozen=True, kw_only=True):
    """How failures are noticed, and what is done about them."""

    heartbeat: HeartbeatConfig = HeartbeatConfig()
    breaker: BreakerConfig = BreakerConfig()
    panic_above: Fraction = 0.5
    """When more than this share of a model's ready workers would be left alone, none is."""
    retry: RetryConfig = RetryConfig()
    hedge: HedgeConfig = HedgeConfig()
    quarantine: QuarantineConfig = QuarantineConfig()
    migrations_max: Count = 3
    """Workers that one stream may lose and still go on behind its last token; 0: a stream ends with its worker."""
