"""The usage record: what one accepted request used, what it cost and how it ended. Exactly one for each.

Written by the component that counts tokens, from the flow's own facts; the sinks in telemetry/ledger* only
carry it.
"""

import enum

import msgspec

SCHEMA_VERSION = 1


class Outcome(enum.StrEnum):
    """How a request's life ended. Exactly one of them, exactly once."""

    FINISHED = "finished"
    FAILED = "failed"
    """A typed error after it was accepted: `UsageRecord.error` has the type's name."""
    REJECTED = "rejected"
    """Never queued: a limit, the admission or an allowlist said no. Counted in metrics; the ledger has none
    of these."""
    EVICTED = "evicted"
    """Queued, then dropped: it waited too long, or gave way when memory ran out."""
    CANCELLED = "cancelled"
    """The client left. What was generated until then counts."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the ledger. Token counts are exact; times are whole microseconds; money is millionths."""

    request_id: str
    """Unique for all time: with it a record that was delivered twice is known for the same."""
    ended_ns: int
    """Wall clock, nanoseconds since the epoch."""
    tenant: str
    tier: str = ""
    key_prefix: str = ""
    """The shown part of the API key, or the subject of the token."""
    user: str = ""
    """What the request's `user` field said."""
    endpoint: str = "chat"
    requested_model: str
    served_model: str
    route_reason: str = ""
    """Why the served model is not the requested one; empty if it is."""
    adapter: str = ""
    worker: str = ""
    """The last one that it ran on; empty if it never did."""
    band: str = ""
    outcome: Outcome
    finish_reason: str = ""
    error: str = ""
    choices: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    """Workers that it was started on."""
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    total_us: int = 0
    ttft_us: int = 0
    """0 if there was no first output."""
    kv_block_us: int = 0
    """KV blocks held, integrated over time."""
    cost_micros: int = 0
    """By the price list."""
    accelerator_cost_micros: int = 0
    """Its share of the accelerators' seconds, at their price."""
    price_version: str = ""
    recovered: bool = False
    """Written after a crash from what the journal knew: tokens as of the last slice that was settled."""
