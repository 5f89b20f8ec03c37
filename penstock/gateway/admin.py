"""The endpoints of whoever runs the fleet, under /admin. They want an admin key; a tenant's ordinary key is refused."""

from urllib.parse import unquote

from penstock import __version__
from penstock.errors import NotFound
from penstock.fleet.worker import Worker
from penstock.gateway.auth import Caller
from penstock.gateway.exchange import Exchange
from penstock.gateway.inspect import answer
from penstock.gateway.models import ServedModel
from penstock.gateway.services import Services
from penstock.policy.decision_log import explain
from penstock.protocol.fleet import FleetReport, ModelReport, WorkerReport
from penstock.telemetry.metrics import Metrics
from penstock.types import RequestId


class Admin:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services, metrics: Metrics) -> None:
        self._services, self._metrics = services, metrics

    async def workers(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/workers`: every worker and every model, as this gateway process sees them."""
        models = list(self._services.models)
        report = FleetReport(
            version=__version__,
            workers=[_worker(worker) for model in models for worker in model.workers],
            models=[self._model(model) for model in models],
        )
        answer(exchange, report)

    async def explain(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/explain/{request_id}`: which workers this gateway process considered for a request, what each scored and why
        one was picked; one entry per decision (holds and retries have more than one), oldest first.

        Raises:
            NotFound: it is not known here, or not any more.
        """
        name = unquote(exchange.head.path.removeprefix("/admin/explain/"))
        decisions = self._services.explained.of(RequestId(name))
        if not decisions:
            raise NotFound(
                f"No decision about request {name[:128]!r} is known here (any more).", code="unknown_request"
            )
        answer(exchange, {"request_id": name, "decisions": [explain(each) for each in decisions]})

    def _model(self, model: ServedModel) -> ModelReport:
        metrics = self._metrics.model(model.name)
        lane = self._services.dispatcher.control.lane(model.name)
        return ModelReport(
            name=model.name,
            waiting=0 if lane is None else lane.queue.num_waiting,
            ready=model.workers.num_ready,
            workers=len(model.workers),
            ttft_sum_s=metrics.ttft_sum_s,
            ttft_count=metrics.ttft_count,
        )


def _worker(worker: Worker) -> WorkerReport:
    status = worker.backend.status
    stats = status.stats
    return WorkerReport(
        id=worker.id,
        model=worker.route,
        engine=worker.engine,
        state=worker.state.value,
        stage=worker.stage,
        epoch=worker.epoch,
        address=worker.address,
        running=stats and stats.running,
        waiting=stats and stats.waiting,
        kv_blocks_used=stats and stats.blocks_used,
        kv_blocks_total=stats and stats.blocks_total,
        generated_tokens=stats and stats.generated_tokens,
        restarts=status.restarts,
        notes=list(status.notes),
    )
