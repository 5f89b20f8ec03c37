"""What tenants have spent by the ledger of this machine: budgets begin with it, and a shared store that has
lost its memory learns it again.
"""

import asyncio
import contextlib

from penstock.clock import Clock
from penstock.errors import LedgerError
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.lease import Leases
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log


class Spending:
    """The only one that tells `budgets` of other processes."""

    def __init__(
        self, budgets: TenantBudgets, leases: Leases | None, ledger: Ledger, *, clock: Clock, log: Log
    ) -> None:
        self._budgets, self._leases, self._ledger = budgets, leases, ledger
        self._clock, self._log = clock, log
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what is known by now. The ledger must have been started.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        self._budgets.restore(self._clock.now_ns(), await self._ledger.spent())
        if self._leases is not None:
            self._leases.on_recall = self._wanted.set
            self._task = asyncio.create_task(self._run(), name="restore spending")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                self._budgets.restore(self._clock.now_ns(), await self._ledger.spent())
            except LedgerError as error:
                self._log.warning("the shared store does not learn what the ledger knows", error=error)
