"""A registry with workers around backends that exist already."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

from fake_backend import FakeBackend

from penstock.backends.base import Backend
from penstock.backends.http.backend import HttpBackend
from penstock.clock import Clock
from penstock.config.tree import LogConfig
from penstock.fleet.registry import Registry, Worker
from penstock.telemetry.log import Log
from penstock.types import WorkerId


def fleet_of(
    clock: Clock,
    backends: Mapping[str, Backend | list[Backend]],
    *,
    log: Log | None = None,
    places: frozenset[str] = frozenset(),
) -> Registry:
    """One worker for each backend, named as the launcher names them: "model-0", "model-1"."""
    registry = Registry(clock, log or Log(LogConfig(), clock, stream=io.StringIO()), places=places)
    for route, found in backends.items():
        for number, backend in enumerate(found if isinstance(found, list) else [found]):
            registry.add(worker_of(registry, route, backend, number))
    return registry


def worker_of(registry: Registry, route: str, backend: Backend, number: int = 0) -> Worker:
    """A worker that is not added yet."""
    worker = registry.new(WorkerId(f"{route}-{number}"), route, backend)
    if isinstance(backend, HttpBackend):
        worker.engine = "openai"
    return worker


@dataclass(slots=True, frozen=True)
class Prepared:
    """A worker that is wanted; each time that it comes it has a new backend."""

    id: WorkerId
    route: str
    clock: Clock = field(compare=False)
    backends: list[FakeBackend] = field(default_factory=list, compare=False)
    step_s: float = field(default=0.0, compare=False)

    async def open(self, registry: Registry) -> Worker:
        self.backends.append(FakeBackend(self.clock, step_s=self.step_s))
        return registry.new(self.id, self.route, self.backends[-1])
