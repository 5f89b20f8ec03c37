"""Keeps the budgets of one gateway process up to date with what is spent elsewhere.

Other processes of this machine write the same ledger; other machines tell their totals to the shared store
and hear ours. Both are asked every `REFRESH_S`, and the store also when a tenant with a budget is seen for
the first time. A request never waits for either, so a tenant can overspend by what the others grant it
between two rounds. While the store is away, what was heard last still counts.
"""

import asyncio
import contextlib

from penstock.clock import Clock, sleep
from penstock.config.tree import Config
from penstock.errors import LedgerError
from penstock.gateway.shared.keeper import StoreError
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.store_terms import ASKS_MAX, shared_terms
from penstock.rng import fresh_token
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log

REFRESH_S = 10.0
"""How often a process takes over what others have spent."""
_GATHER_S = 0.02
"""Tenants that are first seen this close together are asked about in one message."""


class Spending:
    """The only one that tells `budgets` of others."""

    def __init__(
        self, config: Config, budgets: TenantBudgets, ledger: Ledger, *, clock: Clock, log: Log
    ) -> None:
        self._shared = shared_terms(config.shared)
        self._has_siblings = config.server.processes > 1
        self._budgets, self._ledger = budgets, ledger
        self._clock, self._log = clock, log
        self._store = None
        self._wanted = asyncio.Event()
        self._is_away = self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what is known by now. The ledger must have been started.

        Raises:
            LedgerError: the ledger cannot be read, or cannot be given a name.
        """
        self._budgets.restore(self._clock.now_ns(), await self._ledger.spent())
        if self._shared.url:
            # Imported when it is used: it needs the extra.
            from penstock.gateway.shared.redis_store import RedisSpending

            self._store = RedisSpending(self._shared, self._ledger.identity(fresh_token(12)))
            self._budgets.on_new = self._wanted.set
            await self._exchange()
        if self._store is not None or self._has_siblings:
            self._task = asyncio.create_task(self._run(), name="follow spending")

    async def close(self) -> None:
        """Say what was spent in the end, and stop."""
        # A cancellation that falls into a call of the store's client may be lost there: the loop must see it,
        # too.
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._store is not None:
            await self._exchange()
            await self._store.close()

    async def _run(self) -> None:
        while not self._closing:
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._wanted.wait()
                await sleep(_GATHER_S)
            except TimeoutError:
                await self._read_ledger()
            self._wanted.clear()
            if self._store is not None:
                await self._exchange()

    async def _read_ledger(self) -> None:
        try:
            self._budgets.restore(self._clock.now_ns(), await self._ledger.spent())
        except LedgerError as error:
            self._log.warning("budgets could not be brought up to date", error=error)

    async def _exchange(self) -> None:
        assert self._store is not None
        try:
            here, batch_size = self._budgets.spent_here(self._clock.now_ns()), ASKS_MAX
            for first in range(0, len(here), batch_size):
                async with asyncio.timeout(self._shared.timeout_s):
                    elsewhere = await self._store.exchange(here[first : first + batch_size])
                self._budgets.heed(self._clock.now_ns(), elsewhere)
        except (StoreError, TimeoutError, OSError) as error:
            if not self._is_away:
                why = str(error) or f"no answer within {self._shared.timeout_s:g}s"
                self._log.warning("budgets do not hear of other machines: the shared store is away", why=why)
            self._is_away = True
            return
        if self._is_away:
            self._log.info("budgets hear of other machines again")
        self._is_away = False
