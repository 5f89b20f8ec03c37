"""The streams behind one client's request, from their start to their one common end.

A request for n choices is n streams on a worker. A `Reply` starts them, aborts them all when the client
leaves or one of them fails, and settles exactly once. How output reaches the client is the business
of its subclasses, `StreamReply` in relay.py and `WholeReply` in collect.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.backends.base import Backend, Finish, GenerateRequest, Generation, Sink
from penstock.clock import Clock
from penstock.errors import Draining, EngineFault, Overloaded, PenstockError, WorkerError
from penstock.gateway.exchange import Exchange
from penstock.gateway.tally import Tally, outcome_of
from penstock.protocol.stream import StreamHead
from penstock.rng import IdSource
from penstock.telemetry.catalog import Outcome
from penstock.types import FinishReason


class Settle(Protocol):
    """Who wants to know when a reply is over."""

    def settled(self, reply: "Reply") -> None:
        """Nothing of this reply runs any more. Called exactly once."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Context:
    """What a reply is given."""

    exchange: Exchange
    tally: Tally
    clock: Clock
    owner: Settle
    head: StreamHead
    ids: IdSource


class StreamSlots:
    """Counts the streams that run in this gateway, and refuses one too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def take(self, num: int) -> None:
        """Take `num` at once.

        Raises:
            Overloaded: there is no room for all of them.
        """
        if self.taken + num > self._most:
            raise Overloaded(
                f"The server is at its bound of {self._most} concurrent streams. Try again shortly."
            )
        self.taken += num

    def give_back(self, num: int) -> None:
        """The streams are over."""
        self.taken -= num
        assert self.taken >= 0, self.taken


class Reply:
    """All streams of one request. Ends once: completed, failed, or the client left."""

    __slots__ = ("_generations", "_is_over", "_live", "_settled", "_starting", "context", "exchange", "tally")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.exchange = context.exchange
        self.tally = context.tally
        self._generations: list[Generation] = []
        self._live = 0
        self._starting = True
        self._is_over = False
        self._settled = False
        self.exchange.on_disconnect = self._client_left

    def start(self, backend: Backend, streams: Sequence[tuple[GenerateRequest, Sink]]) -> None:
        """Start every stream. If one cannot start, none runs and the client gets the error."""
        if not self.exchange.is_open:
            self._over(Outcome.ABORT)  # The client left while its prompt was tokenized.
        for request, sink in streams:
            if self._is_over:
                break
            self._live += 1
            try:
                generation = backend.generate(request, sink)
            except (WorkerError, Overloaded) as error:
                self._live -= 1
                self.fail(error)
                break
            self._generations.append(generation)
        self._starting = False
        if self._is_over:
            self._abort_all()
        self._settle_if_idle()

    def first_output(self) -> None:
        """A choice has its first output."""
        if self.tally.first_ns is None:
            self.tally.first_ns = self.context.clock.now_ns()

    def choice_finished(self, index: int, finish: Finish) -> None:
        """A stream is over (called by its sink)."""
        self._live -= 1
        self.tally.finished(index, finish.reason, finish.usage)
        if finish.reason is FinishReason.ERROR:
            self.fail(finish.error or EngineFault("The engine failed this request."))
        elif finish.reason is FinishReason.ABORT:
            self.fail(Draining("The request was cancelled by the server."))
        self._settle_if_idle()

    def fail(self, error: PenstockError) -> None:
        """End with an error, if nothing has ended it yet."""
        if self._is_over:
            return
        self._over(outcome_of(error))
        self._abort_all()
        self.send_error(error)

    def heartbeat(self, ticks: int) -> None:
        """Called now and then; a reply that streams shows that it lives after `ticks` silent calls."""

    def complete(self) -> None:
        """Every choice ended well: send what is left."""
        raise NotImplementedError

    def send_error(self, error: PenstockError) -> None:
        """Tell the client that its request failed."""
        raise NotImplementedError

    def _settle_if_idle(self) -> None:
        if self._starting or self._live > 0 or self._settled:
            return
        self._settled = True
        self.tally.ended_ns = self.context.clock.now_ns()
        if not self._is_over:
            self._is_over = True
            self.complete()
        self.context.owner.settled(self)

    def _client_left(self) -> None:
        if not self._is_over:
            self._over(Outcome.ABORT)
            self._abort_all()

    def _over(self, outcome: Outcome) -> None:
        self._is_over = True
        self.tally.outcome = outcome

    def _abort_all(self) -> None:
        for generation in self._generations:
            generation.abort()
