"""One request's life as a state machine without I/O: events in, actions out.

    arrive ──> QUEUED ──dispatch──> STARTED ──first output──> STREAMING ──finish, fail──> ENDED
                │ ^                    │                          │                         ^
                │ ├───────migrate──────┼──────────────────────────┤                         │
                │ └───────retry────────┤                          │                         │
                evict, cancel, fail    cancel, evict, stop ───────┴──> STOPPING ──finish, fail
                v
               ENDED                STARTED ──hedge──> RACING ──drop──> STARTED

A life begins when the request is accepted. Whoever is *rejected* has none: `FlowControl.arrive` answers `Refused`, in the same call in
which it came, and nothing of it is left that could end or be settled. (Most rejections, of a key, a body, an allowlist, come before anything
could be queued; and who is diverted arrives again elsewhere, and must not have lived twice.) So a flow is one accepted request, one
settlement and one record: nobody has to ask which of them count.

A request that runs on a worker ends when the worker says so: whoever wants it to end earlier (the client left, the
budget is used up, memory ran out) makes it STOPPING, the driver aborts it there, and the worker's last word has the exact
counts. So nothing is settled from a guess, and nothing twice. One that has streamed and whose worker died waits again at its
old place (MIGRATE) and goes on behind its last token; it is the same request, with one end and one record. One that has no output for long may be started on a second worker (HEDGE);
whatever happens then, one of the two attempts is dropped first. Time is handed in; nothing here knows clocks or sockets.
"""

import enum
from collections.abc import Sequence

import msgspec

from penstock.policy.record import Outcome, UsageRecord
from penstock.policy.tenant import NOBODY, Degrade, Tenant
from penstock.types import RequestId, Usage, WorkerId


class State(enum.IntEnum):
    """Where a request is."""

    QUEUED = 0
    STARTED = 1
    """On a worker that has sent nothing yet: it may still be tried on another, or moved if an earlier one had begun."""
    RACING = 2
    """On two workers that have sent nothing yet: it goes on on one of them."""
    STREAMING = 3
    STOPPING = 4
    """Told to end; the worker's last word is awaited."""
    ENDED = 5


class Event(enum.IntEnum):
    """What happens to a request."""

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
    """Its worker failed after output, and another one can go on behind it."""
    HEDGE = 10
    """It has waited long for its first output, and is started on another worker too."""
    DROP = 11
    """One of two attempts is over: the other had output first, or it failed, or both are to end."""
    MOVE = 12
    """Its model has no worker any more, and another one is to answer."""


class Action(enum.IntEnum):
    """What the driver of the machine must do."""

    ENQUEUE = 0
    LEAVE = 1
    """Take it out of the queue."""
    START = 2
    ABORT = 3
    """Tell the worker to stop; FINISH or FAIL follows."""
    RELEASE = 4
    """It holds nothing of its worker any more."""
    SETTLE = 5
    """Count what it used: exactly once."""


_ABORT, _END, _LEAVE = (
    (Action.ABORT,),
    (Action.RELEASE, Action.SETTLE),
    (Action.LEAVE, Action.SETTLE),
)

TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (State.QUEUED, Event.DISPATCH): (State.STARTED, (Action.START,)),
    (State.QUEUED, Event.MOVE): (State.QUEUED, (Action.LEAVE, Action.ENQUEUE)),
    (State.QUEUED, Event.CANCEL): (State.ENDED, _LEAVE),
    (State.QUEUED, Event.EVICT): (State.ENDED, _LEAVE),
    (State.QUEUED, Event.FAIL): (State.ENDED, _LEAVE),
    (State.STARTED, Event.RETRY): (State.QUEUED, (Action.RELEASE, Action.ENQUEUE)),
    (State.STARTED, Event.MIGRATE): (State.QUEUED, (Action.RELEASE, Action.ENQUEUE)),
    (State.STARTED, Event.FIRST_OUTPUT): (State.STREAMING, ()),
    (State.STARTED, Event.HEDGE): (State.RACING, (Action.START,)),
    (State.RACING, Event.DROP): (
        State.STARTED,
        (Action.ABORT, Action.RELEASE),
    ),  # First of all, whatever happens.
    (State.STARTED, Event.CANCEL): (State.STOPPING, _ABORT),
    (State.STARTED, Event.EVICT): (State.STOPPING, _ABORT),
    (State.STARTED, Event.STOP): (State.STOPPING, _ABORT),
    (State.STARTED, Event.FINISH): (State.ENDED, _END),  # An answer without a token.
    (State.STARTED, Event.FAIL): (State.ENDED, _END),
    (State.STREAMING, Event.FIRST_OUTPUT): (State.STREAMING, ()),  # Another of its choices.
    (State.STREAMING, Event.OUTPUT): (State.STREAMING, ()),
    (State.STREAMING, Event.MIGRATE): (State.QUEUED, (Action.RELEASE, Action.ENQUEUE)),
    (State.STREAMING, Event.CANCEL): (State.STOPPING, _ABORT),
    (State.STREAMING, Event.EVICT): (State.STOPPING, _ABORT),
    (State.STREAMING, Event.STOP): (State.STOPPING, _ABORT),
    (State.STREAMING, Event.FINISH): (State.ENDED, _END),
    (State.STREAMING, Event.FAIL): (State.ENDED, _END),
    # Under way before the worker heard of it, or said by two who do not know of each other.
    (State.STOPPING, Event.FIRST_OUTPUT): (State.STOPPING, ()),
    (State.STOPPING, Event.OUTPUT): (State.STOPPING, ()),
    (State.STOPPING, Event.CANCEL): (State.STOPPING, ()),
    (State.STOPPING, Event.EVICT): (State.STOPPING, ()),
    (State.STOPPING, Event.STOP): (State.STOPPING, ()),
    (State.STOPPING, Event.FINISH): (State.ENDED, _END),
    (State.STOPPING, Event.FAIL): (State.ENDED, _END),
    (State.ENDED, Event.FIRST_OUTPUT): (State.ENDED, ()),
    (State.ENDED, Event.OUTPUT): (State.ENDED, ()),
    (State.ENDED, Event.CANCEL): (State.ENDED, ()),
    (State.ENDED, Event.EVICT): (State.ENDED, ()),
    (State.ENDED, Event.STOP): (State.ENDED, ()),
}
"""(state, event) -> (next state, actions). What is not here is a bug of the driver, and asserts."""

_MOVES = [[TABLE.get((state, event)) for event in Event] for state in State]
"""The same by index: two list look-ups per event."""

_OUTCOME = {
    Event.CANCEL: Outcome.CANCELLED,
    Event.EVICT: Outcome.EVICTED,
    Event.STOP: Outcome.FINISHED,
    Event.FINISH: Outcome.FINISHED,
    Event.FAIL: Outcome.FAILED,
}
"""How a request ends by the first event that decides it."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A parsed and counted request, as it comes to `FlowControl.arrive`."""

    id: RequestId
    """Unique for all time: the ledger knows the request by it."""
    tenant: Tenant = NOBODY
    route: str
    """The model that shall answer: the name of a pool of workers."""
    requested_model: str = ""
    """What the client named; empty is `route`."""
    diverted: str = ""
    """Why it is not that one: what admission or routing said."""
    prompt_tokens: int
    """Of all prompts together."""
    cached_tokens: int = 0
    """Of them, what is expected in a prefix cache."""
    max_tokens: int
    """Of one choice."""
    choices: int = 1
    """Streams that it takes on a worker: prompts times choices of each."""
    num_bytes: int = 0
    """Memory that it holds while it waits: its body and its prompt tokens."""
    max_wait_ns: int = 0
    """Longest wait in the queue; 0 is the band's own."""
    first_token_ns: int = 0
    """The longest that the client waits for its first token, from now: for admission, and for bands in order of deadlines; 0 says nothing."""
    degrade: Degrade | None = None
    """Whether a smaller model may answer, as the request says; None leaves it to the tenant."""
    needs_tools: bool = False
    needs: frozenset[str] = frozenset()
    """Capabilities that its worker must have (`types.Capability`)."""
    context_tokens: int = 0
    """Of one choice: its prompt and the answer that the client asks for; 0 is the prompt alone."""
    endpoint: str = "chat"
    adapter: str = ""
    session: str = ""
    """Names the conversation, keyed by tenant: requests of one session tend to share a prefix; empty: none was named."""
    prompts: Sequence[Sequence[int]] = ()
    """The prompts' tokens, by reference: looked at only when something has gone wrong. Empty: nobody told."""
    keys: object | None = None
    """The prompt's block keys (`kv.prompt_keys.PromptKeys`): what the placement asks the prefix index about."""
    key_prefix: str = ""
    user: str = ""


