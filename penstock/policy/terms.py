"""The constants of queues, of placement and of shared limits, beside the sections `queue`,
`routing.placement` and `shared`; and what a worker may be given by them: streams, requests and tokens, and
which of its rows stay free for tenants that run nothing.

Tests, benches and simulations pass others in their place.

An engine of ours takes a row back between two tokens (schedule/shares.py), so it is given all that it can
hold. Others do not: of what they run at once, some is given only to who would wait for a whole stream of
another tenant else.
"""

from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import asdict

from penstock.config.branch import Branch, extended
from penstock.config.flow import BandConfig, QueueConfig, SharedConfig
from penstock.config.routing import PlacementConfig

STARVATION_FIRST_S, STARVATION_S, STARVATION_LAST_S = 5.0, 30.0, 120.0
"""Of bands with an order below 0, of 0, and above 0."""


class BandTerms(BandConfig, frozen=True, kw_only=True):
    """A band of the section, and what follows from its order."""

    starvation_s: float = 60.0
    """With work waiting and none started for this long, its next one starts before all other bands'."""
    bytes_max: int = 64 * 1024 * 1024
    """Bodies and prompts of the requests that wait, together."""
    protected: bool = False
    """Its running streams are never stopped to make room in KV memory."""


def band_terms(band: BandConfig) -> BandTerms:
    """A band with its constants; itself where a caller has set those."""
    if isinstance(band, BandTerms):
        return band
    starvation_s = STARVATION_S
    if band.order:
        starvation_s = STARVATION_FIRST_S if band.order < 0 else STARVATION_LAST_S
    given = {name: getattr(band, name) for name in band.__struct_fields__}
    return BandTerms(**given, starvation_s=starvation_s, protected=band.order < 0)


class QueueTerms(QueueConfig, frozen=True, kw_only=True):
    """The section, and what no operator has a reason to move."""

    bytes_max: int = 256 * 1024 * 1024
    """Bodies and prompts of the requests that wait for one model, all bands together."""
    tenant_share: float = 0.5
    """The part of a band's bounds that one tenant may fill."""
    when_full: Literal["evict", "refuse"] = "evict"
    """With all bands together at the bound: drop the newest request of the lowest band below the new one's,
    or refuse the new one. A band or a tenant at its own bound is always refused."""
    tenants_kept: int = 4096
    """Tenants without work whose counters are kept, by model and band; over it the least served are
    forgotten."""
    skips_max: int = 16
    """A request that is too large for the room there is lets so many pass; then a worker is kept free for
    it."""
    skip_s: float = 5.0
    """And that also after it has been passed over for this long."""
    late_kept: int = 4
    """Where no more wait and run when the first of them is late, these wait on: a refusal would help hardly
    any other request."""
    aside_max: int = 16
    """Requests of one band that wait aside at once because they are too large; more hold up their tenant
    only."""
    retries_max: int = 2
    """Other starts of a request whose worker failed before any output."""
    worker_credit: int = 4
    """Streams that an engine of ours is given beyond its `max_running`, so that it never waits for us."""
    external_concurrency: int = 64
    """Streams that a worker is given which does not tell how many it runs."""
    extra_per_row: int = 4
    """Streams that an engine of ours is given beyond its slots, per row, each the only one of its tenant: its
    rows go round among them (schedule/shares.py)."""
    kept_share: float = 0.125
    """Streams that any other worker is given beyond its slots, as a share of those, at least one: each is the
    only stream of its tenant."""
    shed_kv_above: float = 0.97
    """Share of a worker's KV blocks in use over which streams of lower bands end for the sake of higher ones;
    1 never."""
    shed_kv_to: float = 0.9
    """Down to which share of a worker's KV blocks streams of lower bands end."""
    shed_max: int = 8
    """Requests that one report of one worker ends at most."""


def queue_terms(queue: QueueConfig) -> QueueTerms:
    """The section with its constants; itself where a caller has set those."""
    return extended(queue, QueueTerms)


