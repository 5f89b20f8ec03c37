"""Fair shares over gateways: five times a second this process tells what its tenants were served, and counts
what others tell.

The other processes of one server get them from its parent (peers.py), those of other servers that share a
Redis through a channel there (`RedisShares`). Nothing waits for either.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from penstock.clock import sleep
from penstock.config.flow import SharedConfig
from penstock.gateway.shared.peers import GatewayPeers
from penstock.gateway.shared.redis_store import connect
from penstock.policy.queueing.fair_counters import SHARE_S, FairCounters, ServedUnits
from penstock.policy.terms import shared_terms

UNITS_MAX = 2048
"""Tenants in one message; more are sent in several."""
UNSENT_MAX = 16
"""Messages that wait to be published; the oldest are dropped."""
SILENCE_S = 5.0
"""A publisher receives its own messages: a connection that said nothing for so long meanwhile is made
again."""


class _Served(msgspec.Struct, frozen=True, array_like=True):
    """One message."""

    site: str
    """The server that told it, whose processes tell each other without Redis."""
    units: tuple[ServedUnits, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Served)


class RedisShares:
    """A `FairLink` to the gateways of other servers: a channel that all of them publish to and hear.

    Redis keeps nothing of it. While it is away, gateways count what they serve themselves; what could not be
    published in time is dropped, for shares are of now.
    """

    def __init__(
        self, config: SharedConfig, *, site: str, heed: Callable[[Iterable[ServedUnits]], None]
    ) -> None:
        """`site` names the server among all; `heed` counts what others have served.

        Raises:
            ConfigError: the client is not installed, or it does not understand `shared.url`.
        """
        self._site, self._heed, self._channel = site, heed, f"{config.prefix}:served"
        self._retry_s = shared_terms(config).retry_s
        self._client, self._error = connect(config)
        self._unsent: deque[bytes] = deque(maxlen=UNSENT_MAX)
        self._wanted = asyncio.Event()
        self._num_unheard = 0
        """Published since something was heard last."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Listen and publish in the background; Redis need not be there."""
        self._tasks = [asyncio.create_task(self._keep(each)) for each in (self._publish, self._listen)]

    async def close(self) -> None:
        """Leave the channel."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._client.aclose()

    def tell(self, served: tuple[ServedUnits, ...]) -> None:
        """See `FairLink.tell`."""
        for i in range(0, len(served), UNITS_MAX):
            self._unsent.append(_ENCODER.encode(_Served(self._site, served[i : i + UNITS_MAX])))
        self._wanted.set()

    async def _keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it for ever, however often Redis goes."""
        while True:
            with contextlib.suppress(self._error, OSError, TimeoutError):
                await work()
            self._unsent.clear()
            await sleep(self._retry_s)

    async def _publish(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._unsent:
                await self._client.publish(self._channel, self._unsent.popleft())
                self._num_unheard += 1

    async def _listen(self) -> None:
        """Until the connection is lost, or says nothing although it should."""
        self._num_unheard = 0
        async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(self._channel)
            while True:
                message: dict[str, Any] | None = await channel.get_message(timeout=SILENCE_S)
                if message is None:
                    if self._num_unheard:
                        return
                    continue
                self._num_unheard = 0
                with contextlib.suppress(msgspec.MsgspecError):  # Nonsense of others is theirs.
                    reported = _DECODER.decode(message["data"])
                    if reported.site != self._site:
                        self._heed(reported.units)


class FairLink(Protocol):
    """A way to other gateway processes."""

    def tell(self, served: tuple[ServedUnits, ...]) -> None:
        """Send it, or drop it where it cannot be sent. Never waits."""
        ...


class FairExchange:
    """The sender of shares and its receivers."""

    def __init__(
        self, counters: FairCounters, shared: SharedConfig, peers: GatewayPeers | None, *, gateway: str
    ) -> None:
        """`gateway` names this process for all time.

        Raises:
            ConfigError: the store cannot be used as configured, or its client is not installed.
        """
        self._counters = counters
        self._links: list[FairLink] = [peers] if peers is not None else []
        self._redis = None
        if shared.url:
            site = peers.site if peers is not None else gateway
            self._redis = RedisShares(shared, site=site, heed=counters.heed)
            self._links.append(self._redis)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell and to listen, where there may be others."""
        if self._redis is not None:
            self._redis.start()
        if self._links:
            self._task = asyncio.create_task(self._run(), name="fair shares")

    async def close(self) -> None:
        """Tell nothing more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._redis is not None:
            await self._redis.close()

    async def _run(self) -> None:
        while True:
            if served := self._counters.take():
                for link in self._links:
                    link.tell(served)
            await sleep(SHARE_S)
