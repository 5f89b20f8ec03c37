"""How near this process is to its bound on open files (`ulimit -n`), told by the number of a new one.

The kernel gives out the lowest free number (POSIX), so a high one means that all below it are taken, by
whatever: connections, workers, the ledger. A process without any left cannot even accept a connection to
refuse it. So the last numbers are kept: a client that gets one of them is refused with an answer.
"""

import enum
import resource

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
