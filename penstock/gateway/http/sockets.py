"""The kernel's view of connections: whether a peer is still there, what waits at a listening socket, and how
near this process is to its bound on open files (`ulimit -n`).

A FIN says only that nothing more will be sent. RFC 9112 lets a client shut down its sending side and wait for
its answer, and one that has left looks the same until something is sent to it: then its kernel answers with a
reset. Linux tells of a reset in `TCP_INFO`, also for a socket that nothing is read from any more.

The number of a new file tells how near the bound is: the kernel gives out the lowest free one (POSIX), so a
high number means that all below it are taken, by whatever: connections, workers, the ledger. A process
without any left cannot even accept a connection to refuse it. So the last numbers are kept: a client that
gets one of them is refused with an answer.
"""

import contextlib
import ctypes
import enum
import resource
import select
import socket
import struct
import sys
from typing import Protocol

FIRST_LOOK_S = 0.002
"""A reset on the same machine takes microseconds. Later looks are at twice the time each, up to
`LAST_LOOK_S`."""
LAST_LOOK_S = 1.0
PROBES_S = (1.0, 10.0, 60.0)
"""When a client that waits is sent something again: it may leave later. Few, for some clients bound interim
responses."""
_TCP_CLOSE = 7
"""`tcpi_state` of a connection that was reset (Linux, `include/net/tcp_states.h`)."""


class _Socket(Protocol):
    @property
    def family(self) -> int: ...

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def is_gone(found: _Socket | None) -> bool:
    """Whether the peer has reset the connection. False where that cannot be told: the next write will."""
    if sys.platform != "linux" or found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    except OSError:
        return True


def end_when_unacknowledged(found: socket.socket | None, timeout_s: float) -> None:
    """Let the kernel give up a peer that acknowledges nothing: what its send buffer holds is not seen
    here.
    """
    if (
        sys.platform == "linux"
        and timeout_s
        and found is not None
        and found.family in (socket.AF_INET, socket.AF_INET6)
    ):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


_SO_ATTACH_FILTER = 26
_DROP_SYN = b"".join(
    struct.pack("HBBI", *step)
    for step in (
        (0x30, 0, 0, 13),  # Load the byte of TCP's flags.
        (0x45, 0, 1, 0x02),  # SYN?
        (0x06, 0, 0, 0),  # Drop it.
        (0x06, 0, 0, 0xFFFFFFFF),  # Keep all others.
    )
)
"""A packet filter in classic BPF (Linux, `Documentation/networking/filter.rst`)."""


def shut(listener: socket.socket) -> None:
    """Let no further client begin to connect, in whichever process the socket is open; those that have begun
    still come. A client that is shut out asks again after a second, and then finds the port closed, or the
    next server. Where the kernel cannot do that, clients can still connect.
    """
    if sys.platform == "linux" and listener.family in (socket.AF_INET, socket.AF_INET6):
        steps = ctypes.create_string_buffer(_DROP_SYN)
        program = struct.pack("HL", len(_DROP_SYN) // 8, ctypes.addressof(steps))
        with contextlib.suppress(OSError):  # A sandbox may forbid it.
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def has_waiting(listener: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    return bool(poll.poll(0))


RESERVE_MIN, RESERVE_MAX = 16, 256
RESERVE_SHARE = 8
"""One in this many of the allowed files is kept."""


class ConnectionVerdict(enum.Enum):
    """The treatment of a new connection."""

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
