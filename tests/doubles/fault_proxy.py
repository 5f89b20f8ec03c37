"""A TCP or Unix-socket proxy that does to a connection what networks and dying machines do to it.

    gateway ──> FaultProxy ──> worker
                   │ latency, bandwidth, slicing, corruption; from now on, or for one direction
                   │ black hole: nothing goes through any more, and nobody is told
                   └ reset, half-close: the connection ends, rudely or in one direction

What is set holds for bytes that come from then on, on all connections. A black hole keeps what it swallowed:
when it is healed the bytes arrive, late, as a network's retransmissions do.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from penstock.protocol.address import Address, TcpAddress, UnixAddress

_CHUNK = 1 << 16


@dataclass(slots=True)
class Faults:
    """What happens to bytes of one direction."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: no bound."""
    slice_bytes: int = 0
    """Cut what goes through into pieces of this size; 0: as it comes."""
    corrupt: Callable[[bytes], bytes] | None = None
    """Changes what goes through."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: a black hole."""

    def __post_init__(self) -> None:
        self.open.set()


class FaultProxy:
    """Listens at `address` for connections to `upstream`. Made by `fault_proxy`."""

    def __init__(self, address: Address, upstream: Address) -> None:
        self.address, self.upstream = address, upstream
        self.to_upstream, self.to_client = Faults(), Faults()
        self.num_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def both(self) -> tuple[Faults, Faults]:
        return self.to_upstream, self.to_client

    def black_hole(self) -> None:
        """From now on nothing goes through, in either direction."""
        for faults in self.both:
            faults.open.clear()

    def heal(self) -> None:
        """Everything goes through again, as it comes."""
        for faults in self.both:
            faults.latency_s, faults.bytes_per_s, faults.slice_bytes, faults.corrupt = 0.0, 0.0, 0, None
            faults.open.set()

    def reset(self) -> None:
        """Every connection ends with a RST (a Unix socket just closes), and what is on its way is lost."""
        for writer in list(self._writers):
            found = writer.get_extra_info("socket")
            if found.family != socket.AF_UNIX:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def half_close(self) -> None:
        """The worker's side of every connection ends; what the gateway sends still arrives there."""
        for writer in list(self._writers):
            if writer.can_write_eof():
                writer.write_eof()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            upstream = await _connect(self.upstream)
        except OSError:
            writer.transport.abort()
            return
        pairs = ((reader, upstream[1], self.to_upstream), (upstream[0], writer, self.to_client))
        self._writers |= {writer, upstream[1]}
        try:
            await asyncio.gather(*(self._pump(*pair) for pair in pairs))
        finally:
            for each in (writer, upstream[1]):
                self._writers.discard(each)
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(_CHUNK):
                await faults.open.wait()
                if faults.latency_s:
                    await asyncio.sleep(faults.latency_s)
                data = faults.corrupt(data) if faults.corrupt else data
                step = faults.slice_bytes or len(data)
                for start in range(0, len(data), step):
                    piece = data[start : start + step]
                    if faults.bytes_per_s:
                        await asyncio.sleep(len(piece) / faults.bytes_per_s)
                    writer.write(piece)
                    await writer.drain()
                    if faults.slice_bytes:
                        await asyncio.sleep(0)
            await faults.open.wait()  # An end is swallowed too.
        writer.transport.close()

    async def close(self) -> None:
        self.heal()
        for writer in list(self._writers):
            writer.transport.abort()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, UnixAddress):
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.host, address.port)


@contextlib.asynccontextmanager
async def fault_proxy(upstream: Address, *, unix_path: str = "") -> AsyncIterator[FaultProxy]:
    """A proxy on a free port of the loopback interface, or at `unix_path`."""
    proxy = FaultProxy(UnixAddress(unix_path), upstream)
    if unix_path:
        server = await asyncio.start_unix_server(proxy.serve, unix_path)
    else:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.address = TcpAddress(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
