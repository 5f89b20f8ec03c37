"""The gateway: everything wired together behind one listening address.

    gateway = Gateway(config, models, registry, GatewayTools(metrics=metrics, clock=clock, ids=ids, log=log))
    host, port = await gateway.start()
    ...
    await gateway.stop()

`Gateway` is what the HTTP server calls for every request: it finds the route, checks the key, runs the
handler, turns errors into responses, and counts and logs every exchange once.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from penstock import __version__
from penstock.clock import NS_PER_S, sleep
from penstock.config.checkpoints import served_name
from penstock.config.tenancy import names_callers
from penstock.config.tree import Config
from penstock.errors import Draining, PenstockError
from penstock.fleet.adapters import AdapterKeeper
from penstock.fleet.kv_watch import KVWatch
from penstock.fleet.leadership import Leadership
from penstock.fleet.members import Members
from penstock.fleet.registry import Registry
from penstock.fleet.rollouts import RolloutLeader, rollouts_file
from penstock.fleet.scaling import ScaleLeader
from penstock.gateway.api.admin import Admin
from penstock.gateway.api.console import Console
from penstock.gateway.api.costs import CostsAdmin
from penstock.gateway.api.ensembles import Ensembles
from penstock.gateway.api.generate import Generate
from penstock.gateway.api.inspect import Inspect, model_numbers
from penstock.gateway.api.orders import AdaptersAdmin, RolloutsAdmin, ScaleAdmin, SleepAdmin
from penstock.gateway.api.responses import Responses
from penstock.gateway.api.routes import Answers, Handler, Orders, Route, Routes, is_poll
from penstock.gateway.api.services import Services
from penstock.gateway.api.tenants import TenantsAdmin
from penstock.gateway.api.vectors import VectorEndpoints
from penstock.gateway.api.worker_trails import LeftAlone, WorkerTrails
from penstock.gateway.cells.server import cells_of
from penstock.gateway.dispatch.assemble import GatewayTools, StretchedPromises, make_policies
from penstock.gateway.dispatch.worker_feed import ColdStarts, WakeCalls
from penstock.gateway.http.begun import Begun
from penstock.gateway.http.errors import error_response, failure_of
from penstock.gateway.http.exchange import Ending, Exchange, RequestHead, Response, outcome_of
from penstock.gateway.http.server import LAST_ANSWERS_S, LAST_BYTES_S, HttpServer, tick_s
from penstock.gateway.http.terms import WIRE_LIMITS, WireLimits
from penstock.gateway.identity.tenancy import Entrance, Tenancy
from penstock.gateway.identity.tenants import Caller, TenantTable
from penstock.gateway.models.prepare import TokenizePool
from penstock.gateway.models.served import ModelTable, ServedModel
from penstock.gateway.shared.fair import FairExchange
from penstock.gateway.shared.peers import GatewayPeers
from penstock.gateway.tracing import RequestTraces
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.worker_cache_view import KV_INDEX_LIMITS
from penstock.policy.admission.admit import Promises
from penstock.policy.queueing.fair_counters import FairCounters
from penstock.policy.rollout.dealing import ActiveRollout
from penstock.rng import fresh_key
from penstock.telemetry.audit import Notes
from penstock.telemetry.catalog import OutcomeLabel
from penstock.telemetry.counts import RequestMeasurement
from penstock.telemetry.history import Recorder
from penstock.telemetry.log import AccessLine
from penstock.telemetry.watch import Tail, Watch, no_tail
from penstock.types import ModelName, RequestId


class Gateway:
    """The OpenAI-compatible front door of this process."""

    _pulse: asyncio.Task[None] | None = None

    def __init__(
        self,
        config: Config,
        models: Mapping[ModelName, ServedModel],
        registry: Registry,
        tools: GatewayTools,
        members: Members | None = None,
        *,
        peers: GatewayPeers | None = None,
        hash_key: bytes = b"",
        limits: WireLimits = WIRE_LIMITS,
        tail: Tail = no_tail,
    ) -> None:
        """`config.auth` must say who may call, or that everybody may.

        With `members` workers can be drained by hand; `peers` are of several processes that share an address.
        Workers that share `hash_key` name their KV blocks with it; `tail` gives the last lines of those that
        were launched. Raises ConfigError: the keys file cannot be read, or does not go with the tiers.
        """
        assert names_callers(config.auth), "the wiring of the gateway makes a key"
        metrics, clock, ids, log = tools.metrics, tools.clock, tools.ids, tools.log
        self._config, self._clock, self._ids, self._metrics, self._log = config, clock, ids, metrics, log
        watch = peers or Watch(config, clock, log, lambda: self._inspect.rendered(), tail)
        self._watch = watch if isinstance(watch, Watch) else None
        self.notes = Notes(clock, watch.keep)  # For the audit trail.
        self.tenancy = Tenancy(config, clock=clock, log=log, notes=self.notes if peers is None else None)
        """The callers; parts that can take a new configuration subscribe to its `on_reload`."""
        locality = KVLocality(KV_INDEX_LIMITS, hash_key or fresh_key())
        self._kv = KVWatch(registry, locality, KV_INDEX_LIMITS, log)
        self._adapters = AdapterKeeper(registry, log, places=peers is None or peers.index == 0)
        self._adapters.configure(_adapters_of(config))
        self._limits, self._registry, self._peers, name = limits, registry, peers, ids.take("gw")
        self._traces = RequestTraces(config.traces, instance=name, clock=clock, log=log)
        self._policies = make_policies(
            config, models, registry, tools, gateway=name, locality=locality,
            leases="" if peers is None else peers.leases, on_adapter_order=self._adapters.carry_out,
        )  # fmt: skip
        self._dispatcher, self._entrance = self._policies.dispatcher, Entrance(self.tenancy, config.server)
        self._services = Services(
            config=config,
            models=ModelTable(models, config.routing, config.ensembles),
            ids=ids,
            clock=clock,
            tokenize=TokenizePool(metrics, log),
            dispatcher=self._dispatcher,
            admission=self._policies.admission,
            limiter=self._policies.limits.limiter,
            ask_store=self._policies.ask_store,
            budgets=self._policies.budgets,
            cold=ColdStarts(config.queue, registry),
            wakes=WakeCalls(tools.sleeper or peers, registry, self._dispatcher.control, log),
            metrics=metrics,
            explained=self._policies.explained,
            kept=self._policies.kept,
            locality=locality,
            log=log,
            notes=self.notes,
            peers=peers,
        )
        self._counters = FairCounters([*map(str, models)], self._dispatcher.control.model_queue)
        self._fair = FairExchange(self._counters, config.shared, peers, gateway=name)
        self._leader = self._lead_rollouts(tools.leadership) if peers is None else None
        self._inspect = Inspect(self._services, metrics, version=__version__, members=members, peers=peers)
        self.tenancy.on_reload.extend((self._reloaded, self._policies.reload))
        self._recorder = Recorder(Promises(config.admission), metrics)
        self._left_alone = LeftAlone(partial(self._dispatcher.left_alone, rests=False), self.notes)
        self._routes = self._make_routes(registry, members, watch, self._join_scaler(tools.scaler))
        self._cells = cells_of(config, self._services, registry, limits, self.finished)
        self._server = HttpServer(self, config.server, clock=clock, limits=limits)
        self._log_is_due, self._hurried, self._begun = False, asyncio.Event(), Begun()

    def _lead_rollouts(self, leadership: Leadership | None) -> RolloutLeader:
        models = self._services.models
        return RolloutLeader(
            lambda: [each.name for each in models], self._clock, self._log, self.notes,
            path=rollouts_file(self._config), publish=models.rollouts.adopt,
            new_id=lambda: self._ids.take("rollout"), leadership=leadership,
        )  # fmt: skip

    def _join_scaler(self, scaler: ScaleLeader | None) -> ScaleLeader | None:
        """Let who decides how many workers there are hear what it decides by."""
        if scaler is not None and self._watch is not None:
            services, metrics = self._services, self._metrics
            scaler.notes, scaler.publish = self.notes, self.expect
            scaler.waiting = lambda: {k: v.waiting for k, v in model_numbers(services, metrics).items()}
            self._watch.history.on_rows = scaler.received if scaler else None
            self._inspect.measure = lambda: scaler.measure(metrics.scale_wanted)
        return scaler

    def expect(self, to_come: Mapping[str, float]) -> None:
        """Requests may wait for these models although they have no worker: one comes in so many seconds."""
        for model in self._services.models:
            model.workers.to_come = model.name in to_come
        self._services.cold.to_come = to_come
        self._dispatcher.expect(to_come)

    def _make_routes(
        self,
        registry: Registry,
        members: Members | None,
        watch: Watch | GatewayPeers,
        scaler: ScaleLeader | None,
    ) -> Routes:
        services = self._services
        self._trails = WorkerTrails(registry, self._clock)
        admin = Admin(services, self._inspect, registry, members, watch, self._trails)
        nights = SleepAdmin(services)
        self._console = Console(services, self._inspect, admin)
        self._ensembles = Ensembles(self._config)
        self._responses = Responses(services, generate := Generate(services))
        tenants = TenantsAdmin(services, self.tenancy)
        adapters = AdaptersAdmin(services, self._adapters)
        answers = Answers(generate, self._responses, VectorEndpoints(services), self._ensembles.around)
        console, costs = self._console, CostsAdmin(services)
        rollouts = RolloutsAdmin(services.models, self._leader, services.peers)
        orders = Orders(adapters, nights, costs, rollouts, ScaleAdmin(scaler, services.peers))
        return Routes(answers, self._inspect, admin, tenants, console, orders)

    @property
    def num_accepted(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._dispatcher)

    def adopt_adapters(self, loaded: Mapping[str, Mapping[str, str]]) -> None:
        """Hear what operators have loaded and unloaded at any process of this server."""
        self._adapters.adopt(loaded)

    def adopt_rollouts(self, active: bytes) -> None:
        """Hear what the parent says is rolled out: JSON of `ActiveRollout`s."""
        self._services.models.rollouts.adopt(msgspec.json.decode(active, type=list[ActiveRollout]))

    async def start(self, listeners: Sequence[socket.socket] = ()) -> tuple[str, int]:
        """Listen; returns host and port. Models may still be loading: `/ready` says when they are not.

        `listeners` are sockets that listen already, shared with other processes.

        Raises:
            ConfigError: the address cannot be listened on, or a step of an ensemble cannot be imported.
        """
        await self._ensembles.start()
        await self._policies.start()
        if self._watch is not None:
            await self._watch.start(self._recorder.take)
        if self._leader is not None:
            await self._leader.start()
        self._traces.start()
        self._kv.start()
        await self._cells.start()
        address = await self._server.start(listeners)
        self._pulse = asyncio.create_task(self._beat(), name="gateway-pulse")
        self.tenancy.start()
        if self._peers is not None:
            latest = self._services.recent.take_unreported
            await self._peers.start(self._inspect.snapshot, self._counters, self._recorder, latest)
        self._fair.start()
        return address

    async def stop(self, *, lameduck_s: float = 0.0, listens: bool = True) -> None:
        """Leave without a loss:

            lameduck   `/ready` says no, requests are served, for balancers hear of a stop seconds later
            drain      new requests get 503 `draining`, running streams may end within `drain_timeout_s`
            end        streams that are left get a last error event; what clients got is settled

        Without `listens` another process accepts from the same socket: nothing is accepted here, and nothing
        is refused on connections that are left, each of which closes after its next answer. Sockets that were
        given to `start` stay open: their owner answers what comes behind the end (`refuse_the_rest`).
        `hurry` goes to the end at once. Backends are left alone: their owner drains them afterwards.
        """
        services, drain_s = self._services, self._config.server.drain_timeout_s
        services.leaving = True
        self._cells.refresh()
        self._console.close()
        self._server.close_after_answers()
        if not listens:
            self._server.close_listeners()
        await self._until(lambda: not (listens or self._server.num_connections), lameduck_s)
        if not listens:
            self._server.close_idle()
            began_ns = self._clock.now_ns()
            await self._until(lambda: not self._server.num_connections, drain_s)
            drain_s = max(0.0, drain_s - (self._clock.now_ns() - began_ns) / NS_PER_S)
        services.draining = True
        services.cold.close()
        services.wakes.close()
        self.tenancy.stop()
        self._dispatcher.drain(drain_s)
        tasks = self._begun.tasks
        begun = set(tasks)  # Those that come later are refused, and could come for ever.
        await self._until(lambda: not (self._dispatcher or begun & tasks), drain_s)
        self._dispatcher.fail_all(Draining("The server is shutting down; this answer is incomplete."))
        services.trials.close()
        await self._responses.close()
        await self._ensembles.close()
        await self._cells.stop()
        await self._server.finish(LAST_BYTES_S if self._hurried.is_set() else LAST_ANSWERS_S)
        for task in [*tasks, *([self._pulse] if self._pulse else [])]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fair.close()
        if self._peers is not None:
            self._peers.close()
        await self._server.stop()
        if self._leader is not None:
            await self._leader.stop()
        if self._watch is not None:
            await self._watch.stop()
        await self._traces.stop()
        await self._policies.stop()
        await self._kv.close()
        services.tokenize.close()
        self._log.flush()

    def hurry(self) -> None:
        """Stop waiting, in a `stop` that runs."""
        self._hurried.set()

    # --- what the HTTP server calls --------------------------------------------------------------

    def refuse(self, head: RequestHead, client: str) -> Response | None:
        """Refuse wrong paths and verbs from the head alone, and keys before their body costs memory."""
        try:
            route = self._routes.find(head.path)
            if head.method == "OPTIONS":
                return _options(route)
            handler = route.handler(head.method)
            caller = self._entrance.caller(route.access, head, client)
            route.check_body(head)
        except PenstockError as error:
            return error_response(error)
        table = self.tenancy.table if caller is not None and caller.steady else None
        msgspec.structs.force_setattr(head, "seen", _Entered(handler, caller, table))
        return None

    def knows(self, head: RequestHead) -> bool:
        """Whether this head was let in by the callers' table in force."""
        seen = head.seen
        return isinstance(seen, _Entered) and seen.table is self.tenancy.table

    def handle(self, exchange: Exchange) -> None:
        """Start answering. One task for a request that has to wait; none per token."""
        exchange.id = self._ids.take("req")
        if self._traces.exports or b"traceparent" in exchange.head.headers:
            self._traces.begin(exchange)
        if isinstance(seen := exchange.head.seen, _Entered):
            handler, caller, _ = seen
        else:
            try:
                route = self._routes.find(exchange.path)
                if exchange.method == "OPTIONS":
                    exchange.respond(_options(route))
                    return
                handler = route.handler(exchange.method)
                caller = self._entrance.caller(route.access, exchange.head, exchange.client)
            except PenstockError as error:
                exchange.respond(error_response(error))
                return
        begins = caller is not None and handler in self._routes.at_once
        start = self._begun.begin if begins else self._begun.follow
        start(self._run(handler, exchange, caller))

    def finished(self, exchange: Exchange) -> None:
        """Count and log an exchange that is over."""
        now_ns = self._clock.now_ns()
        if exchange.status:
            self._metrics.http_response(exchange.status)
        if exchange.ending is Ending.DISCONNECTED:
            self._metrics.client_disconnects.inc()
        elif exchange.ending is Ending.OVERRUN:
            self._metrics.slow_client_aborts.inc()
        served, record = exchange.served, None
        if served is not None:
            if exchange.ending is Ending.DISCONNECTED and exchange.outcome is None:
                exchange.outcome = OutcomeLabel.ABORT  # It left while its prompt was tokenized.
            record = exchange.measured(served, now_ns)
            self._recorder.ended(served.counted_model, record)
            self._services.recent.add(exchange, served, record)
            if served.assigned is not None:
                self._services.trials.ended(exchange, served, record)
        if exchange.trace is not None:
            self._traces.end(exchange, record)
        kept = self._policies.kept
        if exchange.error is not None and kept is not None and exchange.path.startswith("/v1/"):
            kept.failed(RequestId(exchange.id), failure_of(exchange.error))
        if self._log.tells_requests:
            self._log.access(_access_line(exchange, record, now_ns))
            if not self._log_is_due:
                self._log_is_due = True
                asyncio.get_running_loop().call_soon(self._flush_log)

    # --- inside ----------------------------------------------------------------------------------

    def _flush_log(self) -> None:
        self._log_is_due = False
        self._log.flush()

    def _reloaded(self, config: Config) -> None:
        self._inspect.auth = not config.auth.disabled
        self._adapters.configure(_adapters_of(config))

    async def _run(self, handler: Handler, exchange: Exchange, caller: Caller | None) -> None:
        try:
            await handler(exchange, caller or await self.tenancy.identify_later(exchange.head))
        except PenstockError as error:
            self._failed(exchange, error)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others.
            self._log.bug("a handler failed", error, request_id=exchange.id)
            self._failed(exchange, error)
        finally:
            exchange.forget_request()

    def _failed(self, exchange: Exchange, error: Exception) -> None:
        exchange.error = error
        if exchange.outcome is None:
            exchange.outcome = outcome_of(error)
        if exchange.streaming:
            exchange.cut()
        else:
            exchange.respond(error_response(error))

    async def _beat(self) -> None:
        """Heartbeats and the event loop's lag; the only thing here that runs on a timer."""
        heartbeat_s = self._limits.heartbeat_s
        period_s = tick_s(heartbeat_s)
        ticks = max(1, round(heartbeat_s / period_s))
        warned_ns = 0
        stretched = StretchedPromises(self._config.admission, self._log)
        while True:
            before_ns = self._clock.now_ns()
            await sleep(period_s)
            lag_s = (self._clock.now_ns() - before_ns) / NS_PER_S - period_s
            self._metrics.event_loop_lag.observe(max(0.0, lag_s))
            self._metrics.connections.set(self._server.num_connections)
            self._inspect.num_connections = self._server.num_connections
            self._dispatcher.tick()
            self._services.wakes.look()
            self._policies.prober.tick()
            self._report_spending()
            self._metrics.traces(self._traces.exported, self._traces.dropped)
            if (leases := self._policies.limits.leases) is not None:
                self._metrics.shared_limits(
                    is_away=leases.down_ns is not None,
                    failures=leases.num_failures,
                    num_gateways=leases.num_gateways,
                )
            if before_ns - warned_ns >= NS_PER_S:  # Counting takes a millisecond.
                warned_ns = before_ns
                self._metrics.kv_index_stats(self._kv.statistics(before_ns))
                self._trails.sample()
                self._tell_of_rollouts()
                for model in self._services.models:
                    stretched.look(model.name, self._dispatcher.control.model_queue(model.name))
                    self._left_alone.look(model.name)
            if heartbeat_s > 0:
                self._dispatcher.heartbeat(ticks)

    def _tell_of_rollouts(self) -> None:
        """Outcomes of its requests go to the process that decides."""
        if not (seen := self._services.models.rollouts.take()):
            return
        if self._leader is not None:
            self._leader.take(seen)
        elif self._peers is not None:
            self._peers.observed(msgspec.msgpack.encode(seen))

    def _report_spending(self) -> None:
        """The ledger's state, and budgets that come to their end."""
        self._metrics.ledger_stats(self._policies.ledger.statistics())
        for event in self._policies.budgets.take_events():
            self._metrics.budget_warning(event.period)
            self._log.warning(
                "a tenant has used a share of its budget",
                tenant=event.tenant,
                period=event.period,
                share=event.share,
                spent_micros=event.spent_micros,
                limit_micros=event.limit_micros,
            )

    async def _until(self, happened: Callable[[], bool], timeout_s: float) -> None:
        """Wait until that has happened, or for so long, or until there is no time."""
        deadline_ns = self._clock.now_ns() + int(timeout_s * NS_PER_S)
        while self._clock.now_ns() < deadline_ns and not self._hurried.is_set() and not happened():
            await sleep(0.02)


def _access_line(exchange: Exchange, record: RequestMeasurement | None, now_ns: int) -> AccessLine:
    served = exchange.served
    return AccessLine(
        method=exchange.method,
        path=exchange.path,
        status=exchange.status or 499,  # nginx's number for a client that left before the answer.
        duration_ns=now_ns - exchange.started_ns,
        is_poll=is_poll(exchange.method, exchange.path, exchange.status),
        request_id=exchange.id or None,
        trace_id=exchange.trace and exchange.trace.trace_id,
        model=served and served.counted_model,
        outcome=record and record.outcome,
        ttft_ns=record and record.ttft_ns,
        prompt_tokens=record and record.prompt_tokens,
        cached_tokens=record and record.cached_tokens,
        generated_tokens=record and record.generated_tokens,
    )


class _Entered(NamedTuple):
    """The route and the caller of a request's head."""

    handler: Handler
    caller: Caller | None
    table: TenantTable | None
    """The one that says so, for as long as it is in force; None: it may say something else later."""


def _options(route: Route) -> Response:
    return Response(status=204, body=b"", headers=((b"allow", ", ".join(route.allowed).encode()),))


def _adapters_of(config: Config) -> dict[str, dict[str, str]]:
    return {served_name(model): model.adapters for model in config.models}
