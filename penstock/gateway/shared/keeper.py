"""Keeps the leases of one gateway filled: the only task that talks to the store.

It asks when something is wanted and at least once in a while (so that it is counted), one batch at a time,
each within its timeout. While the store is away it tries again every `retry_s`; requests meanwhile go by
`on_store_down`.

A lease store is where the true buckets of shared limits are kept.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.flow import SharedConfig
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_messages import Ask, LeaseReply
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
        """Stop. What is on lease of a budget is handed back; of a rate limit it comes back as refill."""
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
