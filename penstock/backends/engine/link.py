"""The wire between a gateway and one engine worker: messages in both directions, no streams, no policy; and
one listener's place in the order of the worker's KV events, over any number of links.

Everything that is sent in one tick of the event loop leaves in one write. The link's owner is called for
every message and of the end; after the end a link is spent, and a new one is made. A worker that says nothing
any more is asked for a sign of life, then doubted, then given up: later messages on that connection have no
listener.

The gateway's side of the handshake with a worker that has a key (see protocol/address.py).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from penstock.backends.silence import Beat, Heartbeat, HeartbeatTerms
from penstock.kv.events import KVEventBatch, decode_batch
from penstock.protocol.address import Address, UnixAddress, gateway_mac, is_same, worker_mac
from penstock.protocol.worker import (
    MAX_FRAME_BYTES,
    Challenge,
    FrameDecoder,
    FromWorker,
    KVEvents,
    Ping,
    Pong,
    Proof,
    ProtocolError,
    SubscribeKVEvents,
    ToWorker,
    Welcome,
    decode_from_worker,
    encode,
)

KVEventListener = Callable[[KVEventBatch], None]
"""Applies one batch to an index of one worker. A batch that opens with `AllBlocksCleared` replaces all that
it knows: so it needs neither numbers nor word of a lost connection."""


_NO_EPOCH = -1
"""Of no worker: asks for a snapshot."""


class KVSubscription:
    """One listener's place in the order of one worker's events, over any number of connections and
    restarts.
    """

    __slots__ = ("_epoch", "_listener", "_next")

    def __init__(self, listener: KVEventListener) -> None:
        self._listener = listener
        self._epoch, self._next = 0, 0

    def request(self) -> SubscribeKVEvents:
        """The message to send on a new connection."""
        return SubscribeKVEvents(self._epoch, self._next)

    def push(self, update: KVEvents) -> None:
        """Pass the next message on.

        Raises:
            ProtocolError: there is a gap, or it holds no batch.
        """
        if not update.snapshot and (update.epoch, update.sequence) != (
            self._epoch or update.epoch,
            self._next,
        ):
            raise ProtocolError(f"KV events {self._next} were expected, got {update.sequence}")
        try:
            batch = decode_batch(update.payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"no batch of KV events: {error}") from error
        # Half a snapshot is no state to continue from.
        self._epoch = _NO_EPOCH if update.more else update.epoch
        self._next = update.sequence + 1
        self._listener(batch)


CONNECT_TIMEOUT_S = 2.0
GREETING_BEATS = 20
"""Silent beats after which a connection without a first word is cut. A worker that is stopped still has its
kernel accept connections. It may also just be starting, on a busy machine."""


class LinkOwner(Protocol):
    """The receiver of the worker's messages."""

    def on_link_up(self, link: "WorkerLink") -> None:
        """The connection is open. Called once, before anything else."""
        ...

    def on_message(self, message: FromWorker, *, behind: bool = False) -> None:
        """One message, in order.

        `behind`: others came with it, and `on_caught_up` is called after the last of them.

        Raises:
            ProtocolError: it makes no sense here; the link is closed.
        """
        ...

    def on_caught_up(self) -> None:
        """All that came at once was handed over."""
        ...

    def on_link_doubted(self, *, doubted: bool) -> None:
        """The worker has not answered for a while, or answers again."""
        ...

    def on_link_lost(self, why: str) -> None:
        """The link is gone, for either side's reasons. Called once."""
        ...


