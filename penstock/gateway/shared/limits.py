"""The rate limits of one gateway process, shared or not, and the leases of its budgets: what wires
policy/limits/ to a store.
"""

import asyncio
import contextlib
from collections.abc import Callable

from penstock.clock import Clock
from penstock.config.flow import LimitsConfig, SharedConfig
from penstock.errors import LedgerError
from penstock.gateway.shared.keeper import LeaseKeeper, LeaseStore, LocalStore
from penstock.gateway.shared.redis_store import RedisStore
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.rate_limit import Limiter
from penstock.rng import IdSource
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log

ASK_TIMEOUT_S = 0.05
"""How long a request may wait for the store, which answers within a millisecond or two nearby."""
_TURNS = 10
"""The wait is cut in so many: of a pause of this process, each of them feels its own part and no more, so an
answer that has come meanwhile is read before the store counts as late."""


class SharedLimits:
    """A `Limiter`, and the task that keeps it in leases where limits are shared."""

    def __init__(
        self,
        limits: LimitsConfig,
        shared: SharedConfig,
        *,
        gateway: str,
        clock: Clock,
        log: Log,
        parent: str = "",
    ) -> None:
        """`gateway`, an id of `IdSource`, names this process for all time: a name that another one had would
        get its answers. `parent` is the socket of the parent's store, for one of several processes.

        Raises:
            ConfigError: the store cannot be used as configured, or its client is not installed.
        """
        store = open_store(shared, gateway, parent)
        if store is None:
            self.leases, self._keeper = None, None
            self.limiter = Limiter(limits)
            return
        self.leases = Leases(shared, process=IdSource.process_of(gateway))
        self._keeper = LeaseKeeper(shared, self.leases, store, clock, log)
        self.limiter = Limiter(limits, self.leases.make_bucket)

    async def ask(self, lacks: Callable[[], bool]) -> None:
        """Wait until the store has answered for a request that `lacks` something: at most `ASK_TIMEOUT_S`,
        and then no other request waits until the store answers again.
        """
        assert self._keeper is not None, "only what is on lease can be lacking"
        assert self.leases is not None
        turns = _TURNS
        while turns and lacks():
            answer = self._keeper.answer
            while turns and not answer.is_set():
                turns -= 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ASK_TIMEOUT_S / _TURNS):
                        await answer.wait()
            if not answer.is_set():
                self.leases.is_late = True

    async def start(self) -> None:
        """Say hello to the store, within its timeout, before the first request comes."""
        if self._keeper is not None:
            await self._keeper.start()

    async def close(self) -> None:
        """Stop talking to the store."""
        if self._keeper is not None:
            await self._keeper.close()


def open_store(config: SharedConfig, gateway: str, parent: str = "") -> LeaseStore | None:
    """The store of the configuration, else the parent's on its socket; None if nothing is shared.

    `gateway` names this process for all time.

    Raises:
        ConfigError: the store cannot be used as configured, or its client is not installed.
    """
    if config.url:
        return RedisStore(config, gateway)
    if parent:
        return LocalStore(parent, gateway)
    return None


class Spending:
    """The spending of tenants by the ledger of this machine: budgets begin with it, and a shared store that
    has lost its memory learns it again. The only one that tells `budgets` of other processes.
    """

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
