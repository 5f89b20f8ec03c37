"""The endpoints that look: models, tokens, health, readiness, metrics and status.

The answer of `GET /health`: does every model have an engine that works, or one that will again by itself?

    ok        every worker of it is ready (or was told to drain, or is asleep), and is used
    degraded  one is ready, and others are not; or none is ready *yet*: it loads, or is being restarted; or
              some are left alone by this process, because they fail, are slow or have no room
    down      none will be ready again by itself: each has been given up (its restarts were in vain, it cannot
              serve what it was told to), or hangs: is connected and does not answer

One model that is down makes `/health` a 503: only a restart of this process from outside can help. `/ready`
is the other question, whether requests should be sent here now; a model that loads is healthy and not ready.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from penstock.backends.base import public_stage
from penstock.clock import NS_PER_S
from penstock.errors import Forbidden, InvalidRequest
from penstock.fleet.members import Members
from penstock.fleet.registry import RouteWorkers, Worker
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.prepare import check_token_ids, render
from penstock.gateway.models.served import ServedModel
from penstock.gateway.shared.peers import GatewayPeers
from penstock.policy.resilience.worker_state import WorkerState
from penstock.policy.tenant import Tenant, check_model, may_use_model
from penstock.protocol.openai import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from penstock.protocol.openai_validate import decoded, parse_tokenize
from penstock.protocol.peers import ModelNumbers, Snapshot, Sum
from penstock.protocol.worker import ModelInfo, Stats
from penstock.telemetry.costs import COST_METRICS, CostAccount, cost_accounts
from penstock.telemetry.ledger_segment import ledger_directory
from penstock.telemetry.metrics import CONTENT_TYPE, Metrics
from penstock.telemetry.pages import aliases
from penstock.telemetry.watch import free_share
from penstock.telemetry.worker_meters import WorkerLabels
from penstock.types import WorkerId

REASONS_MAX = 8
"""Workers that are named per model."""


class HealthStatus(enum.StrEnum):
    """See the module."""

    OK = "ok"
    DEGRADED = "degraded"
    DOWN = "down"


_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
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


LeftAlone = Callable[[str], Mapping[WorkerId, str]]
"""Workers of a model that are ready and given nothing, or little, and why: `FleetHealth.left_alone`."""


def gateway_health(routes: Iterable[RouteWorkers], left_alone: LeftAlone) -> HealthReport:
    """The health of every model, and the worst of them. O(workers)."""
    models = tuple(model_health(workers, left_alone(workers.name)) for workers in routes)
    return HealthReport(
        status=max((model.status for model in models), key=_ORDER.index, default=HealthStatus.OK),
        models=models,
    )


def model_health(workers: RouteWorkers, left_alone: Mapping[WorkerId, str]) -> ModelHealth:
    """The health of one model."""
    wrong = [worker for worker in workers if worker.state not in _RIGHT]
    if not len(workers) and not workers.to_come:
        return ModelHealth(name=workers.name, status=HealthStatus.DEGRADED, reasons=("there is no worker",))
    if not wrong and not left_alone:
        status = HealthStatus.OK
    elif not workers.is_ready and all(map(_is_lost, workers)):
        status = HealthStatus.DOWN
    else:
        status = HealthStatus.DEGRADED
    reasons = [f"{worker.id} is {worker.state}: {public_stage(worker.stage)}" for worker in wrong]
    reasons += [f"{worker_id} is left alone: {why}" for worker_id, why in left_alone.items()]
    return ModelHealth(name=workers.name, status=status, reasons=tuple(reasons[:REASONS_MAX]))


_RIGHT = (WorkerState.READY, WorkerState.DRAINING, WorkerState.ASLEEP, WorkerState.WAKING)


def _is_lost(worker: Worker) -> bool:
    """Whether it will not serve again by itself, as far as can be known from here."""
    return worker.state in (WorkerState.GONE, WorkerState.SUSPECT) or worker.backend.status.is_given_up


NOTES_MAX = 20
"""Notes of all workers of a model together."""


class ModelReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """One model in `/ready`, and in a tenant's `/status.json`: how far it is, and no number that tells of
    anyone's use.
    """

    name: str
    ready: bool
    stage: str
    progress: float | None
    """From 0 to 1; null if it cannot be said."""


class ModelState(ModelReadiness, frozen=True, kw_only=True):
    """One model in `/status.json`."""

    done: int
    total: int
    restarts: int
    notes: list[str]
    """Events of its workers: worker, time, what; the latest last."""
    info: ModelInfo | None = None
    stats: Stats | None = None
    """Sums over its workers."""
    workers: dict[str, int]
    """How many are in which state (policy/resilience/worker_state.py); each by itself is at
    /admin/workers."""


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker on the page. `GET /admin/workers` says more, to those who may know."""

    id: str
    model: str
    engine: str
    state: str
    running: int
    waiting: int
    restarts: int


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /ready`."""

    status: str
    models: list[ModelReadiness]


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /status.json` with a tenant's key: what it may use, and its own numbers."""

    tenant: str
    tier: str
    draining: bool
    auth: bool
    streams: int
    """Its requests that were accepted by this gateway process and have not ended."""
    spent_day_micros: int
    """Of its budget, in millionths of the price list's currency: this UTC day, and this month."""
    spent_month_micros: int
    models: list[ModelReadiness]


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /status.json`: the server's live numbers."""

    version: str
    uptime_s: float
    connections: int
    streams: int
    processes: int
    """Gateway processes that share the address; the two numbers before are their sum."""
    draining: bool
    auth: bool
    models: list[ModelState]
    workers: list[WorkerLine]
    costs: list[CostAccount]
    """The cost of each model's machines since the start; empty without `prices.accelerators`."""


class Inspect:
    """The endpoints, over the services they share."""

    def __init__(
        self,
        services: Services,
        metrics: Metrics,
        *,
        version: str,
        members: Members | None = None,
        peers: GatewayPeers | None = None,
    ) -> None:
        self._members, self._peers = members, peers
        self._services = services
        self._metrics = metrics
        self._version = version
        self._started_ns = services.clock.now_ns()
        self._restarts: dict[str, dict[str, int]] = {}
        self.num_connections = 0
        self.measure: Callable[[], None] = lambda: None  # Counts anew for each page.
        self.auth = not services.config.auth.disabled

    async def list_models(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /v1/models`: the models, their context (`max_model_len`; from the configuration or the
        checkpoint until a worker has said it) and the caller's own limits (`limits`; null is no limit).
        """
        answer(exchange, ModelList(data=self._services.models.cards(caller.tenant)))

    async def show_model(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /v1/models/{id}`: one of them. The id may hold slashes."""
        name = unquote(exchange.path.removeprefix("/v1/models/"))
        answer(exchange, self._services.models.card(name, caller.tenant))

    async def tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/tokenize`: a text's or a conversation's tokens, as in vLLM."""
        request = parse_tokenize(exchange.body)
        model = self._model(request.model, caller)
        await self._services.cold.wait(model, exchange, len(exchange.body), caller.tenant.id)
        info = model.info()
        tokens = await self._tokens(model, request, caller, len(exchange.body))
        answer(
            exchange, TokenizeAnswer(count=len(tokens), max_model_len=info.max_model_len, tokens=list(tokens))
        )

    async def detokenize(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/detokenize`: tokens' text, as in vLLM."""
        request = decoded(_DETOKENIZE, exchange.body)
        model = self._model(request.model, caller)
        await self._services.cold.wait(model, exchange, len(exchange.body), caller.tenant.id)
        check_token_ids(request.tokens, model.info().vocab_size, "tokens")
        text = await self._services.tokenize.run(
            len(exchange.body), lambda: model.tokenizer.decode(request.tokens, skip_special_tokens=False)
        )
        answer(exchange, DetokenizeAnswer(prompt=text))

    async def health(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /health`: 200 while every model works or will again by itself, else 503."""
        services = self._services
        found = gateway_health((model.workers for model in services.models), services.dispatcher.left_alone)
        code = 503 if found.status is HealthStatus.DOWN else 200
        exchange.respond(Response(status=code, body=msgspec.json.encode(found)))

    async def ready(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /ready`: 200 once every model takes requests (one that is asleep does), else 503 and why.

        Anyone may ask, so it has no counters.
        """
        models = [_readiness(model) for model in self._services.models]
        status = "ready" if all(model.ready for model in models) else "loading"
        if self._services.leaving:
            status = "draining"
        body = msgspec.json.encode(Readiness(status=status, models=models))
        exchange.respond(Response(status=200 if status == "ready" else 503, body=body))

    async def metrics(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /metrics`: for Prometheus, of all tenants and gateway processes, the engines' as of now.

        Raises:
            Forbidden: the caller is a tenant.
        """
        if not caller.sees_all:
            raise Forbidden(
                "This key is a tenant's, and /metrics tells of all tenants. It takes one of auth.scrape_keys "
                "or auth.admin_keys, or one made with `penstock keys create --scrape`.",
                code="not_a_scrape_key",
            )
        body = self.rendered() if self._peers is None else (await self._peers.sum()).metrics
        body += aliases(body)
        exchange.respond(Response(body=body, content_type=CONTENT_TYPE.encode()))

    def snapshot(self) -> Snapshot:
        """This process's numbers, for the sum."""
        return Snapshot(
            metrics=self.rendered(),
            connections=self.num_connections,
            streams=self._services.dispatcher.num_streams,
            models=model_numbers(self._services, self._metrics),
            gone=self._members.gone if self._members is not None else (),
        )

    def rendered(self) -> bytes:
        """This process's `/metrics` text, as of now."""
        for model in self._services.models:
            self._follow(model)
        self._follow_costs()
        self._metrics.streams.set(self._services.dispatcher.num_streams)
        ledger = self._services.config.ledger
        self._metrics.disk_free(free_share(ledger_directory(ledger)) if ledger.enabled else 1.0)
        self.measure()
        return self._metrics.render()

    async def status(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /status.json`: everything for admins and scrapers, for a tenant its own."""
        services = self._services
        if not caller.sees_all:
            answer(exchange, self.own_status(caller.tenant))
            return
        numbers = await self.numbers()
        status = ServerStatus(
            version=self._version,
            uptime_s=round(self.uptime_s, 1),
            connections=numbers.connections,
            streams=numbers.streams,
            processes=numbers.processes,
            draining=services.leaving,
            auth=self.auth,
            models=[_state(model, services.clock.wall_ns()) for model in services.models],
            workers=[_line(worker) for model in services.models for worker in model.workers],
            costs=cost_accounts(numbers.metrics or self._cost_page()),
        )
        answer(exchange, status)

    def _cost_page(self) -> bytes:
        """The part of `rendered` that `cost_accounts` reads, a hundredth of it."""
        self._follow_costs()
        return self._metrics.render(COST_METRICS)

    def _follow_costs(self) -> None:
        meters, now_ns = self._services.dispatcher.meters, self._services.clock.now_ns()
        self._metrics.accelerator_costs(meters.costs(now_ns))

    def mbu(self, worker: Worker) -> float | None:
        """The memory bandwidth utilisation of a worker's last steps; None: it does not tell."""
        return self._metrics.model(worker.route).mbu(worker.id)

    @property
    def uptime_s(self) -> float:
        """Since this process was wired."""
        return (self._services.clock.now_ns() - self._started_ns) / NS_PER_S

    async def numbers(self) -> Sum:
        """The numbers that only the sum over all gateway processes has."""
        if self._peers is not None:
            return await self._peers.sum()
        return Sum(
            metrics=b"",
            connections=self.num_connections,
            streams=self._services.dispatcher.num_streams,
            processes=1,
            models=model_numbers(self._services, self._metrics),
        )

    def own_status(self, tenant: Tenant) -> TenantStatus:
        """A tenant's part of `/status.json`."""
        services, now_ns = self._services, self._services.clock.now_ns()
        day_micros, month_micros = services.budgets.spent(now_ns, tenant.id)
        return TenantStatus(
            tenant=tenant.id,
            tier=tenant.tier,
            draining=services.leaving,
            auth=self.auth,
            streams=services.limiter.num_live(tenant.id),
            spent_day_micros=day_micros,
            spent_month_micros=month_micros,
            models=[_readiness(model) for model in services.models if may_use_model(tenant, model.name)],
        )

    async def _tokens(
        self, model: ServedModel, request: TokenizeRequest, caller: Caller, num_bytes: int
    ) -> tuple[int, ...]:
        pool, prompt = self._services.tokenize, request.prompt
        if prompt is not None:
            extra = request.add_special_tokens is not False
            return await pool.run(num_bytes, lambda: model.tokenizer.encode(prompt, add_special_tokens=extra))
        if request.messages is None:
            raise InvalidRequest("Give exactly one of 'prompt' and 'messages'.", param="prompt")
        return await render(
            pool,
            model,
            request.messages,
            caller.tenant,
            num_bytes,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            extra=request.chat_template_kwargs,
        )

    def _model(self, name: str | None, caller: Caller) -> ServedModel:
        model = self._services.models.get(name, caller.tenant)
        check_model(caller.tenant, model.name)
        return model

    def _follow(self, model: ServedModel) -> None:
        metrics, workers = self._metrics.model(model.name), list(model.workers)
        metrics.workers(worker.state for worker in workers)
        metrics.engine_stats({worker.id: worker.backend.status.stats for worker in workers})
        facts: dict[str, WorkerLabels] = {
            each.id: WorkerLabels(each.engine, info.identity, info.device)
            for each in workers
            if (info := each.backend.status.info) is not None
        }
        metrics.worker_facts(facts)
        if (info := model.workers.info) is not None:
            metrics.model_info(info, model.workers.adapter_counts())
        restarts = {str(worker.id): worker.backend.status.restarts for worker in workers}
        before, self._restarts[model.name] = self._restarts.get(model.name, {}), restarts
        for _ in range(sum(max(0, count - before.get(worker, 0)) for worker, count in restarts.items())):
            metrics.engine_restarted()


def model_numbers(services: Services, metrics: Metrics) -> dict[str, ModelNumbers]:
    """The numbers of each model that only this process has."""
    metrics.count_ended()
    queue_of, found = services.dispatcher.control.model_queue, dict[str, ModelNumbers]()
    for name in (model.name for model in services.models):
        queue, ttft = queue_of(name), metrics.model(name).ttft
        waiting = services.cold.num_waiting(name) + (0 if queue is None else queue.queue.num_waiting)
        found[name] = ModelNumbers(waiting, ttft.sum, ttft.count)
    return found


def _line(worker: Worker) -> WorkerLine:
    status = worker.backend.status
    return WorkerLine(
        id=worker.id,
        model=worker.route,
        engine=worker.engine,
        state=worker.state.value,
        running=status.stats.running if status.stats is not None else 0,
        waiting=status.stats.waiting if status.stats is not None else 0,
        restarts=status.restarts,
    )


def _readiness(model: ServedModel) -> ModelReadiness:
    status = model.workers.summary()
    ready, progress = status.ready or model.workers.is_expected, _progress(status.done, status.total)
    return ModelReadiness(name=model.name, ready=ready, stage=status.public_stage, progress=progress)


def _progress(done: int, total: int) -> float | None:
    return round(done / total, 3) if total else None


def _state(model: ServedModel, wall_ns: int) -> ModelState:
    status = model.workers.summary()
    notes = [f"{worker.id}, {note}" for worker in model.workers for note in worker.notes(wall_ns)]
    return ModelState(
        name=model.name,
        ready=status.ready or model.workers.is_expected,
        stage=status.stage,
        done=status.done,
        total=status.total,
        progress=_progress(status.done, status.total),
        restarts=status.restarts,
        notes=notes[-NOTES_MAX:],
        info=status.info,
        stats=status.stats,
        workers=Counter(worker.state.value for worker in model.workers),
    )


def answer(exchange: Exchange, shape: Any) -> None:  # noqa: ANN401
    """Respond with a shape as JSON."""
    exchange.respond(Response(body=msgspec.json.encode(shape)))


def query_of(exchange: Exchange) -> dict[str, str]:
    """The query behind the path, as far as one is read there."""
    return dict(parse_qsl(exchange.head.query[:1024]))


def whole_number(query: Mapping[str, str], name: str, default: int, *, minimum: int, maximum: int) -> int:
    """A number of a query.

    Raises:
        InvalidRequest: it is something else.
    """
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and minimum <= int(text) <= maximum):
        message = f"Invalid value for {name!r}: expected a whole number from {minimum} to {maximum}."
        raise InvalidRequest(message, param=name, code="invalid_value")
    return int(text)
