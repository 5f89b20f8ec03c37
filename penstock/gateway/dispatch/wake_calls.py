"""Wakes models that requests wait for, and ends those that wait for one that cannot be woken.

A request for a model that is asleep waits in its queue like any other. Whoever accepts one says so
(`wanted`), and the models that are asleep are looked at now and then, for a request that ran elsewhere may
come back to a queue (`look`).
"""

import asyncio

from penstock.errors import PenstockError
from penstock.fleet.registry import Registry
from penstock.fleet.sleep import Sleeper
from penstock.gateway.relay.reply import Reply
from penstock.policy.flow import State
from penstock.policy.lifecycle.control import FlowControl
from penstock.telemetry.log import Log


class WakeCalls:
    """One per gateway process. Of each model at most one call is under way."""

    def __init__(self, sleeper: Sleeper | None, registry: Registry, control: FlowControl, log: Log) -> None:
        """Without a `sleeper` nothing sleeps."""
        self.sleeper = sleeper
        self._registry, self._control, self._log = registry, control, log
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def wanted(self, route: str) -> None:
        """Somebody waits for this model, or would have: wake it if it sleeps."""
        if self.sleeper is None or route in self._under_way or not self._registry.of(route).sleeps:
            return
        task = asyncio.get_running_loop().create_task(self._wake(self.sleeper, route), name=f"wake {route}")
        self._under_way[route] = task
        task.add_done_callback(lambda _: self._under_way.pop(route, None))

    def look(self) -> None:
        """Wake every model that something waits for."""
        for route in dict.fromkeys(worker.route for worker in self._registry if worker.sleeps):
            lane = self._control.lane(route)
            if lane is not None and lane.queue.num_waiting:
                self.wanted(route)

    def close(self) -> None:
        """Wake nothing more."""
        for task in self._under_way.values():
            task.cancel()

    async def _wake(self, sleeper: Sleeper, route: str) -> None:
        try:
            await sleeper.wake(route)
        except PenstockError as error:
            self._log.warning("a model cannot be woken", model=route, error=error)
            self._refuse(route, error)

    def _refuse(self, route: str, error: PenstockError) -> None:
        """End what waits for it: nothing that waits has given output."""
        if self._registry.of(route).is_ready:
            return
        for request in list(self._control.requests()):
            if request.facts.route == route and request.state is State.QUEUED:
                assert isinstance(request.io, Reply), f"{request.id} has no reply"
                request.io.fail(error)
