"""Messages to the step thread from its process's other threads, and the watch over it.

    socket thread   posts mail: submissions (`request_of` makes a request of one), aborts, orders
    watchdog        looks now and then: work without a new step for longer than the timeout is reported, with
                    every thread's stack, and ends the process
    faulthandler    its thread needs no interpreter lock: should even the watchdog not get to run (native code
                    that keeps the lock), it writes the stacks and ends the process

The queue needs no bound of its own: the server lets in at most `max_running + max_waiting` living requests
(`ServerLimits`), and each can post at most one submission and one abort; a connection subscribes to KV events
at most once. Orders (adapters, sleep) come from operators, one by one.

A process that hangs with its sockets open looks alive to everybody. So it must not hang.
"""

import faulthandler
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from penstock.clock import NS_PER_S, Clock
from penstock.engine.adapters.manager import AdapterRead
from penstock.errors import ClientError, InvalidRequest, PenstockError
from penstock.kv.hashing import PUBLIC, token_array
from penstock.protocol.worker import RequestFinished, Submit, WorkerOrder
from penstock.protocol.worker_parts import INT64_MAX, sampling_problem, weight_of
from penstock.schedule.request import Request
from penstock.types import FinishReason, RequestId, Usage

STATS_INTERVAL_S = 0.5
"""`Stats` go out this often while they change, and not at all while nothing does."""
STATS_INTERVAL_NS = round(STATS_INTERVAL_S * NS_PER_S)
PROOF_TIMEOUT_S = 5.0
"""Where a key is wanted, a connection without a proof is cut after this long,"""
UNPROVEN_MAX = 64
"""and of more than so many at once the oldest one of the address with the most is cut: newcomers may be
gateways."""
UNPROVEN_PER_ADDRESS_MAX = 16
"""The same for one address, so that a stranger's connections cost no one else theirs."""
FLUSH_TIMEOUT_S = 2.0
"""How long the last frames may take to leave when the worker exits."""


@dataclass(slots=True, frozen=True)
class ServerLimits:
    """Bounds on what gateways may leave here."""

    buffer_bytes_max: int
    """Unsent bytes for one connection; over it the connection is dropped."""
    requests_max: int
    """Living requests over all connections; one more is refused as overloaded."""
    key: bytes = field(default=b"", repr=False)
    """The secret that gateways must prove to have before any other message; empty: nothing."""


ConnectionId = int
"""Counts up from 1 over the life of the process; never reused."""


@dataclass(slots=True, frozen=True)
class Submitted:
    """A gateway asks for a new request."""

    connection: ConnectionId
    submit: Submit
    arrived_ns: int
    grammar: object = None
    """The compiled form of `submit.grammar`, where it has one."""


@dataclass(slots=True, frozen=True)
class Aborted:
    """A gateway (or the loss of it) ends these requests."""

    connection: ConnectionId
    request_ids: tuple[RequestId, ...]


@dataclass(slots=True, frozen=True)
class DrainAsked:
    """Finish what runs, then exit."""


@dataclass(slots=True, frozen=True)
class KVEventsAsked:
    """A gateway wants to hear of KV events from this one on."""

    connection: ConnectionId
    epoch: int
    from_sequence: int


@dataclass(slots=True, frozen=True)
class Ordered:
    """A gateway wants an adapter to come, to go or to stay, or the weights to."""

    order: WorkerOrder


Mail = Submitted | Aborted | DrainAsked | KVEventsAsked | Ordered | AdapterRead


