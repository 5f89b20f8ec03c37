"""The section `kv_index`: what the router remembers of its workers' KV caches. docs/kv-index.md has the story."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Positive

Lasting = Annotated[float, Meta(gt=0, le=86_400)]


class KVIndexConfig(Branch, frozen=True, kw_only=True):
    """Bounds of the index, and how long it believes what."""

    entries_max: Positive = 4_000_000
    """KV blocks per tier (device, host) over all workers; about 105 bytes each. The oldest are forgotten first."""
    blocks_per_worker_max: Positive = 1_000_000
    """Blocks that one worker may tell of. One that tells of more starts again with nothing."""
    predicted_max: Positive = 65_536
    """Blocks that are counted on at one worker only because requests were sent there: how large a cache is taken to be at
    first. What answers say was cached makes it smaller, or larger again."""
    predicted_ttl_s: Lasting = 120.0
    """How long they are counted on at workers that tell no KV events."""
    announced_ttl_s: Lasting = 10.0
    """And at workers that do: until their events tell."""
    stale_s: Lasting = 30.0
    """A worker whose events should have come and have not is believed less and less, and after this long not at all."""
    parked_max: Positive = 256
    """Events per worker that wait for the block before theirs to become known; above it the oldest are dropped."""
    held_batches_max: Positive = 1024
    """Batches of events per worker that wait for missed ones to be sent again."""
    message_bytes_max: Annotated[int, Meta(ge=65_536)] = 64 * 1024 * 1024
    """One message of KV events; a worker that sends a larger one is disconnected."""
    replay_timeout_s: Lasting = 5.0
    """How long missed batches may take to come again, counted from the last one that came."""
    check_s: Lasting = 10.0
    """How often a worker is asked for what was missed without knowing, where it can be asked."""
    reconnect_max_s: Lasting = 30.0
    """Longest pause between two attempts to connect."""
