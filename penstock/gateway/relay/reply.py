"""The streams behind one client's request, from their start to their one common end.

A request for n choices is n streams on a worker. A `Reply` starts them, aborts them all when the client
leaves or one of them fails, and settles exactly once. How output reaches the client is the business
of its subclasses, `StreamReply` in relay.py and `WholeReply` in collect.py.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.backends.base import Backend, Finish, GenerateRequest, Generation, Sink
from penstock.clock import Clock
from penstock.errors import Draining, Overloaded, PenstockError, WorkerError
from penstock.gateway.http.exchange import Exchange, outcome_of
from penstock.gateway.relay.race import Race, Racer
from penstock.policy.flow import DowngradeReason
from penstock.policy.lifecycle.driver import may_try_again
from penstock.policy.request import Request
from penstock.protocol.stream import StreamHead
from penstock.rng import IdSource
from penstock.telemetry.catalog import OutcomeLabel
from penstock.types import FinishReason, Usage

P = ParamSpec("P")
T = TypeVar("T")
_OUTCOMES: Mapping[FinishReason, OutcomeLabel] = {
    FinishReason.STOP: OutcomeLabel.STOP,
    FinishReason.LENGTH: OutcomeLabel.LENGTH,
    FinishReason.TOOL_CALLS: OutcomeLabel.TOOL_CALLS,
    FinishReason.CONTENT_FILTER: OutcomeLabel.CONTENT_FILTER,
    FinishReason.BUDGET: OutcomeLabel.BUDGET,
}


class ReplyListener(Protocol):
    """Decides about a reply: when it starts, whether it continues, and what follows when it is over."""

    def on_first_output(self, reply: "Reply") -> None:
        """The first output of any choice is here."""
        ...

    def on_tokens(self, reply: "Reply") -> None:
        """`reply.num_produced` has reached `reply.next_slice`.

        May end the reply; sets the next slice if it does not.
        """
        ...

    def on_attempt_failed(self, reply: "Reply", error: PenstockError) -> bool:
        """The worker failed, and another one can begin again or continue.

        True: `start` is called again, later, with what `remaining` says; False: the reply fails.
        """
        ...

    def on_hedge_won(self, reply: "Reply", attempt: int) -> None:
        """Of two attempts that run at once this one has output first; the other must be aborted."""
        ...

    def on_hedge_lost(self, reply: "Reply", attempt: int, error: PenstockError | None) -> None:
        """Of two attempts this one failed, or was aborted; the other continues."""
        ...

    def on_client_left(self, reply: "Reply") -> None:
        """The client is gone; the reply ends as soon as nothing of it runs."""
        ...

    def on_bug(self, reply: "Reply", error: Exception) -> None:
        """A sink could not pass its output on; the reply fails."""
        ...

    def on_ended(self, reply: "Reply") -> None:
        """Nothing of this reply runs any more. Called exactly once."""
        ...


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of a reply."""

    exchange: Exchange
    clock: Clock
    listener: ReplyListener
    head: StreamHead
    ids: IdSource


FallBackTo = Callable[[Request, str, DowngradeReason], Awaitable[None]]
"""Called with the request, the other model and why."""


