"""A TCP port that is ours from before a worker listens on it until long after: it keeps its address when it
restarts.

A free port that is looked up and let go may be somebody else's a moment later. So a socket is bound to it
with SO_REUSEPORT and never listens: the kernel gives the port to nobody but processes of the same user that
ask for it in the same way, and sends connections only to sockets that listen.
"""

import socket

from penstock.protocol.address import TcpAddress


class ReservedPort:
    """One port of this machine. `close` it when no worker needs it any more."""

    def __init__(self, host: str) -> None:
        """`host` is an address (or name) of this machine.

        Raises:
            OSError: it is none, or no port is free.
        """
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(where)
        except OSError:
            self._socket.close()
            raise
        self.address = TcpAddress(host, int(self._socket.getsockname()[1]))

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()
