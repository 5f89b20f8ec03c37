"""The constants of the queue, beside the section `queue`.

Tests, benches and simulations pass others in its place.
"""

from typing import Literal

from penstock.config.branch import extended
from penstock.config.flow import BandConfig, QueueConfig

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
    """What one tenant may fill of a band's bounds."""
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
    rows go round among them (schedule/row_share.py)."""
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
