"""The wire between a gateway and one engine worker: messages in both directions, no streams, no policy.

What is sent in one tick of the event loop leaves in one write. Whoever owns the link is told of every
message and of the end; after the end a link is spent, and a new one is made.
"""

import asyncio
from typing import Protocol, cast

from penstock.protocol.address import Address, UnixAddress
from penstock.protocol.worker import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    FromWorker,
    ProtocolError,
    ToWorker,
    decode_from_worker,
    encode,
)


class LinkOwner(Protocol):
    """Who hears what the worker says."""

    def on_link_up(self, link: "WorkerLink") -> None:
        """The connection is open. Called once, before anything else."""
        ...

    def on_message(self, message: FromWorker) -> None:
        """One message, in order.

        Raises:
            ProtocolError: it makes no sense here; the link is closed.
        """
        ...

    def on_link_lost(self, why: str) -> None:
        """The link is gone, for either side's reasons. Called once."""
        ...


class WorkerLink(asyncio.Protocol):
    """One connection to a worker. Made by `connect`."""

    def __init__(self, owner: LinkOwner) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._owner = owner
        self._decoder = FrameDecoder()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._why = "the worker closed the connection"

    @classmethod
    async def connect(cls, address: Address, owner: LinkOwner) -> "WorkerLink":
        """A link to the worker that listens there.

        Raises:
            OSError: nobody does.
        """
        loop = asyncio.get_running_loop()
        if isinstance(address, UnixAddress):
            _, link = await loop.create_unix_connection(lambda: cls(owner), address.path)
        else:
            _, link = await loop.create_connection(lambda: cls(owner), address.host, address.port)
        return link

    @property
    def clogged(self) -> bool:
        """The worker does not read: nothing more should be sent for now."""
        return self._transport is None or self._transport.get_write_buffer_size() > MAX_FRAME_BYTES

    def send(self, message: ToWorker) -> None:
        """Send at the end of this tick. After the end of the link it is dropped.

        Raises:
            ProtocolError: the message is too large to be framed; nothing was sent.
        """
        if self._transport is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(encode(message))

    def flush(self) -> None:
        """Send now what waits for the end of the tick."""
        if self._transport is not None and self._unsent:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def close(self, why: str) -> None:
        """Send what is unsent, then close. The owner is told `why`, soon."""
        self._why = why
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for a worker that does not read."""
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses of it.
        self._owner.on_link_up(self)

    def data_received(self, data: bytes) -> None:
        """Bytes from the worker. A worker that breaks the protocol is disconnected."""
        try:
            for body in self._decoder.feed(data):
                self._owner.on_message(decode_from_worker(body))
        except ProtocolError as error:
            self.close(f"the worker broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        self._unsent.clear()
        if exc is not None:
            self._why = f"the connection to the worker broke: {exc}"
        self._owner.on_link_lost(self._why)
        if not self.lost.done():  # Cancelled with the task that awaited it, perhaps.
            self.lost.set_result(None)
