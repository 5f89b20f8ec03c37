"""What `FlowControl` answers: one struct for each thing that its driver must do; and the usage record, which
is the end of every accepted request: what it used, what it cost and how it ended. Exactly one for each, from
the flow's own facts; the sinks in telemetry/ledger* only carry it.
"""

import enum

import msgspec

from penstock.errors import PenstockError
from penstock.policy.admit_facts import DowngradeReason
from penstock.types import RequestId, WorkerId


class Queued(msgspec.Struct, frozen=True, gc=False):
    """The request is accepted: exactly one `Settled` will follow. Call `dispatch` now."""

    id: RequestId
    route: str
    predicted_ns: int = 0
    """Its expected time to first token; 0 where nobody predicts."""


class Refused(msgspec.Struct, frozen=True):
    """It is not: nothing of it is left. The error has the message, and when to come back."""

    id: RequestId
    reason: str
    """The part that refused it, for metrics: "draining", "quarantine", "no_worker", "admission", "limits",
    "budget", "queue"."""
    error: PenstockError


class Diverted(msgspec.Struct, frozen=True):
    """It should arrive again at another model, with its prompt made anew for that one.

    Nothing of it is left.
    """

    id: RequestId
    route: str
    why: DowngradeReason


class Start(msgspec.Struct, frozen=True, gc=False):
    """Send it to this worker now."""

    id: RequestId
    route: str
    worker_id: WorkerId
    priority: int
    """The band's order: what the engine's own queue goes by."""
    attempt: int
    takes_row: bool = False
    """Its tenant runs nothing else of the model: our engine lets it have a row of another one."""
    beside: bool = False
    """The attempt before it runs on: tell `won` which of them has output first, or `lost` which of them
    failed."""


class Abort(msgspec.Struct, frozen=True, gc=False):
    """Stop it on its worker; tell `ended` when the worker's last word has come."""

    id: RequestId
    worker_id: WorkerId
    attempt: int = 0
    """Of two attempts the one that is dropped: it holds nothing any more, and nothing that it says counts. 0:
    all there is."""


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A budget is used up: end the answer here with this finish reason, abort it, and tell `ended`."""

    id: RequestId
    worker_id: WorkerId
    finish_reason: str = "budget"


class GiveUp(msgspec.Struct, frozen=True):
    """Its attempt takes too long, and the request can go on elsewhere: end that attempt as failed."""

    id: RequestId
    error: PenstockError


class FallBack(msgspec.Struct, frozen=True, gc=False):
    """It waits for a model that has no worker any more, and another model could answer: make its prompt anew
    for that one, and `move` it. Until then, or if that is refused, it waits on.
    """

    id: RequestId
    route: str
    why: DowngradeReason


class Requeued(msgspec.Struct, frozen=True, gc=False):
    """It waits again, for another attempt. Call `dispatch` now."""

    id: RequestId
    attempts: int
    migrates: bool = False
    """It goes on behind what it has given, and does not begin anew."""


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
