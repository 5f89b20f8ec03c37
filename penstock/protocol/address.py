"""Where a worker listens: `unix:/path/to.sock` on this machine, `tcp:host:port` across machines.

Only the notation lives here; `engine/serve_socket.py` listens and `backends/engine/backend.py` connects. What
goes over TCP is neither encrypted nor signed, so the port belongs on a private network; who may connect is a
matter of a key (worker_auth.py).
"""

from dataclasses import dataclass

UNIX_PATH_BYTES_MAX = 107
"""What fits a Linux `sockaddr_un` with its final zero."""


@dataclass(slots=True, frozen=True)
class UnixAddress:
    """A socket in the file system; the directory's permissions say who may connect."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(slots=True, frozen=True)
class TcpAddress:
    """A port on a host (name or address; IPv6 in brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Read the notation that `str(address)` writes.

    Raises:
        ValueError: it is neither form, or a Unix path is too long for the kernel.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"the socket path {rest!r} is longer than {UNIX_PATH_BYTES_MAX} bytes")
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) <= 65_535:
        return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise ValueError(f"{text!r} is not a worker address: unix:/path or tcp:host:port")
