"""The constants of placement, beside the section `routing.placement`. Tests and benches pass others."""

from penstock.config.branch import Branch
from penstock.config.routing import PlacementConfig


class TtftTerms(Branch, frozen=True, kw_only=True):
    """The worker with the least time to first token, and what a request does to others, all in seconds."""

    tpot_target_ms: float = 50.0
    """Time per output token that running streams are meant to have; over it another stream costs
    something."""
    tpot_weight: float = 1.0
    """Seconds that one second counts for which the worker's streams exceed that, over the whole expected
    answer."""
    others_weight: float = 1.0
    """What a second that the worker computes the prompt counts for those who wait for it or come later; 0
    counts the client alone."""
    pressure_ms: float = 100.0
    """What KV memory that is half full counts; x full counts x / (1 - x) times that."""


class WeightedTerms(Branch, frozen=True, kw_only=True):
    """A weighted sum of four marks from 0 to 1; the largest wins."""

    match: float = 0.45
    """For the part of the prompt that the worker has in its cache."""
    delay: float = 0.25
    """Against the wait until the prompt is begun, as a share of `ttft_target_ms`."""
    pressure: float = 0.20
    """Against full KV memory: x / (1 - x) / 4 at x full, and 1 at most."""
    headroom: float = 0.10
    """For a worker that keeps streams free for more urgent bands than the request's."""
    ttft_target_ms: float = 1000.0
    reserve: float = 0.08
    """Share of its streams that a worker should keep free for each band that goes before the request's."""


class PlacementTerms(PlacementConfig, frozen=True, kw_only=True):
    """The section, and what no operator has a reason to move."""

    ttft: TtftTerms = TtftTerms()
    weighted: WeightedTerms = WeightedTerms()
    holders_max: int = 4
    """Workers that are looked at because they have most of the prompt in their caches."""
    least_loaded: int = 4
    """Workers that are looked at because they have least to do. A decision costs the same however many there
    are."""
    tie: float = 0.05
    """Scores that are so close are equal: the session's last worker, or the less loaded one of two drawn by
    chance."""
    explore: float = 0.01
    """Share of decisions that take any worker which is not much worse, so that what is known of all stays
    fresh."""
    hold_ms_max: float = 500.0
    """A request waits for a warm worker that is busy no longer than this, and than what that saves; 0
    never."""
    holds_max: int = 64
    """Requests of one model that wait so at once."""
    host_cost: float = 0.1
    """What a block costs that must be copied back from host memory, as a share of computing it."""
    adapter_load_ms: float = 2000.0
    """What a worker is expected to take for an adapter that it has not loaded."""
    prefill_tokens_per_s: float = 4000.0
    """What a worker is taken to compute until it was seen to."""
    step_ms: float = 30.0
    """What a worker is taken to need for one token of every stream, until it was seen to."""
    session_ttl_s: float = 3600.0
    """How long a session's last worker is remembered."""
    sessions_max: int = 65_536
    """Sessions of one model whose last worker is remembered; over it those that were seen longest ago are
    forgotten."""
    decisions_kept: int = 1024
    """Requests whose decisions can be asked for with `GET /admin/explain/{request_id}`: the last so many."""
    log_every: int = 1000
    """One decision in so many is written to the log."""