class StreamSlots:
    """Counts the streams that wait or run in this gateway, and refuses one too many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    def check(self, num: int) -> None:
        """Refuse what there is no room for.

        Raises:
            Overloaded: there is no room for all `num` of them.
        """
        if self.taken + num > self._limit:
            raise Overloaded(
                f"The server is at its bound of {self._limit} concurrent streams. Try again shortly."
            )

    def take(self, num: int) -> None:
        """Take `num` at once, after `check`."""
        self.taken += num

    def give_back(self, num: int) -> None:
        """The streams are over."""
        self.taken -= num
        assert self.taken >= 0, self.taken


class Reply:
    """All streams of one request.

    Waits until it is started; ends once: completed, stopped, failed, or the client left.
    """

    __slots__ = (
        "_broken", "_generations", "_is_over", "_live", "_race", "_resume", "_settled", "_stopped",
        "_waiting", "clock", "error", "exchange", "fall_back", "head", "ids", "listener", "next_slice",
        "num_produced", "streams",
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        self.exchange, self.clock, self.listener = context.exchange, context.clock, context.listener
        self.head, self.ids = context.head, context.ids
        self.error: Exception | None = None
        """The error that ended it, if it failed."""
        self.streams: Sequence[tuple[GenerateRequest, Sink]] = ()
        """One for each choice, until it has ended."""
        self.fall_back: FallBackTo | None = None
        """Makes its prompt for another model and moves it there, while it waits; None: no model falls
        back."""
        self.num_produced = 0
        """Tokens of all choices so far."""
        self.next_slice: float = math.inf
        """The listener is called when so many were produced."""
        self._generations: list[Generation] = []
        self._live = 0
        self._waiting = True
        """Not started, or between two attempts."""
        self._is_over = False
        self._settled = False
        self._stopped: FinishReason | None = None
        self._broken: PenstockError | None = None
        self._race: Race | None = None
        """Set while it is one stream that may be started a second time, beside the first."""
        self._resume: dict[int, tuple[int, ...]] = {}
        """Choices that were broken off -> their answers so far, from which another worker can continue."""
        self.exchange.on_disconnect = self._client_left

    @property
    def request(self) -> Request | None:
        """The request that it answers, since flow control accepted it."""
        return self.exchange.request

    @property
    def is_over(self) -> bool:
        """Whether its end is decided; streams may still be settling."""
        return self._is_over

    def first_usage(self) -> Usage | None:
        """The worker's report with the first output, of a request that is one stream; of several it is no
        one's time.
        """
        return self._generations[0].usage if len(self._generations) == 1 else None

    def remaining(self) -> Sequence[tuple[GenerateRequest, Sink]]:
        """The streams to start now: those that are not over, behind what the client has seen of each."""
        if self.exchange.first_ns is None:
            return self.streams
        resume = self._resume
        return [
            (replace(request, resumed=resume[i]), sink)
            for i, (request, sink) in enumerate(self.streams)
            if i in resume
        ]

    def start(
        self, backend: Backend, streams: Sequence[tuple[GenerateRequest, Sink]], *, race: int = 0
    ) -> None:
        """Start every stream. If one cannot start, none runs; the listener says what happens then.

        With `race` it is one stream, the attempt of that number, and `start_hedge` may follow.
        """
        assert self._waiting, "it runs already"
        self._race = None
        if race:
            self._race, ((request, sink),) = self._new_race(), streams
            racer = self._race.enter(sink, race)
            streams = [(request, racer.as_sink())]
        if not self.exchange.is_open:
            self._over(OutcomeLabel.ABORT)  # The client left while its prompt was tokenized.
        self._generations.clear()
        for request, sink in streams:
            if self._is_over or self._broken is not None:
                break
            self._live += 1
            try:
                generation = backend.generate(request, sink)
            except (WorkerError, Overloaded) as error:
                self._live -= 1
                self._break(error, can_resume=True)  # The tokens from which it was to continue here.
                break
            except BaseException:
                self._live -= 1
                self._waiting = False
                raise
            self._generations.append(generation)
            if isinstance(sink, Racer):
                sink.generation = generation
        self._waiting = False
        if self._is_over or self._broken is not None:
            self._abort_all()
        if not self._live:
            self._settle_if_idle()

    def start_hedge(self, backend: Backend, request: GenerateRequest, sink: Sink, *, attempt: int) -> None:
        """Start its one stream a second time: the one that has output first counts."""
        assert self._race is not None, "it was not started so"
        if self._is_over or self._broken is not None:
            self.listener.on_hedge_lost(self, attempt, None)
            return
        racer = self._race.enter(sink, attempt)
        try:
            generation = backend.generate(request, racer.as_sink())
        except (WorkerError, Overloaded) as error:
            self._race.leave(racer)
            self.listener.on_hedge_lost(self, attempt, error)
            return
        racer.generation = generation
        self._generations.append(generation)

    def first_output(self) -> None:
        """A choice has its first output."""
        if self.exchange.first_ns is None:
            self.exchange.first_ns = self.clock.now_ns()
            self.listener.on_first_output(self)

    def count(self, num_tokens: int) -> None:
        """A choice has new tokens (called by sinks, after they were passed on)."""
        self.num_produced += num_tokens
        if self.num_produced >= self.next_slice:
            self.listener.on_tokens(self)

    def thought(self, num_tokens: int) -> None:
        """So many more tokens are reasoning (called by sinks)."""
        if num_tokens:
            exchange = self.exchange
            exchange.reasoning_tokens = max(0, exchange.reasoning_tokens) + num_tokens

    def ended(self, finish: Finish) -> Finish:
        """A stream's end as the client sees it: what the listener stopped did not fail (called by sinks first
        of all).
        """
        if finish.reason is FinishReason.ABORT and self._stopped is not None:
            return Finish(reason=self._stopped, usage=finish.usage)
        return finish

    def choice_finished(self, index: int, finish: Finish) -> None:
        """A stream is over (called by its sink)."""
        self._live -= 1
        exchange = self.exchange
        if exchange.request is not None:
            exchange.request.stream_ended(index, finish.usage)
        if index == 0 and exchange.outcome is None:  # It stands for all, if nothing worse happens.
            exchange.outcome = _OUTCOMES.get(finish.reason)
        if self._resume:
            self._resume.pop(index, None)
        if finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            if finish.resume is not None:
                self._resume[index] = finish.resume
            error = finish.error or Draining("The request was cancelled by the server.")
            self._break(error, can_resume=finish.resume is not None)
        self._settle_if_idle()

    def fail(self, error: Exception) -> None:
        """End with an error, if nothing has ended it yet.

        One that is not ours is a bug: the client hears no details.
        """
        if self._is_over:
            return
        self.error = self.exchange.error = error
        self._over(outcome_of(error))
        self._abort_all()
        self.send_error(error)
        self._settle_if_idle()

    def guarded(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Called by a sink with a model's text. None: it met a bug, which ended this reply alone, and not
        its worker's connection, on which others wait.
        """
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - what a model writes must not end other streams.
            self.listener.on_bug(self, error)
            self.fail(error)
            return None

    def give_up(self, error: PenstockError) -> None:
        """The attempt that runs has given nothing for too long: it has failed."""
        if not self._waiting:
            self._break(error, can_resume=False)

    def move_off(self, error: PenstockError) -> None:
        """Every choice that runs continues on another worker."""
        if not self._waiting and self._stopped is None:
            self._break(error, can_resume=True)

    def stop(self, reason: FinishReason) -> None:
        """End every choice now with `reason`, as a good end with what there is."""
        if self._is_over:
            return
        self._stopped = reason
        self._abort_all()

    def pause_reading(self) -> bool:
        """Read no more from the workers, if that can be done with each stream; None are there between two
        attempts.
        """
        return all(generation.pause_reading() for generation in self._generations)

    def resume_reading(self) -> None:
        """Read again from those that were held."""
        for generation in self._generations:
            generation.resume_reading()

    def heartbeat(self, ticks: int) -> None:
        """Called now and then; a reply that streams shows that it lives after `ticks` silent calls."""

    def complete(self) -> None:
        """Every choice ended well: send what is left."""
        raise NotImplementedError

    def send_error(self, error: Exception) -> None:
        """Tell the client that its request failed."""
        raise NotImplementedError

    def _break(self, error: PenstockError, *, can_resume: bool) -> None:
        """The worker failed: another attempt, if the error allows it. All choices move together."""
        if self._is_over:
            return
        if not may_try_again(error, has_begun=self.exchange.first_ns is not None, can_resume=can_resume):
            self.fail(error)
        elif self._broken is None:
            self._broken = error
            self._abort_all()

    def _settle_if_idle(self) -> None:
        if self._live > 0 or self._settled or (self._waiting and not self._is_over):
            return
        if self._broken is not None and not self._is_over:
            error, self._broken, self._waiting = self._broken, None, True
            if self.listener.on_attempt_failed(self, error):
                return
            self.fail(error)
            return
        self._settled = True
        self.exchange.ended_ns = self.clock.now_ns()
        is_complete, self._is_over = not self._is_over, True
        self.listener.on_ended(self)  # First: what the client was told has been written down.
        if is_complete:
            self.complete()
        self._generations.clear()  # Their sinks lead back here.

    def abort_attempt(self, attempt: int) -> None:
        """Of two attempts this one counts no more."""
        racer = self._race.loser(attempt) if self._race is not None else None
        if racer is not None and racer.generation is not None:
            self._generations.remove(racer.generation)
            racer.generation.abort()

    def abort(self) -> None:
        """End whatever runs; what it ends as was said before, or follows from how the streams end."""
        if not self._is_over and self._stopped is None:
            self._abort_all()

    def _new_race(self) -> Race:
        listener = self.listener

        def won(winner: Racer) -> None:
            listener.on_hedge_won(self, winner.attempt)

        def lost(loser: Racer, finish: Finish) -> None:
            if loser.generation is not None:
                self._generations.remove(loser.generation)
            listener.on_hedge_lost(self, loser.attempt, finish.error)

        return Race(on_won=won, on_lost=lost)

    def _client_left(self) -> None:
        if not self._is_over:
            self._over(OutcomeLabel.ABORT)
            self.listener.on_client_left(self)
            self._abort_all()
            self._settle_if_idle()

    def _over(self, outcome: OutcomeLabel) -> None:
        self._is_over = True
        self.exchange.outcome = outcome

    def _abort_all(self) -> None:
        for generation in list(self._generations):
            generation.abort()