class WorkerLink(asyncio.Protocol):
    """One connection to a worker. Made by `connect`."""

    def __init__(self, owner: LinkOwner, heartbeat: HeartbeatTerms) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._owner = owner
        self._decoder = FrameDecoder()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.is_clogged = False
        """The worker does not read: nothing more should be sent for now."""
        self.was_cut = False
        """It was this side that ended it."""
        self._why = "the worker closed the connection"
        self._config = heartbeat
        self._heartbeat: Heartbeat | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received = False
        self._greeting_beats = 0

    @classmethod
    async def connect(cls, address: Address, owner: LinkOwner, heartbeat: HeartbeatTerms) -> "WorkerLink":
        """A link to the worker that listens there.

        Raises:
            OSError: no process listens, or none answers (TimeoutError).
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if isinstance(address, UnixAddress):
                _, link = await loop.create_unix_connection(lambda: cls(owner, heartbeat), address.path)
            else:
                _, link = await loop.create_connection(
                    lambda: cls(owner, heartbeat), address.host, address.port
                )
        return link

    def expect_answers(self) -> None:
        """The worker serves: from now on it answers when it is asked, and silence counts.

        While it loads it may not.
        """
        limits = self._config
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(doubt_after=limits.suspect_after, give_up_after=limits.lost_after)

    def excuse(self) -> None:
        """The worker loads, or is asleep: its silence says nothing."""
        self._heartbeat = None

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
        """Send what is unsent, then close. The owner gets `why`, soon."""
        self._why, self.was_cut = why, True
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for a worker that does not read."""
        self.was_cut = True
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses of it.
        self._transport.set_write_buffer_limits(high=MAX_FRAME_BYTES, low=MAX_FRAME_BYTES)
        self._beat_later()
        self._owner.on_link_up(self)

    def pause_writing(self) -> None:
        """More than one frame waits to be read by the worker."""
        self.is_clogged = True

    def resume_writing(self) -> None:
        """It reads again."""
        self.is_clogged = False

    def data_received(self, data: bytes) -> None:
        """Bytes from the worker. A worker that breaks the protocol is disconnected."""
        if self._transport is None or self._transport.is_closing():
            return  # Given up: what it says now, after a pause perhaps, belongs to an epoch that is over.
        self._received = True
        try:
            bodies = list(self._decoder.feed(data))
            behind = len(bodies) > 1
            for body in bodies:
                message = decode_from_worker(body)
                if not isinstance(message, Pong):
                    self._owner.on_message(message, behind=behind)
        except ProtocolError as error:
            self.close(f"the worker broke the protocol: {error}")
        self._owner.on_caught_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport, self.is_clogged = None, True
        self._unsent.clear()
        if self._timer is not None:
            self._timer.cancel()
        if exc is not None:
            self._why = f"the connection to the worker broke: {exc}"
        self._owner.on_link_lost(self._why)
        if not self.lost.done():  # Cancelled with the task that awaited it, perhaps.
            self.lost.set_result(None)

    # --- signs of life -------------------------------------------------------------------------------

    def _beat_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.interval_s, self._beat)

    def _beat(self) -> None:
        received, self._received = self._received, False
        self._beat_later()
        if self._heartbeat is None:
            self._await_greeting(received=received)
            return
        verdict = self._heartbeat.beat(received=received)
        if verdict is Beat.NOTHING:
            return
        if verdict is Beat.GIVE_UP:
            self._give_up(self._heartbeat.silent)
            return
        if verdict is not Beat.TRUST:
            self.send(Ping())
        if verdict is not Beat.ASK:
            self._owner.on_link_doubted(doubted=verdict is Beat.DOUBT)

    def _await_greeting(self, *, received: bool) -> None:
        """Every worker says at once how far it is. A worker that never does so is stopped or dead."""
        self._greeting_beats = -1 if received or self._greeting_beats < 0 else self._greeting_beats + 1
        if self._greeting_beats >= GREETING_BEATS:
            self._give_up(self._greeting_beats)

    def _give_up(self, beats: int) -> None:
        self._why = f"the worker has given no sign of life for {beats * self._config.interval_s:.3g} s"
        self.abort()


@dataclass(slots=True, frozen=True)
class WorkerKey:
    """The key that a gateway shares with a worker, and where it takes nonces from."""

    key: bytes = field(repr=False)
    nonce: Callable[[], bytes] = field(repr=False, compare=False)


class LinkRefused(Exception):
    """The peer is not to be trusted, or does not trust us; in words for the operator."""


class Handshake:
    """One connection's. Without a key anybody who asks for none is trusted."""

    __slots__ = ("_expected", "_key", "is_over")

    def __init__(self, key: WorkerKey | None) -> None:
        self._key = key
        self._expected: bytes | None = None
        self.is_over = key is None
        """The worker may speak."""

    @property
    def is_unanswered(self) -> bool:
        """We have shown our key, and heard nothing since."""
        return self._expected is not None and not self.is_over

    def take(self, message: FromWorker) -> Proof | None:
        """One message before (or instead of) the worker's state; what to answer.

        Raises:
            LinkRefused: one of the two has no key, or not the same.
        """
        if isinstance(message, Challenge):
            if self._key is None:
                raise LinkRefused("it wants a key: set api_key_env of the worker")
            nonce = self._key.nonce()
            self._expected = worker_mac(self._key.key, message.nonce, nonce)
            return Proof(nonce, gateway_mac(self._key.key, message.nonce, nonce))
        if not isinstance(message, Welcome) or self._expected is None:
            raise LinkRefused("it has no key, and this gateway has one for it: was it started with one?")
        if not is_same(message.mac, self._expected):
            raise LinkRefused("its key is not the one that api_key_env names")
        self.is_over = True
        return None
