"""What every launcher whose workers are supervised from here has in common: which there are, who hears them,
how they end.
"""

import asyncio
from collections.abc import Callable

from penstock.backends.engine.backend import EngineBackend
from penstock.clock import Clock
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.log_file import WorkerLogs
from penstock.fleet.launchers.supervised import Supervisable, SupervisedWorker
from penstock.types import WorkerId


class SupervisingLauncher:
    """All of a `Launcher` but how a worker gets a process."""

    def __init__(
        self, clock: Clock, hash_key: bytes, environment: dict[str, str] | None, logs: WorkerLogs
    ) -> None:
        """`environment` of workers, beside this process's own."""
        self._clock, self._hash_key = clock, hash_key
        self._environment, self._logs = environment or {}, logs
        self._workers: dict[WorkerId, SupervisedWorker] = {}

    async def stop(self, worker_id: WorkerId, *, timeout_s: float) -> None:
        """Drain the worker, up to the timeout, and end its process. Unknown ids are stopped already."""
        if (worker := self._workers.pop(worker_id, None)) is not None:
            await worker.stop(timeout_s)

    def list(self) -> tuple[SupervisedWorker, ...]:
        """Every worker that was started and not stopped."""
        return tuple(self._workers.values())

    async def close(self, *, timeout_s: float) -> None:
        """Stop every worker, all at the same time."""
        await asyncio.gather(
            *(self.stop(worker_id, timeout_s=timeout_s) for worker_id in list(self._workers))
        )

    def _supervise(self, spec: WorkerSpec, backend: EngineBackend, process: Supervisable) -> SupervisedWorker:
        """Start a worker that has its place."""
        worker = self._workers[spec.worker_id] = SupervisedWorker(spec, backend, process, self._clock)
        worker.start()
        return worker

    def _hearer_of(self, worker_id: WorkerId) -> Callable[[str], None]:
        """Takes the lines that a worker prints."""
        return self._logs.of(worker_id, self._clock)
