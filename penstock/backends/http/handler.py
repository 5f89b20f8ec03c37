"""Callbacks of an HTTP exchange (backends/http/client.py), and what may be odd about its answer."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


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
