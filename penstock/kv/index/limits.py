"""Bounds of the KV index, and how long it believes what: constants, which only tests change. docs/kv-index.md
has the story.
"""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class KVIndexLimits:
    """The same for all workers of a gateway."""

    entries_max: int = 4_000_000
    """KV blocks per tier (device, host) over all workers; about 105 bytes each. The oldest are forgotten
    first."""
    blocks_per_worker_max: int = 1_000_000
    """Blocks that one worker may report. One that reports more starts again with nothing."""
    predicted_max: int = 65_536
    """Blocks that are counted on at one worker only because requests were sent there: how large a cache is
    taken to be at first. What answers say was cached makes it smaller, or larger again."""
    predicted_ttl_s: float = 120.0
    """How long they are counted on at workers that send no KV events."""
    announced_ttl_s: float = 10.0
    """And at workers that do, until the event comes."""
    stale_s: float = 30.0
    """A worker whose events should have come and have not is believed less and less, and after this long not
    at all."""
    parked_max: int = 256
    """Events per worker that wait for the block before theirs to become known; above it the oldest are
    dropped."""
    held_batches_max: int = 1024
    """Batches of events per worker that wait for missed ones to be sent again."""
    message_bytes_max: int = 64 * 1024 * 1024
    """One message of KV events; a worker that sends a larger one is disconnected."""
    replay_timeout_s: float = 5.0
    """How long missed batches may take to come again, counted from the last one that came."""
    check_s: float = 10.0
    """How often a worker is asked for batches that were missed unnoticed, where it can be asked."""
    reconnect_max_s: float = 30.0
    """Longest pause between two attempts to connect."""


KV_INDEX_LIMITS = KVIndexLimits()
