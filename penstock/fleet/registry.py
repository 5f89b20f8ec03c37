"""Who is there: every worker of every model, its state, and who wants to hear of changes.

    backend ──on_change──> Worker.life (worker_state.py) ──> listeners: dispatcher, KV index, health, admin

Told by push: nothing here looks at workers on a timer or for each request. The registry knows no policy and
no launcher; who adds and removes workers is in `members.py` and `sources/`. Everything runs on one event
loop.
"""

import asyncio
from collections.abc import Callable, Iterator

from penstock.backends.base import Backend, Phase
from penstock.clock import Clock
from penstock.config.fleet import WORKERS_MAX
from penstock.errors import ConfigError
from penstock.fleet.route_workers import RouteWorkers
from penstock.fleet.worker import Worker
from penstock.policy.resilience.worker_state import WorkerEvent, WorkerLife
from penstock.telemetry.log import Log
from penstock.types import WorkerId

EVENT_OF = {
    Phase.STARTING: WorkerEvent.STARTED,
    Phase.LOADING: WorkerEvent.LOADING,
    Phase.WARMING: WorkerEvent.WARMING,
    Phase.READY: WorkerEvent.SERVING,
    Phase.SUSPECT: WorkerEvent.DOUBTED,
    Phase.LOST: WorkerEvent.LOST,
    Phase.REFUSED: WorkerEvent.REFUSED,
    Phase.DRAINING: WorkerEvent.DRAIN,
    Phase.DOWN: WorkerEvent.END,
}
"""What a backend's phase means for the worker's life."""
_SPOKEN = frozenset({Phase.LOADING, Phase.WARMING, Phase.READY, Phase.REFUSED, Phase.DRAINING})
"""Phases in which news are the worker's own."""

Listener = Callable[[Worker], None]
"""Told of a worker that was added, has changed (its state, what it says of itself, its load) or is GONE. It
runs inside of what brought the change, so it only notes it: it must neither block nor raise, nor change the
registry."""


class Registry:
    """All workers of this process."""

    def __init__(self, clock: Clock, log: Log, *, workers_max: int = WORKERS_MAX) -> None:
        self._clock, self._log, self._workers_max = clock, log, workers_max
        self._workers: dict[WorkerId, Worker] = {}
        self._routes: dict[str, RouteWorkers] = {}
        self._listeners: list[Listener] = []

    def __iter__(self) -> Iterator[Worker]:
        """Every worker, in the order in which they came."""
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of every change from now on; for who is there already, iterate."""
        self._listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        """Tell it nothing more."""
        self._listeners.remove(listener)

    def get(self, worker_id: WorkerId) -> Worker | None:
        """The worker of this id; None if there is none."""
        return self._workers.get(worker_id)

    def of(self, route: str) -> RouteWorkers:
        """The workers of one model; the same object for good, also while there are none."""
        found = self._routes.get(route)
        if found is None:
            found = self._routes[route] = RouteWorkers(route)
        return found

    def new(self, worker_id: WorkerId, route: str, backend: Backend) -> Worker:
        """A worker that is not in the registry yet, at the start of its life. Fill it in and `add` it."""
        return Worker(id=worker_id, route=route, backend=backend, life=WorkerLife(self._clock.now_ns()))

    def add(self, worker: Worker) -> None:
        """Take a worker in, and follow its backend from now on.

        Raises:
            ConfigError: there is one of this name, or there are too many.
        """
        if worker.id in self._workers:
            raise ConfigError(f"there is a worker {worker.id} already")
        if len(self._workers) >= self._workers_max:
            raise ConfigError(f"models: there are {self._workers_max} workers already")
        self._workers[worker.id] = worker
        self.of(worker.route).add(worker)
        worker.backend.on_change = lambda: self._changed(worker)
        self._changed(worker)

    def remove(self, worker_id: WorkerId) -> Worker | None:
        """Forget a worker at once, whatever it does; its backend is left alone. None if it is not known."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return None
        worker.backend.on_change = _ignored
        worker.life.on(WorkerEvent.END, self._clock.now_ns())
        self.of(worker.route).remove(worker)
        self._tell(worker)
        return worker

    def doubt(self, worker_id: WorkerId, *, trusted: bool) -> None:
        """What a probe found out: the worker does not answer as it should, or does so again."""
        if (worker := self._workers.get(worker_id)) is not None:
            event = WorkerEvent.TRUSTED if trusted else WorkerEvent.DOUBTED
            if worker.life.on(event, self._clock.now_ns()):
                self._tell(worker)

    def drain(self, worker_id: WorkerId, timeout_s: float) -> "asyncio.Task[None] | None":
        """Send a worker nothing more, let its streams end up to `timeout_s`, then end it and forget it.

        Returns at once; the task is done when it is gone. None if it is not known. A second call changes
        nothing.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        if worker.drained is None:
            worker.life.on(WorkerEvent.DRAIN, self._clock.now_ns())
            self._tell(worker)
            worker.drained = asyncio.create_task(self._drain(worker, timeout_s), name=f"drain {worker_id}")
        return worker.drained

    async def _drain(self, worker: Worker, timeout_s: float) -> None:
        try:
            await (worker.stop or worker.backend.drain)(timeout_s)
        except Exception as error:  # noqa: BLE001 - it is forgotten whatever its end was like.
            self._log.bug("a worker could not be ended", error, worker=worker.id)
        finally:
            self.remove(worker.id)

    def _changed(self, worker: Worker) -> None:
        """Its backend has news."""
        now_ns, status = self._clock.now_ns(), worker.backend.status
        event = EVENT_OF[status.phase]
        if status.phase in _SPOKEN:
            worker.heard_ns = now_ns
        was_silent, worker.is_silent = worker.is_silent, status.phase is Phase.SUSPECT
        if was_silent and status.phase is Phase.READY:
            event = WorkerEvent.TRUSTED
        if status.phase is Phase.READY and status.info is not None:
            problem = self.of(worker.route).problem(worker)
            if problem:
                event = WorkerEvent.REFUSED
                if problem != worker.problem:
                    self._log.error("a worker was refused", worker=worker.id, why=problem)
            worker.problem = problem
        worker.life.on(event, now_ns)
        self.of(worker.route).changed(worker)
        self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        for listener in self._listeners:
            listener(worker)


def _ignored() -> None:
    """A worker that is forgotten has nothing to say."""
