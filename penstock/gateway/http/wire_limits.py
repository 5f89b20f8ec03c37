"""Bounds on connections, heads and waits of the HTTP server: constants, which only tests change.

How near this process is to its bound on open files (`ulimit -n`), told by the number of a new one.

The kernel gives out the lowest free number (POSIX), so a high one means that all below it are taken, by
whatever: connections, workers, the ledger. A process without any left cannot even accept a connection to
refuse it. So the last numbers are kept: a client that gets one of them is refused with an answer.
"""

import enum
import resource
from dataclasses import dataclass


@dataclass(slots=True, frozen=True, kw_only=True)
class WireLimits:
    """The same for all connections of a server. What an operator may move is in the section `server`."""

    connections_max: int = 20_000
    """Open connections of one process; one more is closed."""
    header_bytes_max: int = 32 * 1024
    headers_max: int = 100
    """Header fields of one request; clients send about ten."""
    header_timeout_s: float = 15.0
    """From the first byte of a request to the end of its headers."""
    body_timeout_s: float = 60.0
    keepalive_timeout_s: float = 75.0
    """An idle connection is closed after this long: later than the 60 s of common load balancers, so that
    they close first."""
    buffer_bytes_max: int = 1024 * 1024
    """Unsent bytes held for a slow client. Over it a worker that is reached over HTTP has to wait ("pause"),
    and a request at one of ours is aborted."""
    write_timeout_s: float = 30.0
    """A client that takes none of the bytes that wait for it for this long is cut off; 0 never."""
    heartbeat_s: float = 15.0
    """A stream that has sent nothing for this long sends an SSE comment; 0 never."""


WIRE_LIMITS = WireLimits()


RESERVE_MIN, RESERVE_MAX = 16, 256
RESERVE_SHARE = 8
"""One in this many of the allowed files is kept."""


class ConnectionVerdict(enum.Enum):
    """What may be done with a new connection."""

    SERVE = enum.auto()
    REFUSE = enum.auto()
    """Answer, and wait a moment so that the answer arrives."""
    REFUSE_AT_ONCE = enum.auto()
    """Answer and close: the reserve itself is nearly used up."""


def room_of(number: int) -> ConnectionVerdict:
    """For a file of this number."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return ConnectionVerdict.SERVE
    reserve = min(RESERVE_MAX, max(RESERVE_MIN, allowed // RESERVE_SHARE))
    left = allowed - number - 1
    if left >= reserve:
        return ConnectionVerdict.SERVE
    return ConnectionVerdict.REFUSE if left >= reserve // 2 else ConnectionVerdict.REFUSE_AT_ONCE
