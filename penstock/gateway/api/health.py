"""What `GET /health` says: does every model have an engine that works, or one that will again by itself?

    ok        every worker of it is ready (or was told to drain)
    degraded  one is ready, and others are not; or none is ready *yet*: it loads, or is being restarted
    down      none will be ready again by itself: each has been given up (its restarts were in vain, it cannot
              serve what it was told to), or hangs: is connected and does not answer

One model that is down makes `/health` a 503: only somebody from outside can help, by starting this process
anew. `/ready` is the other question, whether requests should be sent here now; a model that loads is healthy
and not ready.
"""

import enum
from collections.abc import Iterable

import msgspec

from penstock.fleet.registry import RouteWorkers, Worker
from penstock.policy.resilience.worker_state import WorkerState

REASONS_MAX = 8
"""Workers that are named per model."""


class HealthStatus(enum.StrEnum):
    """See the module."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"


_ORDER = tuple(HealthStatus)  # From good to bad.


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model in `/health`."""

    name: str
    status: HealthStatus
    reasons: tuple[str, ...] = ()
    """One for each worker that is not as it should be, at most `REASONS_MAX`."""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /health`."""

    status: HealthStatus
    """The worst of the models'."""
    models: tuple[ModelHealth, ...]


def gateway_health(routes: Iterable[RouteWorkers]) -> HealthReport:
    """The health of every model, and the worst of them. O(workers)."""
    models = tuple(map(model_health, routes))
    return HealthReport(
        status=max((model.status for model in models), key=_ORDER.index, default=HealthStatus.OK),
        models=models,
    )


def model_health(workers: RouteWorkers) -> ModelHealth:
    """The health of one model."""
    wrong = [worker for worker in workers if worker.state not in _RIGHT]
    if not len(workers):
        return ModelHealth(name=workers.name, status=HealthStatus.DEGRADED, reasons=("there is no worker",))
    if not wrong:
        status = HealthStatus.OK
    elif not workers.is_ready and all(map(_is_lost, workers)):
        status = HealthStatus.DOWN
    else:
        status = HealthStatus.DEGRADED
    reasons = tuple(f"{worker.id} is {worker.state}: {worker.stage}" for worker in wrong)
    return ModelHealth(name=workers.name, status=status, reasons=reasons[:REASONS_MAX])


_RIGHT = (WorkerState.READY, WorkerState.DRAINING)


def _is_lost(worker: Worker) -> bool:
    """Whether it will not serve again by itself, as far as can be known from here."""
    return worker.state in (WorkerState.GONE, WorkerState.SUSPECT) or worker.backend.status.is_given_up
