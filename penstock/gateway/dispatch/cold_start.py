"""Requests for a model that has had no worker yet: nothing is known of it, so they wait here and not in its
queue.

Its context and vocabulary are its first worker's to tell, and without these a prompt cannot be checked or
counted. The bounds are the queue's own: how many requests and bytes, one tenant's share of them, and how long
(`queue.no_worker_wait_s`).
"""

import asyncio
import math

from penstock.config.flow import QueueConfig
from penstock.errors import Draining, Overloaded, WorkerUnavailable
from penstock.fleet.registry import Registry, Worker
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.models.served import ServedModel
from penstock.policy.queueing.terms import queue_terms
from penstock.types import TenantId


class _Line:
    """Who waits for one model, in the order in which they came."""

    __slots__ = ("by_tenant", "num_bytes", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}
        self.by_tenant: dict[TenantId, int] = {}
        self.num_bytes = 0


class ColdStarts:
    """See the module. One per gateway."""

    def __init__(self, config: QueueConfig, registry: Registry) -> None:
        self._config = queue_terms(config)
        self._lines: dict[str, _Line] = {}
        self._closed = False
        registry.listen(self._changed)

    async def wait(self, model: ServedModel, exchange: Exchange, tenant: TenantId) -> None:
        """Return once a worker of the model has been ready, or the client has left.

        Raises:
            WorkerUnavailable: there was none for as long as requests wait.
            Overloaded: too many wait already.
            Draining: the server is going away.
        """
        config = self._config
        if model.workers.info is not None:
            return
        if config.no_worker == "refuse":
            raise _not_ready(model)
        line = self._lines.setdefault(model.name, _Line())
        self._check_room(line, model, len(exchange.body), tenant)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        num_bytes = len(exchange.body)
        line.waiting[waiter] = None
        line.num_bytes += num_bytes
        line.by_tenant[tenant] = line.by_tenant.get(tenant, 0) + 1
        exchange.on_disconnect = lambda: _wake(waiter)
        try:
            async with asyncio.timeout(config.no_worker_wait_s):
                await waiter
        except TimeoutError:
            raise _not_ready(model) from None
        finally:
            exchange.on_disconnect = None
            del line.waiting[waiter]
            line.num_bytes -= num_bytes
            line.by_tenant[tenant] -= 1
            if not line.by_tenant[tenant]:
                del line.by_tenant[tenant]
        if self._closed:
            raise Draining("The server is shutting down.")

    def close(self) -> None:
        """The server is going away: nothing waits any more."""
        self._closed = True
        for line in self._lines.values():
            for waiter in line.waiting:
                _wake(waiter)

    def _check_room(self, line: _Line, model: ServedModel, num_bytes: int, tenant: TenantId) -> None:
        config = self._config
        share = math.ceil(config.requests_max * config.tenant_share)
        if (
            len(line.waiting) >= config.requests_max
            or line.num_bytes + num_bytes > config.bytes_max
            or line.by_tenant.get(tenant, 0) >= share
        ):
            raise Overloaded(
                f"Too many requests wait for the model '{model.name}' to start. Try again in a moment."
            )

    def _changed(self, worker: Worker) -> None:
        line = self._lines.get(worker.route)
        if line is not None and worker.is_ready:
            for waiter in line.waiting:
                _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _not_ready(model: ServedModel) -> WorkerUnavailable:
    return WorkerUnavailable(f"The model '{model.name}' is not ready: {model.workers.summary().stage}.")
