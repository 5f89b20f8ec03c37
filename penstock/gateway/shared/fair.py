"""Fair shares over gateways: five times a second this process tells what its tenants were served, and counts
what others tell.

The other processes of one server are told by its parent (peers.py), those of other servers that share a Redis
through a channel there (redis_shares.py). Nothing waits for either.
"""

import asyncio
import contextlib
from typing import Protocol

from penstock.clock import sleep
from penstock.config.flow import SharedConfig
from penstock.gateway.shared.peers import GatewayPeers
from penstock.policy.queueing.fair_counters import SHARE_S, FairCounters, ServedUnits


class FairLink(Protocol):
    """A way to other gateway processes."""

    def tell(self, served: tuple[ServedUnits, ...]) -> None:
        """Send it, or drop it where it cannot be sent. Never waits."""
        ...


class FairExchange:
    """What tells, and whom."""

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
            from penstock.gateway.shared.redis_shares import RedisShares  # Most gateways share nothing.

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