class TtftTerms(Branch, frozen=True, kw_only=True):
    """The worker with the least time to first token, and what a request does to others, all in seconds."""

    tpot_target_ms: float = 50.0
    """Time per output token that running streams are meant to have; over it another stream costs
    something."""
    tpot_weight: float = 1.0
    """Seconds that one second counts for which the worker's streams exceed that, over the whole expected
    answer."""
    others_weight: float = 1.0
    """The weight of a second that the worker computes the prompt, for requests that wait for it or come
    later; 0 counts the client alone."""
    pressure_ms: float = 100.0
    """The weight of KV memory that is half full; x full counts x / (1 - x) times that."""


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
    """The cost of a block that must be copied back from host memory, as a share of computing it."""
    adapter_load_ms: float = 2000.0
    """The expected time that a worker takes for an adapter that it has not loaded."""
    prefill_tokens_per_s: float = 4000.0
    """The assumed speed of a worker until it was measured."""
    step_ms: float = 30.0
    """The assumed time for one token of every stream, until it was measured."""
    session_ttl_s: float = 3600.0
    """How long a session's last worker is remembered."""
    sessions_max: int = 65_536
    """Sessions of one model whose last worker is remembered; over it those that were seen longest ago are
    forgotten."""
    decisions_kept: int = 1024
    """Requests whose decisions can be asked for with `GET /admin/explain/{request_id}`: the last so many."""
    log_every: int = 1000
    """One decision in so many is written to the log."""


LEASE_S = 1.0
"""A gateway leases this many seconds' worth of a limit (or, while few gateways share, its part of a quarter
of the burst). While the store is late, all of them together overshoot by at most one lease each."""
TIMEOUT_S = 0.25
"""The store is away when it has not answered for this long."""
RETRY_S = 0.5
"""How often it is asked while it is away."""
GATEWAY_TTL_S = 30.0
"""A gateway that has not asked anything for this long is counted no more."""
ASKS_MAX = 512
"""Questions in one message to the store."""


class SharedTerms(SharedConfig, frozen=True, kw_only=True):
    """The section, and the times by which its store is used."""

    lease_s: float = LEASE_S
    timeout_s: float = TIMEOUT_S
    retry_s: float = RETRY_S
    gateway_ttl_s: float = GATEWAY_TTL_S


def shared_terms(config: SharedConfig) -> SharedTerms:
    """The section with its constants; itself where a caller has set those."""
    if isinstance(config, SharedTerms):
        return config
    return SharedTerms(
        **asdict(config), lease_s=LEASE_S, timeout_s=TIMEOUT_S, retry_s=RETRY_S, gateway_ttl_s=GATEWAY_TTL_S
    )


_KEPT_ROWS_MIN = 4
"""Of fewer rows one is too much to keep free."""


class DeploymentTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker stands beside the others of its model, as it is configured."""

    order: int = 0
    weight: int = 1
    rpm: int = 0
    """Requests a minute; 0: no limit."""
    tpm: int = 0
    """Tokens a minute; 0: no limit."""

    def part(self, processes: int) -> "DeploymentTerms":
        """The part that each of several gateway processes may use: together they keep to the worker's own
        limits.
        """
        if processes == 1 or not (self.rpm or self.tpm):
            return self
        rpm, tpm = part_of(self.rpm, processes), part_of(self.tpm, processes)
        return msgspec.structs.replace(self, rpm=rpm, tpm=tpm)


class CellView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker that is a peer cell: what it takes to be answered there."""

    name: str
    rtt_ns: int = 0
    """There and back, as measured."""
    wait_ns: int = 0
    """The wait of a request there, as it says."""
    price: float = 0.0
    """Of sending it a million tokens."""


class Slots(NamedTuple):
    """One worker's."""

    given: int
    """Streams that it may be given."""
    limit: int
    """Those, and what may be given beyond them to tenants that run nothing else (`Work.takes_row`)."""
    spare: int
    """How many of `given` are no rows of it; below 0: rows that it has and that are kept free."""


def slots_of(rows: int, *, is_external: bool, terms: QueueTerms) -> Slots:
    """A worker's that runs `rows` streams at once; 0: it does not tell.

    `terms.headroom` 0 lends every row of an external worker too.
    """
    assert rows >= 0, rows
    if not rows:
        given = terms.external_concurrency
        return Slots(given, given + max(1, int(terms.kept_share * given)), 0)
    if not is_external:
        given = rows + terms.worker_credit
        return Slots(given, given + terms.extra_per_row * rows, terms.worker_credit)
    kept = max(1, int(terms.headroom * rows)) if terms.headroom and rows >= _KEPT_ROWS_MIN else 0
    return Slots(rows - kept, rows, -kept)


def part_of(limit: int, processes: int) -> int:
    """The part of an external worker's rows or rates that each of several gateway processes may use: they
    hear of each other's streams too late to count them together. No less than one; 0, which is no limit,
    stays.
    """
    assert processes >= 1, processes
    return max(1, limit // processes) if limit else 0