class Mailbox:
    """Many threads post; the step thread takes."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[Mail] = SimpleQueue()

    def post(self, mail: Mail) -> None:
        """Leave a message; never blocks."""
        self._queue.put(mail)

    def take(self, *, wait: bool, sleep_s: float | None = None) -> list[Mail]:
        """Everything there is now, in order. With `wait`, block (asleep) until there is something.

        With `sleep_s` too, for this long at most: then there may be nothing.
        """
        mail: list[Mail] = []
        try:
            if wait:
                mail.append(self._queue.get(timeout=sleep_s))
            while True:
                mail.append(self._queue.get_nowait())
        except Empty:
            return mail


_LOOKS = 8
"""How often the watchdog looks within one timeout."""
_LOCKED_OUT = 2.0
"""Timeouts without a look after which the interpreter lock counts as lost."""


def failed_by(error: PenstockError) -> RequestFinished:
    """The end of a request that had none of the engine."""
    return RequestFinished(
        reason=FinishReason.ERROR,
        usage=Usage(),
        error=str(error),
        error_kind=type(error).__name__,
        param=error.param if isinstance(error, ClientError) else None,
    )


class StepWatch:
    """Watches the step loop: whatever a turn of it does, and turns that come to nothing.

        begins ──> (mail, step, telling) ──advanced──> ... ──rests──> asleep, not watched

    It does not matter where a turn hangs (a step, handing its outputs over, taking mail), nor whether it
    does: a scheduler that has requests and plans nothing, turn after turn, is as dead as a kernel that never
    returns. Costs an attribute write and a look at the clock per turn.
    """

    def __init__(self, timeout_s: float, clock: Clock, on_stall: Callable[[str], None]) -> None:
        """`on_stall` is called once, on the watchdog's thread, with what happened in words.

        A timeout of 0 watches nothing.
        """
        self._timeout_s, self._clock, self._on_stall = timeout_s, clock, on_stall
        self._since_ns: int | None = None  # Since when there is work without a new step; None: asleep.
        self._closed = threading.Event()
        if timeout_s > 0:
            # Here too: the first step may take the lock for good before the watchdog has looked once.
            faulthandler.dump_traceback_later(_LOCKED_OUT * timeout_s, exit=True)
            threading.Thread(target=self._look, name="worker-watchdog", daemon=True).start()

    def begins(self) -> None:
        """A turn of the loop begins. Changes nothing if the turn before came to nothing."""
        if self._since_ns is None:
            self._since_ns = self._clock.now_ns()

    def advanced(self) -> None:
        """A step was done, or there is no work for one."""
        self._since_ns = self._clock.now_ns()

    def rests(self) -> None:
        """The loop is about to sleep until something comes in."""
        self._since_ns = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(self._timeout_s / _LOOKS):
            faulthandler.dump_traceback_later(_LOCKED_OUT * self._timeout_s, exit=True)
            since_ns = self._since_ns
            if since_ns is None:
                continue
            age_s = (self._clock.now_ns() - since_ns) / NS_PER_S
            if age_s >= self._timeout_s:
                faulthandler.dump_traceback(all_threads=True)
                self._on_stall(f"steps have not advanced for {age_s:.3g} s (engine.stall_timeout_s)")
                break
        faulthandler.cancel_dump_traceback_later()


def request_of(message: Submit, vocab_size: int, grammar: object) -> Request:
    """The scheduler's view of a submission.

    Raises:
        InvalidRequest: the prompt has tokens that this model lacks, or a parameter is out of its range
            (either would break the whole batch), or the namespace is none that a tenant may have.
    """
    try:
        tokens, resumed = token_array(message.prompt), token_array(message.resumed)
    except ValueError:
        raise InvalidRequest("the prompt is not a whole number of tokens", param="prompt") from None
    for name, known in (("prompt", tokens), ("resumed", resumed)):
        if known and not 0 <= min(known) <= max(known) < vocab_size:
            raise InvalidRequest(f"the {name} has token ids outside 0..{vocab_size - 1}", param=name)
    if message.inputs:
        raise InvalidRequest("this model generates text, and has no vectors", param="inputs")
    if resumed and resumed[-1] in message.sampling.stop_token_ids:
        raise InvalidRequest("what was resumed has come to its stop token", param="resumed")
    if problem := sampling_problem(message.sampling, vocab_size):
        param, reason = problem
        raise InvalidRequest(reason, param=param)
    if not -INT64_MAX <= message.priority <= INT64_MAX:
        raise InvalidRequest("priority is out of range", param="priority")
    if not 0 <= message.public_tokens <= len(tokens):
        raise InvalidRequest(
            f"public_tokens is {message.public_tokens}, but the prompt has {len(tokens)}",
            param="public_tokens",
        )
    if message.cache_salt == PUBLIC:
        raise InvalidRequest("this salt is reserved", param="cache_salt")
    return Request(
        request_id=message.request_id,
        tokens=tokens + resumed,
        num_resumed=len(resumed),
        sampling=message.sampling,
        salt=message.cache_salt,
        public_tokens=message.public_tokens,
        priority=message.priority,
        fairness_key=message.fairness_key,
        fairness_weight=weight_of(message.fairness_weight),
        takes_row=message.takes_row,
        grammar=grammar,
    )
