"""Keeps the registry equal to what its sources want: the configuration, a launcher's plan, DNS, Kubernetes.

    source ──apply(name, wanted)──> join what is new, drain what is not wanted any more, leave the rest alone

A worker whose settings changed leaves first and then comes anew, and so does one that is wanted again while
it drains.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.fleet.desired_worker import DesiredWorker
from penstock.fleet.registry import Registry
from penstock.fleet.worker import Worker
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import WorkerId


@dataclass(slots=True, frozen=True)
class DrainedWorker:
    """What a worker was that somebody has taken out of service."""

    route: str
    engine: str
    address: str


class Members:
    """One for each process that has a registry."""

    def __init__(self, registry: Registry, log: Log, *, drain_timeout_s: float) -> None:
        self.drain_timeout_s = drain_timeout_s
        """A worker that is not wanted any more has so long to end its streams."""
        self._registry, self._log = registry, log
        self._wanted: dict[str, dict[WorkerId, DesiredWorker]] = {}
        self._there: dict[WorkerId, DesiredWorker] = {}
        """What the workers in the registry were made from."""
        self._held: dict[WorkerId, DrainedWorker] = {}
        self._ordered: dict[WorkerId, float] = {}
        self._one_at_a_time = asyncio.Lock()
        self._again: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def apply(self, source: str, wanted: Iterable[DesiredWorker]) -> None:
        """From now on `source` wants these workers and no others.

        What cannot be made is reported and left out; applying the same again tries it again, and likewise
        workers that are down for good.
        """
        self._wanted[source] = {each.id: each for each in wanted}
        every = {worker_id for found in self._wanted.values() for worker_id in found}
        self._held = {worker_id: held for worker_id, held in self._held.items() if worker_id in every}
        await self._reconcile()

    @property
    def held(self) -> Mapping[WorkerId, "DrainedWorker"]:
        """Workers that somebody has taken out of service, whether they still drain or are gone."""
        return self._held

    def is_held(self, worker_id: WorkerId) -> bool:
        """Whether somebody has taken it out of service."""
        return worker_id in self._held or worker_id in self._ordered

    def hold(self, worker_id: WorkerId, timeout_s: float) -> bool:
        """Take a worker out of service, whatever the sources want: it drains and leaves.

        False if there is none.
        """
        worker = self._registry.get(worker_id)
        if worker is None:
            return worker_id in self._held
        self._held[worker_id] = DrainedWorker(worker.route, worker.engine, worker.address)
        self._take_away(worker, timeout_s)
        return True

    async def out_of_service(self, ordered: Mapping[WorkerId, float]) -> None:
        """These and no others are out of service, by what all gateway processes of this server agreed on:
        with the seconds that their streams have. One that is not here yet will not join.
        """
        before, self._ordered = self._ordered, dict(ordered)
        for worker_id in before.keys() - ordered.keys():
            self._held.pop(worker_id, None)
        for worker_id, timeout_s in ordered.items():
            self.hold(worker_id, timeout_s)
        await self._reconcile()

    @property
    def gone(self) -> tuple[WorkerId, ...]:
        """Workers that are out of service and have left."""
        held = self._held.keys() | self._ordered.keys()
        return tuple(worker_id for worker_id in sorted(held) if self._registry.get(worker_id) is None)

    async def release(self, worker_id: WorkerId) -> bool:
        """Let it come back, as a new one, if a source wants it still. False if it was not held."""
        if self._held.pop(worker_id, None) is None:
            return False
        await self._reconcile()
        return True

    async def close(self, timeout_s: float) -> None:
        """Drain every worker, all at the same time."""
        self._is_closed = True
        self._wanted.clear()
        drains = [self._registry.drain(worker.id, timeout_s) for worker in list(self._registry)]
        await asyncio.gather(*(drain for drain in drains if drain is not None))

    async def _reconcile(self) -> None:
        async with self._one_at_a_time:
            wanted = {
                worker_id: each
                for source in self._wanted.values()
                for worker_id, each in source.items()
                if worker_id not in self._held and worker_id not in self._ordered
            }
            for worker in list(self._registry):
                each = wanted.get(worker.id)
                if worker.state is WorkerState.GONE or each is None or each != self._there.get(worker.id):
                    self._take_away(worker, self.drain_timeout_s)
            for worker_id, each in wanted.items():
                if self._registry.get(worker_id) is None and not self._is_closed:
                    await self._join(each)

    async def _join(self, wanted: DesiredWorker) -> None:
        try:
            worker = await wanted.open(self._registry)
            self._registry.add(worker)
        except PenstockError as error:
            self._log.error("a worker cannot be used", worker=wanted.id, error=error)
        else:
            self._there[worker.id] = wanted

    def _take_away(self, worker: Worker, timeout_s: float) -> None:
        already = worker.drained is not None
        drained = self._registry.drain(worker.id, timeout_s)
        if drained is not None and not already:
            self._log.info("a worker leaves", worker=worker.id, streams=worker.backend.num_streams)
            drained.add_done_callback(lambda _: self._on_drained(worker.id))

    def _on_drained(self, worker_id: WorkerId) -> None:
        self._there.pop(worker_id, None)
        if not self._is_closed and any(worker_id in source for source in self._wanted.values()):
            task = asyncio.get_running_loop().create_task(self._reconcile(), name=f"again {worker_id}")
            self._again.add(task)
            task.add_done_callback(self._again.discard)
