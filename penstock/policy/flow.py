"""A request, and its life as a table: events in, actions out; and what `FlowControl` answers, one struct for
each thing that its driver must do.

`FlowControl` carries out these actions and nothing beside them. The usage record is the end of every accepted
request: what it used, what it cost and how it ended. Exactly one for each, from the flow's own facts; the
sinks in telemetry/ledger* only carry it.

    arrive ──> QUEUED ──dispatch──> STARTED ──first output──> STREAMING ──finish, fail──> ENDED
                │ ^                    │                          │                         ^
                │ ├───────migrate──────┼──────────────────────────┤                         │
                │ └───────retry────────┤                          │                         │
                evict, cancel, fail    cancel, evict, stop ───────┴──> STOPPING ──finish, fail
                v
               ENDED

A life begins when the request is accepted. A *rejected* request has none: `FlowControl.arrive` answers
`Refused` in the same call, and nothing of it is left that could end or be settled. A diverted request arrives
again elsewhere. So there is one settlement and one record for each accepted request.

A request that runs on a worker ends when the worker reports its end. A cancellation, a used-up budget or a
lack of memory makes it STOPPING, the driver aborts it there, and the worker's final report has the exact
counts. So nothing is settled from a guess, and nothing twice. A stream whose worker died waits again at its
old place (MIGRATE) and continues behind its last token: the same request, with one end and one record. Time
is handed in; nothing here knows clocks or sockets.
"""

import enum
from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.errors import PenstockError
from penstock.policy.tenant import ANONYMOUS, Degrade, Tenant
from penstock.types import RequestId, WorkerId

DowngradeReason = Literal[
    "queue_depth",
    "slo",
    "budget",
    "context",
    "complexity",
    "unavailable",
    "failure",
    "timeout",
    "breaker",
    "busy",
]
"""Why another model answers. `budget`: the tenant has used most of its money, and the other one is cheaper;
`context`: the request does not fit the model; `complexity` is the choice of `model: "auto"`; `unavailable`:
the model has no worker; `failure`, `timeout`: it was tried there, and failed or gave nothing in time;
`breaker`, `busy`: its workers are left alone, since they fail or are slow, or have said that they have no
room."""
SLICE_TOKENS = 256
"""Answer tokens that are charged and paid for ahead while a stream runs: one that is over its
budget ends at the next such boundary."""


class State(enum.IntEnum):
    """Where a request is."""

    QUEUED = 0
    STARTED = 1
    """On a worker that has sent nothing yet: it may still be tried on another, or moved if an earlier one had
    begun."""
    STREAMING = 2
    STOPPING = 3
    """Aborted; the worker's final report is awaited."""
    ENDED = 4


class Event(enum.IntEnum):
    """The events of a request."""

    DISPATCH = 0
    RETRY = 1
    """Its worker failed before any output, and it may be tried again."""
    FIRST_OUTPUT = 2
    OUTPUT = 3
    CANCEL = 4
    """The client left."""
    EVICT = 5
    """It waited too long, or gives way."""
    STOP = 6
    """A budget is used up: the answer ends here, as one that is finished."""
    FINISH = 7
    """The worker's last word."""
    FAIL = 8
    MIGRATE = 9
    """Its worker failed after output, and another one can continue behind it."""
    MOVE = 10
    """Its model has no worker any more, and another one is to answer."""


class Step(enum.IntEnum):
    """The steps that `FlowControl` carries out."""

    ENQUEUE = 0
    """Put it in its model's queue."""
    LEAVE = 1
    """Take it out of the queue."""
    RETARGET = 2
    """From here on its facts and holds are those for another model."""
    START = 3
    """Send it to its worker."""
    ABORT = 4
    """Abort it on its worker; FINISH or FAIL follows."""
    COUNT = 5
    """Charge its tenant's fair share with what it used in the end."""
    RELEASE = 6
    """It holds nothing of its worker any more."""
    SETTLE = 7
    """Settle limits and budget, and forget it: exactly once."""


_START, _ABORT, _AGAIN = (Step.START,), (Step.ABORT,), (Step.RELEASE, Step.ENQUEUE)
_END, _LEAVE = (Step.COUNT, Step.RELEASE, Step.SETTLE), (Step.LEAVE, Step.SETTLE)

TABLE: dict[tuple[State, Event], tuple[State, tuple[Step, ...]]] = {
    (State.QUEUED, Event.DISPATCH): (State.STARTED, _START),
    (State.QUEUED, Event.MOVE): (State.QUEUED, (Step.LEAVE, Step.RETARGET, Step.ENQUEUE)),
    (State.QUEUED, Event.CANCEL): (State.ENDED, _LEAVE),
    (State.QUEUED, Event.EVICT): (State.ENDED, _LEAVE),
    (State.QUEUED, Event.FAIL): (State.ENDED, _LEAVE),
    (State.STARTED, Event.RETRY): (State.QUEUED, _AGAIN),
    (State.STARTED, Event.MIGRATE): (State.QUEUED, _AGAIN),
    (State.STARTED, Event.FIRST_OUTPUT): (State.STREAMING, ()),
    (State.STARTED, Event.CANCEL): (State.STOPPING, _ABORT),
    (State.STARTED, Event.EVICT): (State.STOPPING, _ABORT),
    (State.STARTED, Event.FINISH): (State.ENDED, _END),  # An answer without a token.
    (State.STARTED, Event.FAIL): (State.ENDED, _END),
    (State.STREAMING, Event.FIRST_OUTPUT): (State.STREAMING, ()),  # Another of its choices.
    (State.STREAMING, Event.OUTPUT): (State.STREAMING, ()),
    (State.STREAMING, Event.MIGRATE): (State.QUEUED, _AGAIN),
    (State.STREAMING, Event.CANCEL): (State.STOPPING, _ABORT),
    (State.STREAMING, Event.EVICT): (State.STOPPING, _ABORT),
    (State.STREAMING, Event.STOP): (State.STOPPING, _ABORT),
    (State.STREAMING, Event.FINISH): (State.ENDED, _END),
    (State.STREAMING, Event.FAIL): (State.ENDED, _END),
    # Sent before the worker had the abort, or reported twice by parts that do not know of each other.
    (State.STOPPING, Event.FIRST_OUTPUT): (State.STOPPING, ()),
    (State.STOPPING, Event.OUTPUT): (State.STOPPING, ()),
    (State.STOPPING, Event.CANCEL): (State.STOPPING, ()),
    (State.STOPPING, Event.EVICT): (State.STOPPING, ()),
    (State.STOPPING, Event.FINISH): (State.ENDED, _END),
    (State.STOPPING, Event.FAIL): (State.ENDED, _END),
}
"""(state, event) -> (next state, actions), which `FlowControl` carries out. A pair that is not here is a bug
of the driver, and asserts."""


