"""Keeps the leases of one gateway filled: the only task that talks to the store, where the true buckets of
shared limits are. Of a store it knows `LeaseStore`: the parent of several gateway processes (`LocalStore`
here, a table behind a Unix socket), or Redis (redis_store.py).

It asks when something is wanted and at least once in a while (so that it is counted), one batch at a time,
each within its timeout. While the store is away it tries again every `retry_s`; requests meanwhile go by
`on_store_down`.

A frame of the parent's socket is four bytes of length and one msgpack value: asks from a gateway, one
`LeaseReply` back. The first frame of a connection is the gateway's name; when its connection ends, the
gateway is counted no more.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.flow import SharedConfig
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import Ask, LeaseReply, LeaseTable
from penstock.policy.terms import shared_terms
from penstock.telemetry.log import Log


class StoreError(Exception):
    """The store is not there, or does not answer as it should.

    Only the keeper of the limits and the API's stored responses see it.
    """


class LeaseStore(Protocol):
    """Where true buckets are kept. An implementation translates; it decides nothing."""

    async def lease(self, asks: Sequence[Ask]) -> LeaseReply:
        """Ask one batch; an empty one says only that this gateway is there.

        Raises:
            StoreError: it failed. The same batch may be asked again: the store knows it by its numbers.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


_HELLOS_PER_TTL = 3
_GATHER_S = 0.002
"""Questions that come this close together travel in one message."""
_START_PATIENCE = 4
"""The first question has so many times as long: the parent of the processes may be busy with its own start,
and while the store is away a tenant has nothing yet to spend. (A Redis' client ends sooner by itself.)"""


class LeaseKeeper:
    """Carries questions from `leases` to `store`, and answers back."""

    def __init__(
        self, config: SharedConfig, leases: Leases, store: LeaseStore, clock: Clock, log: Log
    ) -> None:
        self._config, self._leases, self._store = shared_terms(config), leases, store
        self._clock, self._log = clock, log
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said_ns = 0
        self._closing = False
        self.answer = asyncio.Event()
        """The next one: set when the store has answered once more, or has failed to."""
        leases.on_want = leases.on_need = self._wanted.set

    async def start(self) -> None:
        """Ask once, so that this gateway is counted before it serves; then keep asking in the background.

        A store that does not answer delays the start by four times `timeout_s` at most.
        """
        await self._ask(_START_PATIENCE)
        self._task = asyncio.create_task(self._run(), name="lease keeper")

    async def close(self) -> None:
        """Stop. The rest of a budget's lease is handed back; of a rate limit it comes back as refill."""
        # A cancellation that falls into a call of the store's client may be lost there: the loop must see it,
        # too.
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._leases.leave()
        while self._leases.down_ns is None and self._leases.next_ns() is not None:
            await self._ask()
        await self._store.close()

    async def _run(self) -> None:
        hello_ns = int(self._config.gateway_ttl_s * NS_PER_S) // _HELLOS_PER_TTL
        while not self._closing:
            await self._wait(hello_ns)
            self._leases.look_for_idle(self._clock.now_ns())
            hello = self._clock.now_ns() - self._said_ns >= hello_ns
            if hello or self._leases.down_ns is not None or self._leases.next_ns() is not None:
                await self._ask()

    async def _wait(self, hello_ns: int) -> None:
        """Until something can be asked."""
        if self._leases.down_ns is not None:
            return await sleep(self._config.retry_s)
        next_ns = self._leases.next_ns()
        wait_s = min(hello_ns / NS_PER_S, self._config.lease_s)
        if next_ns is not None:
            wait_s = max(_GATHER_S, (next_ns - self._clock.now_ns()) / NS_PER_S)
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wanted.wait()
        return None

    async def _ask(self, patience: int = 1) -> None:
        """Ask one batch, which may be empty: then it only says that this gateway is there."""
        await self._ask_once(patience * self._config.timeout_s)
        self.answer.set()
        self.answer = asyncio.Event()

    async def _ask_once(self, timeout_s: float) -> None:
        self._said_ns = self._clock.now_ns()
        asks = self._leases.asks(self._said_ns)
        was_down = self._leases.down_ns is not None
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._store.lease(asks)
            if len(reply.grants) != len(asks):
                raise StoreError(f"{len(reply.grants)} answers to {len(asks)} questions")
        except (StoreError, TimeoutError, OSError) as error:
            self._leases.failed(self._clock.now_ns())
            if not was_down:
                why = str(error) or f"no answer within {timeout_s:g}s"
                self._log.warning("the shared store is away", why=why, limits=self._config.on_store_down)
            return
        self._leases.granted(self._clock.now_ns(), reply)
        if was_down:
            self._log.info("the shared store is back", gateways=reply.num_gateways)


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
