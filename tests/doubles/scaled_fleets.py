"""A model that scales on workers that a test makes ready, lets fail, or puts to sleep: the real pools,
members and registry, and a launcher that does as it is told.
"""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_backend import FakeBackend

from penstock.backends.base import Phase
from penstock.clock import NS_PER_S, ManualClock
from penstock.config.fleet import FleetConfig
from penstock.config.ledger import LedgerConfig
from penstock.config.scale import ScaleConfig
from penstock.config.tree import Config, LogConfig
from penstock.errors import WorkerUnavailable
from penstock.fleet.members import Members
from penstock.fleet.registry import Registry, Worker
from penstock.fleet.scale_model import ModelScale
from penstock.fleet.scale_pools import LaunchedPool
from penstock.fleet.scale_report import PoolReport, ScaleReport
from penstock.fleet.scaling import ScaleLeader
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import WorkerId

LOOK_S = 5


@dataclass(slots=True, frozen=True)
class Launchable:
    """A worker that the launcher below starts, or does not."""

    id: WorkerId
    model: str
    fleet: "ScaledFleet" = field(compare=False)

    async def open(self, registry: Registry) -> Worker:
        """See `DesiredWorker`."""
        self.fleet.tried.append(self.id)
        if any(self.id.startswith(start) for start in self.fleet.refused):
            raise WorkerUnavailable("no machine is free")
        backend = self.fleet.backends[self.id] = FakeBackend(self.fleet.clock)
        backend.show(Phase.STARTING, "starting")
        return registry.new(self.id, self.model, backend)


class ScaledFleet:
    """See the module."""

    def __init__(
        self,
        models: dict[str, ScaleConfig],
        fleet: FleetConfig | None = None,
        first: Sequence[int] = (0,),
        *,
        wall_s: float = 1_700_000_000,
        ledger: str = "",
    ) -> None:
        """`first`: workers that are there at the start, by pool of each model; `ledger`: a directory for the
        record, empty: there is none.
        """
        self.clock = ManualClock(now_ns=NS_PER_S, wall_ns=int(wall_s * NS_PER_S))
        log = Log(LogConfig(), self.clock, stream=io.StringIO())
        self.registry = Registry(self.clock, log)
        self.members = Members(self.registry, log, drain_timeout_s=0.0)
        self.backends: dict[WorkerId, FakeBackend] = {}
        self.tried: list[WorkerId] = []
        """Workers that the launcher was asked for, each time."""
        self.refused: tuple[str, ...] = ()
        """Beginnings of names that it refuses."""
        self.woken: list[str] = []
        self.waiting: dict[str, int] = {}
        self.published: dict[str, float] = {}
        self.pools = {
            name: [
                self._pool(name, pool, count)
                for pool, count in zip([each.name for each in scale.pools] or [""], first, strict=True)
            ]
            for name, scale in models.items()
        }
        config = Config(
            fleet=fleet or FleetConfig(), ledger=LedgerConfig(enabled=bool(ledger), directory=ledger)
        )
        self.leader = ScaleLeader(
            [ModelScale(name, scale, self.pools[name]) for name, scale in models.items()],
            config, self.registry, self.clock, log,
        )  # fmt: skip
        self.leader.waiting = lambda: self.waiting
        self.leader.publish = self._publish

    def _publish(self, reported: dict[str, float]) -> None:
        self.published = dict(reported)

    def _pool(self, model: str, name: str, first: int) -> LaunchedPool:
        return LaunchedPool(
            model, name, self.registry, self.clock, first=first, apply=lambda: self._apply(model),
            is_held=self.members.is_held, wake=self.woken.append,
        )  # fmt: skip

    async def _apply(self, model: str) -> None:
        wanted = [Launchable(name, model, self) for pool in self.pools[model] for name in pool.names]
        await self.members.apply(model, wanted)

    async def begin(self) -> None:
        """The first workers are launched and ready."""
        for model in self.pools:
            await self._apply(model)
        self.make_ready(*self.backends)

    async def look(self, seconds: float = LOOK_S) -> ScaleReport:
        """Let time pass and decide; then everything that was begun goes on as far as it can. Tells of the
        first model.
        """
        self.clock.advance(int(seconds * NS_PER_S))
        await self.leader._tick()
        await self.settle()
        return self.report()

    async def settle(self) -> None:
        """Nothing is left to do for the event loop."""
        for _ in range(50):
            await asyncio.sleep(0)

    def report(self, model: str = "") -> ScaleReport:
        """As operators see it now."""
        return self.leader.report(model).models[0]

    def pool(self, name: str = "", model: str = "") -> PoolReport:
        """One pool of it."""
        return next(each for each in self.report(model).pools if each.name == name)

    def make_ready(self, *names: str) -> None:
        """They come up."""
        for name in names:
            self.backends[WorkerId(name)].show(Phase.READY, "ready")

    def give_up(self, *names: str) -> None:
        """They exit each time that they are started, and their launcher has had enough."""
        for name in names:
            backend = self.backends[WorkerId(name)]
            backend.status.is_given_up = True
            backend.show(Phase.LOST, "it exits with code 1")

    def names(self, *states: WorkerState) -> list[str]:
        """Workers in these states; of none: all."""
        return [each.id for each in self.registry if not states or each.state in states]
