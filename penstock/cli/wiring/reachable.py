"""The address under which others find a server that listens on all of this machine's."""

import socket

_EVERYWHERE = {
    "0.0.0.0": (socket.AF_INET, "198.51.100.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""For each: an address reserved for documentation (RFC 5737, RFC 3849), and loopback's."""


def reachable(host: str) -> str:
    """`host`, or the address that this machine would send from to the world, where it listens on all; loopback if there is none."""
    if host not in _EVERYWHERE:
        return host
    family, stranger, loopback = _EVERYWHERE[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((stranger, 9))  # Chooses a route; a datagram socket sends nothing here.
            return str(probe.getsockname()[0])
    except OSError:
        return loopback
