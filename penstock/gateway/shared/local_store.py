"""Leases from the parent of several gateway processes: a table behind a Unix socket.

A frame is four bytes of length and one msgpack value: asks from a gateway, one `LeaseReply` back. The first
frame of a connection is the gateway's name; when its connection ends, the gateway is counted no more.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.clock import Clock
from penstock.config.flow import SharedConfig
from penstock.gateway.shared.keeper import StoreError
from penstock.policy.limits.lease_messages import Ask, LeaseReply
from penstock.policy.limits.lease_table import LeaseTable

GATEWAYS_MAX = 1024
"""Gateways that the parent's store takes connections from."""
FRAME_BYTES_MAX = 1024 * 1024
"""One message to or from the parent's store."""
_LENGTH_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
_ASKS = msgspec.msgpack.Decoder(list[Ask])
_REPLY = msgspec.msgpack.Decoder(LeaseReply)
_NAME = msgspec.msgpack.Decoder(str)


class LocalStore:
    """A `LeaseStore` in the parent process."""

    def __init__(self, path: str, gateway: str) -> None:
        self._path, self._gateway = path, gateway
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def lease(self, asks: Sequence[Ask]) -> LeaseReply:
        """See `LeaseStore.lease`."""
        try:
            reader, writer = self._streams or await self._connect()
            _write(writer, list(asks))
            await writer.drain()
            return _REPLY.decode(await _read(reader))
        except BaseException as error:
            # A frame may be half read: nothing more can come from this connection, whatever ended it.
            await self.close()
            if isinstance(error, OSError | EOFError | msgspec.MsgspecError):
                raise StoreError(f"{self._path}: {error}") from error
            raise

    async def close(self) -> None:
        """See `LeaseStore.close`."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._streams = reader, writer
        _write(writer, self._gateway)
        return reader, writer


class LeaseServer:
    """The parent's side: answers its gateways from one `LeaseTable`."""

    def __init__(self, config: SharedConfig, path: Path, clock: Clock) -> None:
        self.path, self._clock = path, clock
        self.table = LeaseTable(config, epoch=clock.wall_ns() // 1000)
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, str] = {}

    async def start(self) -> None:
        """Listen, for this user alone.

        Raises:
            OSError: the socket cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await self._server.wait_closed()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= GATEWAYS_MAX:
            writer.transport.abort()
            return
        self._open[writer] = ""
        try:
            name = self._open[writer] = _NAME.decode(await _read(reader))
            while True:
                asks = _ASKS.decode(await _read(reader))
                _write(writer, self.table.lease(self._clock.now_ns(), name, asks))
                await writer.drain()
        except (OSError, EOFError, msgspec.MsgspecError):
            pass  # It hung up, or talks nonsense: either way its connection ends here.
        finally:
            name = self._open.pop(writer)
            # One that was cut off and is back already keeps its place, and the answer to its last question.
            if name not in self._open.values():
                self.table.left(self._clock.now_ns(), name)
            writer.transport.abort()


def _write(writer: asyncio.StreamWriter, value: object) -> None:
    body = _ENCODER.encode(value)
    writer.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """One frame.

    Raises:
        EOFError: the other side hung up.
        OSError: so did the system, or the frame is over its bound.
    """
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if size > FRAME_BYTES_MAX:
        raise OSError(f"a frame of {size} bytes, over the bound of {FRAME_BYTES_MAX}")
    return await reader.readexactly(size)
