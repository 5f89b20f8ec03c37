"""The endpoints of operators, under /admin.

They want an admin key; a tenant's ordinary key is refused.
"""

from collections.abc import Collection
from typing import Any, get_args
from urllib.parse import unquote

import msgspec

from penstock import __version__
from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import InvalidRequest, NotFound
from penstock.fleet.members import Members
from penstock.fleet.registry import Registry, Worker
from penstock.gateway.api.feed import ServerLine
from penstock.gateway.api.inspect import Inspect, answer, query_of, whole_number
from penstock.gateway.api.job import ANSWER_IDS
from penstock.gateway.api.services import Services
from penstock.gateway.api.worker_trails import WorkerTrails
from penstock.gateway.dispatch.worker_feed import cell_view
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.models.served import ServedModel
from penstock.gateway.shared.peers import GatewayPeers
from penstock.policy.placement.pick import explain, explain_choice, without_waits
from penstock.policy.resilience.anomalies import Anomalies
from penstock.protocol.fleet import DrainOrder, FleetReport, ModelReport, WorkerReport
from penstock.protocol.peers import LookAt, ModelNumbers, Order, Sum
from penstock.telemetry.audit import LISTED_MAX, Kind
from penstock.telemetry.history import DAY_S, RECENT_S
from penstock.telemetry.watch import Watch
from penstock.types import RequestId, WorkerId

WORKERS = "/admin/workers/"
REQUESTS = "/admin/requests/"
_orders = msgspec.json.Decoder(DrainOrder)


