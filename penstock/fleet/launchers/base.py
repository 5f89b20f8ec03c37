"""The contract of whatever can place an engine worker somewhere: processes here; or on a Ray cluster.

A launcher owns the worker's life (start, watch, restart, stop). The `EngineBackend` that it is given owns the
connection; the launcher points it at the worker and tells it what a socket cannot know.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.backends.base import BackendStatus
from penstock.backends.engine.backend import EngineBackend
from penstock.config.engine_settings import EngineSettings
from penstock.errors import WorkerUnavailable
from penstock.protocol.address import REAL_RUNNER, Address
from penstock.types import ModelName, WorkerId


class WorkerStopped(WorkerUnavailable):
    """It was stopped, as it was asked to be."""


ProgressCallback = Callable[[BackendStatus], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerSpec:
    """One worker that is wanted."""

    worker_id: WorkerId
    model_path: str
    """A model directory on the worker's machine."""
    model_name: ModelName
    engine: EngineSettings
    runner: str = REAL_RUNNER
    asleep: bool = False
    """It is started asleep."""
    ray_resources: Mapping[str, float] | None = None
    """In place of those of the configuration; None: those."""


class LaunchedWorker(Protocol):
    """A worker that was started and is kept running until it is stopped."""

    on_move: Callable[[Address], None]
    """Called when it listens somewhere else, with the new address; its backend follows by itself."""

    @property
    def spec(self) -> WorkerSpec:
        """The spec that it was started from."""
        ...

    @property
    def backend(self) -> EngineBackend:
        """How to reach it; its status says how it is."""
        ...

    @property
    def address(self) -> Address:
        """Where it listens, also after a restart (unless it had to move to another machine).

        Any number of gateways may connect.
        """
        ...

    async def wait_ready(self, on_progress: ProgressCallback | None = None) -> None:
        """Return when it can serve or is asleep; meanwhile `on_progress` is called with every change of the
        status.

        Raises:
            OperatorError: it cannot serve what it was told to.
            WorkerStopped: it was asked to stop before.
            WorkerUnavailable: it did not come up, or stays down after too many crashes.
        """
        ...


class Launcher(Protocol):
    """Places workers."""

    @property
    def link_key(self) -> bytes:
        """The key that proves its workers' connections (protocol/address.py); empty where no other user can
        reach them.
        """
        ...

    async def open(self) -> None:
        """Find out whether workers can be placed at all. Called before the first `start`.

        Raises:
            ConfigError: they cannot, as it is configured.
        """
        ...

    async def start(self, spec: WorkerSpec, backend: EngineBackend) -> LaunchedWorker:
        """Start a worker and return at once, usually before it is ready."""
        ...

    async def stop(self, worker_id: WorkerId, *, timeout_s: float) -> None:
        """Let its running streams end, up to the timeout, then end it. Nothing of it is left afterwards."""
        ...

    def list(self) -> tuple[LaunchedWorker, ...]:
        """Every worker that was started and not stopped."""
        ...

    async def close(self, *, timeout_s: float) -> None:
        """Stop every worker, all at the same time. Nothing of them is left but their logs."""
        ...
