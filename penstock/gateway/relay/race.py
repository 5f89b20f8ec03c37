"""Two attempts at one stream: both feed the same sink, and only the one that has output first counts.

Which of them, and when there are two, flow control decides (policy/extras/hedging.py); this file only sees to
it that nothing of the other one reaches the client. An attempt that has won costs nothing more: its output
goes straight to the sink.
"""

from collections.abc import Callable
from typing import cast

from penstock.backends.base import Delta, Finish, Generation, Sink
from penstock.types import FinishReason


class Racer:
    """The sink of one attempt."""

    __slots__ = ("_race", "attempt", "generation", "on_delta", "sink")

    def __init__(self, race: "Race", sink: Sink, attempt: int) -> None:
        self._race, self.sink, self.attempt = race, sink, attempt
        self.generation: Generation | None = None
        self.on_delta: Callable[[Delta], None] = self._first
        """See `Sink`."""

    def as_sink(self) -> Sink:
        """The same: an attribute that is a function is a method too, which the type checker does not know."""
        return cast("Sink", self)

    def _first(self, delta: Delta) -> None:
        self._race.won(self)
        self.on_delta = self.sink.on_delta
        self.on_delta(delta)

    def on_finish(self, finish: Finish) -> None:
        """See `Sink`."""
        if self._race.ends(self, finish):
            self.sink.on_finish(finish)


class Race:
    """The attempts at one stream that may still be heard: one, or two until one of them says something."""

    __slots__ = ("_loser", "_on_lost", "_on_won", "_racers")

    def __init__(
        self,
        *,
        on_won: Callable[[Racer], None],
        on_lost: Callable[[Racer, Finish], None],
    ) -> None:
        """Of two attempts, `on_won` is called with the one that was first, `on_lost` with one that failed or
        was aborted before that.
        """
        self._on_won, self._on_lost = on_won, on_lost
        self._racers: list[Racer] = []
        self._loser: Racer | None = None

    def enter(self, sink: Sink, attempt: int) -> Racer:
        """Another attempt at the stream that goes to `sink`."""
        assert len(self._racers) < 2, "two at most"
        racer = Racer(self, sink, attempt)
        self._racers.append(racer)
        return racer

    def leave(self, racer: Racer) -> None:
        """It could not be started."""
        self._racers.remove(racer)

    def won(self, racer: Racer) -> None:
        """It has its first output, or ends well without any."""
        if len(self._racers) == 2:
            (loser,) = (each for each in self._racers if each is not racer)
            self._racers.remove(loser)
            loser.on_delta = _unheard
            self._loser = loser
            self._on_won(racer)

    def loser(self, attempt: int) -> Racer | None:
        """That attempt, if another one has won against it."""
        return self._loser if self._loser is not None and self._loser.attempt == attempt else None

    def ends(self, racer: Racer, finish: Finish) -> bool:
        """An attempt is over; whether that is the end of the stream."""
        if racer not in self._racers:
            return False
        if len(self._racers) == 2:
            if finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._racers.remove(racer)
                self._on_lost(racer, finish)
                return False
            self.won(racer)
        return True


def _unheard(delta: Delta) -> None:
    """Output that comes too late."""