class Admin:
    """The endpoints, over the services they share."""

    def __init__(
        self,
        services: Services,
        inspect: Inspect,
        registry: Registry,
        members: Members | None,
        watch: Watch | GatewayPeers,
        trails: WorkerTrails,
    ) -> None:
        """Without `members` no worker can be drained from here.

        With other processes beside this one orders reach, and numbers count, all of them.
        """
        self._services, self._inspect = services, inspect
        self._registry, self._members, self._watch, self._trails = registry, members, watch, trails
        self._peers = watch if isinstance(watch, GatewayPeers) else None

    async def workers(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/workers`: every worker as this gateway process sees it, every model as all of them
        do.
        """
        answer(exchange, self.report(await self._inspect.numbers()))

    async def look(self) -> tuple[ServerLine, FleetReport]:
        """The content of the console's feed."""
        services, numbers = self._services, await self._inspect.numbers()
        server = ServerLine(
            version=__version__,
            uptime_s=int(self._inspect.uptime_s),
            connections=numbers.connections,
            streams=numbers.streams,
            processes=numbers.processes,
            draining=services.leaving,
            auth=self._inspect.auth,
        )
        return server, self.report(numbers)

    def report(self, total: Sum) -> FleetReport:
        """The fleet, with the numbers of all gateway processes."""
        now_ns, wall_ns = self._services.clock.now_ns(), self._services.clock.wall_ns()
        numbers, gone = total.models, None if self._peers is None else frozenset(total.gone)
        left_alone = dict[WorkerId, str]()
        for model in self._services.models:
            left_alone |= self._services.dispatcher.left_alone(model.name)
        anomalies = self._services.dispatcher.anomalies
        workers = [
            _worker(
                worker, now_ns, wall_ns, left_alone.get(worker.id, ""), anomalies, self._inspect.mbu(worker)
            )
            for worker in self._registry
        ]
        return FleetReport(
            version=__version__,
            workers=workers + self._drained(gone),
            models=[_model(model, numbers.get(model.name)) for model in self._services.models],
        )

    async def requests(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/requests`: the last requests that ended, newest first."""
        answer(exchange, {"requests": (await self._services.all_requests.look()).latest()})

    async def request(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/requests/{id}`: one of them, by its `x-request-id` or the id of its answer, and what
        was decided about it, as `/admin/explain` says it.

        Raises:
            NotFound: it is not known, or not any more.
        """
        name = unquote(exchange.path.removeprefix(REQUESTS))
        ended = await self._services.all_requests.find(name)
        body = await self._decided(name)
        if ended is None and len(body) == 1 and not body["decisions"]:
            raise NotFound(
                f"No request {name[:128]!r} is known (any more).",
                code="unknown_request",
            )
        answer(exchange, {"request": ended, **body})

    async def history(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/history?seconds=900`: requests, errors, tokens, TTFT and TPOT of the last 15 minutes,
        or of up to a day, in columns by model and band, of all gateway processes
        (`telemetry.history.Window`).

        Raises:
            InvalidRequest: `seconds` is no whole number of them.
        """
        query = query_of(exchange)
        seconds = whole_number(query, "seconds", RECENT_S, minimum=1, maximum=DAY_S)
        await self._show(exchange, LookAt("history", seconds))

    async def alerts(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/alerts`: which alerts fire and why, the last ones that are over, and the burn rates of
        every objective, of all gateway processes (`telemetry.alerting.AlertsReport`).
        """
        await self._show(exchange, LookAt("alerts"))

    async def audit(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/audit?kind=admin&before=120&most=100`: what happened and who did it, newest first:
        admins' actions, alerts, workers that came and went, configurations; also of before a restart, of all
        gateway processes (`telemetry.audit.AuditReport`). Each part of the query may be left out; `before` is
        the number of an event.

        Raises:
            InvalidRequest: a part of the query is not what it should be.
        """
        query = query_of(exchange)
        kind = query.get("kind", "")
        if kind and kind not in get_args(Kind):
            message = f"Invalid value for 'kind': expected one of {', '.join(get_args(Kind))}."
            raise InvalidRequest(message, param="kind", code="invalid_value")
        limit = whole_number(query, "most", LISTED_MAX, minimum=1, maximum=LISTED_MAX)
        before = whole_number(query, "before", 0, minimum=0, maximum=2**53)
        await self._show(exchange, LookAt("audit", about=kind, before=before, limit=limit))

    async def _show(self, exchange: Exchange, at: LookAt) -> None:
        watch = self._watch
        body = watch.look(at) if isinstance(watch, Watch) else await watch.look(at)
        exchange.respond(Response(body=body))

    async def explain(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/explain/{request_id}`: which workers were considered for a request, what each scored
        and why one was picked, in whichever process; one entry per decision (holds and retries have more
        than one), oldest first. Of a request for "auto" also how its model was chosen, and of one without an
        answer why it has none. The id is the answer's or `x-request-id`.

        Raises:
            NotFound: it is not known, or not any more.
        """
        name = unquote(exchange.path.removeprefix("/admin/explain/"))
        body = await self._decided(name)
        if not body["decisions"] and len(body) == 1:
            raise NotFound(
                f"No decision about request {name[:128]!r} is known (any more).", code="unknown_request"
            )
        answer(exchange, {"request_id": name, **body})

    async def _decided(self, name: str) -> dict[str, Any]:
        """Every decision about a request, how its model was chosen if it was, and how it ended if it has no
        answer.
        """
        explained, kept = self._services.explained, self._services.kept
        names, failure = _names(name), None
        decisions = [decision for each in names for decision in explained.of(each)]
        choice = next(filter(None, map(explained.choice_of, names)), None)
        if not decisions and kept is not None:
            entries = await kept.find(*names)
            decisions = without_waits([entry.decision for entry in entries if entry.decision is not None])
            choice = next((entry.choice for entry in entries if entry.choice is not None), choice)
            failure = next((entry.failure for entry in entries if entry.failure is not None), None)
        body: dict[str, Any] = {"decisions": [explain(each) for each in decisions]}
        if choice is not None:
            body["model_choice"] = explain_choice(choice)
        if failure is not None:
            body["failure"] = failure
        return body

    async def worker(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/workers/{id}/history`: a worker's last 15 minutes by five seconds, as this gateway
        process saw it: output tokens per second, requests, share of KV blocks in use; `/log`: the last lines
        that it printed, if this server launched it, else null. The id may hold slashes.

        Raises:
            NotFound: there is no such worker, or nothing of that name about it.
        """
        shown, _, what = exchange.path.removeprefix(WORKERS).rstrip("/").rpartition("/")
        worker_id = WorkerId(unquote(shown))
        if what == "log" and shown:
            await self._show(exchange, LookAt("log", about=worker_id))
            return
        if what != "history" or not shown:
            raise NotFound("Unknown path. There are /history and /log of a worker.", code="unknown_path")
        found = self._trails.of(worker_id)
        if found is None:
            raise NotFound(f"Nothing is known of a worker {worker_id[:128]}.", code="unknown_worker")
        answer(exchange, found)

    async def order(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/workers/{id}/drain`: take a worker out of service; `/undrain` takes it back. The id
        may hold slashes.
        """
        shown, _, verb = exchange.path.removeprefix(WORKERS).rstrip("/").rpartition("/")
        worker_id = WorkerId(unquote(shown))
        if verb not in ("drain", "undrain") or not shown:
            raise NotFound("Unknown path. There are /drain and /undrain of a worker.", code="unknown_path")
        members = self._members
        if members is None:
            raise NotFound("This gateway keeps no workers.", code="unknown_path")
        timeout_s = None if verb == "undrain" else self._timeout_s(exchange.body)
        if not (members.is_held(worker_id) if timeout_s is None else members.hold(worker_id, timeout_s)):
            raise NotFound(f"There is no such worker: {worker_id[:128]}.", code="unknown_worker")
        if self._peers is not None:
            await self._peers.order(Order(worker_id, timeout_s))
        elif timeout_s is None:
            await members.release(worker_id)
        what = "brought back" if timeout_s is None else "drained"
        self._services.notes.note("admin", what, worker_id, by=caller.key_prefix)
        worker = self._registry.get(worker_id)
        streams = 0 if worker is None else worker.backend.num_streams
        state = "gone" if worker is None else worker.state.value
        answer(exchange, {"id": worker_id, "state": state, "streams": streams})

    def _timeout_s(self, body: bytes) -> float:
        """How long the streams have.

        Raises:
            InvalidRequest: the body says something else.
        """
        default_s = self._services.config.fleet.drain_timeout_s
        if not body.strip():
            return default_s
        try:
            order = _orders.decode(body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error
        return default_s if order.timeout_s is None else order.timeout_s

    def _drained(self, gone: Collection[str] | None) -> list[WorkerReport]:
        """Workers that were drained by hand and are gone: they can come back.

        `gone`: those that have left all gateway processes; None: there is only this one.
        """
        if self._members is None:
            return []
        return [
            WorkerReport(
                id=worker_id,
                model=each.route,
                engine=each.engine,
                address=each.address,
                state="gone" if gone is None or worker_id in gone else "draining",
                stage="drained by hand",
            )
            for worker_id, each in self._members.held.items()
            if self._registry.get(worker_id) is None
        ]


def _names(name: str) -> list[RequestId]:
    """The names of a request in decisions: as its answer is, or by its own id."""
    own = name.partition("req-")[2] or next(
        (name.removeprefix(each) for each in ANSWER_IDS if name.startswith(each)), ""
    )
    return [RequestId(prefix + own) for prefix in (*ANSWER_IDS, "req-")] if own else [RequestId(name)]


def _model(model: ServedModel, numbers: ModelNumbers | None) -> ModelReport:
    return ModelReport(
        name=model.name,
        waiting=numbers.waiting if numbers is not None else 0,
        ready=model.workers.num_ready,
        workers=len(model.workers),
        ttft_sum_s=numbers.ttft_sum_s if numbers is not None else 0.0,
        ttft_count=numbers.ttft_count if numbers is not None else 0,
    )


def _worker(
    worker: Worker,
    now_ns: int,
    wall_ns: int,
    left_alone: str,
    anomalies: Anomalies,
    mbu: float | None,
) -> WorkerReport:
    status, watched = worker.backend.status, anomalies.get(worker.id)
    stats, slowness, cell = status.stats, anomalies.slowness(worker.id), cell_view(worker)
    return WorkerReport(
        id=worker.id,
        model=worker.route,
        engine=worker.engine,
        state=worker.state.value,
        stage=worker.stage,
        left_alone=left_alone,
        standing=watched.standing.value if watched is not None else "",
        slowness=None if slowness is None else round(slowness, 3),
        probe=watched.verdict if watched is not None else "",
        epoch=worker.epoch,
        address=worker.address,
        identity=status.info.identity if status.info is not None else "",
        running=stats and stats.running,
        waiting=stats and stats.waiting,
        kv_blocks_used=stats and stats.blocks_used,
        kv_blocks_total=stats and stats.blocks_total,
        generated_tokens=stats and stats.generated_tokens,
        age_s=round((now_ns - worker.received_ns) / NS_PER_S, 3) if worker.received_ns else None,
        cell=cell.name if cell is not None else "",
        rtt_ms=round(cell.rtt_ns / NS_PER_MS, 2) if cell is not None and cell.rtt_ns else None,
        wait_ms=round(cell.wait_ns / NS_PER_MS, 2) if cell is not None else None,
        adapters=sorted(status.adapters.served),
        adapters_loaded=sorted(status.adapters.loaded),
        device=status.info.device if status.info is not None else "",
        mbu=mbu if mbu is None else round(mbu, 3),
        restarts=status.restarts,
        notes=worker.notes(wall_ns),
    )