class Flow:
    """One accepted request: what it is, where it is, and the times and counts that its usage record is made of."""

    __slots__ = (
        "arrival", "arrived_ns", "attempts", "cached_tokens", "completion_tokens", "cost_micros",
        "dispatched_ns", "ended_ns", "error", "finish_reason", "first_output_ns", "migrations", "outcome", "predicted_ns", "prompt_tokens", "queue_ns", "queued_ns",
        "reason", "state", "usage", "worker",
    )  # fmt: skip

    def __init__(self, arrival: Arrival, now_ns: int) -> None:
        self.arrival = arrival
        self.reason = ""
        self.predicted_ns = 0
        """Its time to first token as it was expected when it came; 0: it was not."""
        """Why it was evicted."""
        self.state = State.QUEUED
        self.arrived_ns = self.queued_ns = now_ns
        self.dispatched_ns = self.first_output_ns = self.ended_ns = -1
        """Of the last time that it was dispatched, as `queued_ns` is of the last that it was queued; -1: never."""
        self.queue_ns = 0
        """Time in the queue, all visits together."""
        self.attempts = 0
        self.migrations = 0
        """Of them, those that went on behind what another worker had given, or were to."""
        self.worker = WorkerId("")
        self.cached_tokens = arrival.cached_tokens
        """Expected, then as reported."""
        self.completion_tokens = 0
        """As reported until now, all choices together."""
        self.prompt_tokens = 0
        """What counts of the prompt, set at the end: all of it, or nothing if no worker gave anything for it."""
        self.cost_micros = 0
        """By the price list, set at the end."""
        self.usage: Usage | None = None
        """The worker's own last word."""
        self.outcome: Outcome | None = None
        """Set by the event that decides it, which may be before the end."""
        self.error = self.finish_reason = ""

    @property
    def id(self) -> RequestId:
        """The request's name."""
        return self.arrival.id

    @property
    def has_begun(self) -> bool:
        """Whether the client may have seen something of the answer: it is never started from its beginning again."""
        return self.first_output_ns >= 0

    def on(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        """Take one event; what must be done is returned. Events that race by nature change nothing after the end.

        An event that the table does not have asserts.
        """
        move = _MOVES[self.state][event]
        assert move is not None, f"{self.arrival.id}: {event.name} in {self.state.name}"
        was, (state, actions) = self.state, move
        self.state = state
        if state is not was:
            if was is State.QUEUED:
                self.queue_ns += now_ns - self.queued_ns
            self.migrations += event is Event.MIGRATE
            if self.outcome is None and event in _OUTCOME:
                self.outcome = _OUTCOME[event]
            if event is Event.DISPATCH:
                self.dispatched_ns = now_ns
            self.attempts += Action.START in actions
            self._stamp(state, now_ns)
        return actions

    def _stamp(self, state: State, now_ns: int) -> None:
        if state is State.QUEUED:
            self.queued_ns = now_ns
        elif state is State.STREAMING:
            if self.first_output_ns < 0:
                self.first_output_ns = now_ns
        elif state is State.ENDED:
            self.ended_ns = now_ns

    def record(self, wall_ns: int) -> UsageRecord:
        """The facts for the ledger, of a request that has ended; `wall_ns` is the date of the end.

        The share of the accelerators' cost is not here: whoever knows it adds it. Times are the worker's own where it tells them.
        """
        arrival, usage = self.arrival, self.usage or Usage()
        assert self.state is State.ENDED, f"{arrival.id} has not ended"
        assert self.outcome is not None, "the event that ended it decided how"
        started, first = self.dispatched_ns, self.first_output_ns
        ran_until = first if first >= 0 else self.ended_ns
        if self.queued_ns > started:
            ran_until = min(ran_until, self.queued_ns)  # It ended while it waited for another attempt.
        prefill_ns = max(0, ran_until - started) if started >= 0 else 0
        # A wait in the middle of the answer is in the queue's time.
        rest_ns = self.ended_ns - self.arrived_ns - self.queue_ns - prefill_ns
        decode_ns = min(self.ended_ns - first, rest_ns) if first >= 0 else 0
        return UsageRecord(
            request_id=arrival.id,
            ended_ns=wall_ns,
            tenant=arrival.tenant.id,
            tier=arrival.tenant.tier,
            key_prefix=arrival.key_prefix,
            user=arrival.user,
            endpoint=arrival.endpoint,
            requested_model=arrival.requested_model or arrival.route,
            served_model=arrival.route,
            route_reason=arrival.diverted,
            adapter=arrival.adapter,
            worker=self.worker,
            band=arrival.tenant.band,
            outcome=self.outcome,
            finish_reason=self.finish_reason,
            error=self.error,
            choices=arrival.choices,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            attempts=self.attempts,
            queue_us=(self.queue_ns + usage.queue_ns) // 1000,
            prefill_us=(usage.prefill_ns or prefill_ns) // 1000,
            decode_us=(usage.decode_ns or decode_ns) // 1000,
            total_us=(self.ended_ns - self.arrived_ns) // 1000,
            ttft_us=(first - self.arrived_ns) // 1000 if first >= 0 else 0,
            kv_block_us=usage.kv_block_ns // 1000,
            cost_micros=self.cost_micros,
        )