class RequestFacts(msgspec.Struct, frozen=True, eq=False):
    """A parsed and counted request, as it comes to `FlowControl.arrive`.

    Not by keyword alone: one is made for every request, in this order.
    """

    id: RequestId
    """Unique for all time: the ledger knows the request by it."""
    route: str
    """The model that shall answer: the name of a pool of workers."""
    prompt_tokens: int
    """Of all prompts together."""
    max_tokens: int
    """Of one choice."""
    tenant: Tenant = ANONYMOUS
    requested_model: str = ""
    """The model that the client named; empty is `route`."""
    diverted: str = ""
    """Why it is not that one: what admission or routing said."""
    choices: int = 1
    """Streams that it takes on a worker: prompts times choices of each."""
    choices_per_prompt: int = 1
    num_bytes: int = 0
    """Memory that it holds while it waits: its body and its prompt tokens."""
    priority: int = 0
    """Among the requests of its tenant in its band: smaller goes earlier."""
    first_token_ns: int = 0
    """The longest that the client waits for its first token, from now: for admission, and for bands in order
    of deadlines; 0 says nothing."""
    degrade: Degrade | None = None
    """Whether a smaller model may answer, as the request says; None leaves it to the tenant."""
    needs_tools: bool = False
    needs: frozenset[str] = frozenset()
    """Capabilities that its worker must have (`types.Capability`)."""
    context_tokens: int = 0
    """Of one choice: its prompt and the answer that the client asks for; 0 is the prompt alone."""
    is_whole: bool = False
    """Its answer is given when all of it is there: until then its client has nothing."""
    endpoint: str = "chat"
    adapter: str = ""
    session: str = ""
    """Names the conversation, keyed by tenant: requests of one session tend to share a prefix; empty: none
    was named."""
    prompts: Sequence[Sequence[int]] = ()
    """The prompts' tokens, by reference: looked at only when something has gone wrong. Empty: none are
    known."""
    keys: object | None = None
    """The prompt's block keys (`kv.prompt_keys.PromptKeys`): what the placement asks the prefix index
    about."""
    key_prefix: str = ""
    user: str = ""
    held_tokens: int = 0
    """Of its prompts' tokens, those whose KV it holds at once at most; 0: all."""
    cached_tokens: int = 0
    """Of them, what is expected in a prefix cache."""
    max_wait_ns: int = 0
    """Longest wait in the queue; 0 is the band's own."""
    origin: str = ""
    """The peer cell that it came to, where its limits, its budget and its price are kept; empty: this one."""
    origin_id: str = ""
    """Its id there."""


class Queued(msgspec.Struct, frozen=True, gc=False):
    """The request is accepted: exactly one `Settled` will follow. Call `dispatch` now."""

    id: RequestId
    route: str
    predicted_ns: int = 0
    """Its expected time to first token; 0 where none is predicted."""


class Refused(msgspec.Struct, frozen=True):
    """It is not: nothing of it is left. The error has the message, and when to come back."""

    id: RequestId
    reason: str
    """The part that refused it, for metrics: "draining", "quarantine", "no_worker", "admission", "limits",
    "budget", "queue"."""
    error: PenstockError


class Diverted(msgspec.Struct, frozen=True):
    """It should arrive again at another model, with its prompt made for that one.

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
    is_hedge: bool = False
    """The attempt before it keeps running: the first of the two that has output leads, and the other one is
    aborted."""


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
    """Its attempt takes too long, and the request can continue elsewhere: end that attempt as failed."""

    id: RequestId
    error: PenstockError


class FallBack(msgspec.Struct, frozen=True, gc=False):
    """It waits for a model that has no worker any more, and another model could answer: make its prompt for
    that one, and `move` it. Until then, or if that is refused, it waits on.
    """

    id: RequestId
    route: str
    why: DowngradeReason


class Requeued(msgspec.Struct, frozen=True, gc=False):
    """It waits again, for another attempt. Call `dispatch` now."""

    id: RequestId
    attempts: int
    migrates: bool = False
    """It continues behind the tokens that it has given, and does not begin again."""


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
    """The client left. The tokens generated until then count."""


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
    """The request's `user` field."""
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
    origin: str = ""
    """The peer cell that it came to, whose ledger has it too, and bills it; empty: this one."""
    origin_id: str = ""
    """`request_id` over there."""
    recovered: bool = False
    """Written after a crash from what the journal knew: tokens as of the last slice that was settled."""
