"""Callbacks of an HTTP exchange (backends/http/client.py), what may be odd about its answer, and the timer of
all exchanges with one address.
"""

import asyncio
import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.clock import NS_PER_S, Clock


class FailureKind(enum.Enum):
    """The kind of failure that an exchange met."""

    CONNECT = "connect"  # Refused, TLS failed, or it took too long.
    TIMEOUT = "timeout"  # No head, or no progress.
    TOO_LONG = "too_long"  # No end in time.
    BROKEN = "broken"  # The connection ended in the middle.
    MALFORMED = "malformed"  # The bytes that came are not HTTP/1.1.
    TOO_LARGE = "too_large"  # A head or a body over its bound.
    HELD = "held"  # No end in time, and it was this side that did not read.


class Anomaly(enum.StrEnum):
    """Why an answer was odd but usable, or why it could not be used."""

    NO_END = "no_end"  # Ended without the last event.
    NO_FINISH = "no_finish"  # Ended without saying why.
    NO_USAGE = "no_usage"
    USAGE_MISMATCH = "usage_mismatch"  # Its count of tokens is not ours.
    OTHER_MODEL = "other_model"
    OVERRUN = "overrun"  # More tokens than were asked for.
    CORRUPT = "corrupt"  # An event that cannot be read, or is too large.
    NO_STREAM = "no_stream"  # 200, and something that is no stream of events.


@dataclass(slots=True, frozen=True)
class HttpFailure:
    """Why an exchange has no (whole) answer."""

    kind: FailureKind
    message: str


class HttpHandler(Protocol):
    """Takes one answer as it arrives. Must not block or raise."""

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The head; names in lower case, repeated ones joined by commas. Never called with 1xx."""
        ...

    def on_body(self, data: bytes) -> None:
        """More of the body, cut anywhere."""
        ...

    def on_end(self) -> None:
        """The answer is complete."""
        ...

    def on_failure(self, failure: HttpFailure) -> None:
        """It never will be. Instead of `on_end`; nothing follows. Not called after `abort`."""
        ...


class _Nobody:
    """Hears the rest of an answer that is not needed."""

    def on_response(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Not needed."""

    def on_body(self, data: bytes) -> None:
        """Not needed."""

    def on_end(self) -> None:
        """Not needed."""

    def on_failure(self, failure: HttpFailure) -> None:
        """Not needed."""


IGNORING_HANDLER = _Nobody()


class NoConnection(Exception):
    """Every connection that the configuration allows is in use."""


class Timed(Protocol):
    """Something that fails if nothing happens in time."""

    @property
    def until_ns(self) -> int:
        """When, as things stand."""
        ...

    def look(self, now_ns: int) -> None:
        """Fail it if its time is over."""
        ...


LOOK_NS = NS_PER_S // 10
"""Between two looks at everything, unless something begins or goes on that has less time."""
_NEVER = 1 << 62


class Deadlines:
    """One timer for many deadlines that hardly ever come: each would be set and cancelled for nothing.

    Progress moves a deadline and leaves the timer alone: when it fires there is mostly nothing to do but to
    set it again.
    """

    __slots__ = ("_all", "_clock", "_timer", "looks_ns")

    def __init__(self, clock: Clock, all_of_them: Collection[Timed]) -> None:
        """`all_of_them`: those that have not ended, by reference."""
        self._clock, self._all = clock, all_of_them
        self._timer: asyncio.TimerHandle | None = None
        self.looks_ns = _NEVER
        """When the timer fires: a deadline that is later need not be told."""

    def look_by(self, now_ns: int, until_ns: int) -> None:
        """Look at all of them then, or sooner."""
        if until_ns < self.looks_ns:
            self.stop()
            delay_s, self.looks_ns = max(0, until_ns - now_ns) / NS_PER_S, until_ns
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def stop(self) -> None:
        """Do not look any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.looks_ns = None, _NEVER

    def _look(self) -> None:
        """However many deadlines are near, this is called some ten times a second."""
        self._timer, self.looks_ns = None, _NEVER
        now_ns = self._clock.now_ns()
        for each in list(self._all):
            each.look(now_ns)
        if self._all:
            next_ns = min([each.until_ns for each in self._all])
            self.look_by(now_ns, max(next_ns, now_ns + LOOK_NS))
