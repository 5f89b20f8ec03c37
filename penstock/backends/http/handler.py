"""Callbacks of an HTTP exchange (backends/http/client.py)."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class FailureKind(enum.Enum):
    """What kind of failure an exchange met."""

    CONNECT = "connect"  # Refused, TLS failed, or it took too long.
    TIMEOUT = "timeout"  # No head, no progress, or too long in all.
    BROKEN = "broken"  # The connection ended in the middle.
    MALFORMED = "malformed"  # What came is not HTTP/1.1.
    TOO_LARGE = "too_large"  # A head or a body over its bound.
    HELD = "held"  # No end in time, and it was this side that did not read.


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
