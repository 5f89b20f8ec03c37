"""Workers and what waits for the first of them.

`WorkerFeed` brings the registry's reports to flow control when it is next asked: once for each worker that
has changed, however often it did. It costs nothing while nothing changes, however many workers there are.

`ColdStarts` has the requests for a model that has had no worker yet. Its context and vocabulary come with its
first worker, and without these a prompt cannot be checked or counted, so such requests wait here and not in
the model's queue. The bounds are the queue's own: how many requests and bytes, one tenant's share of them,
and how long (`queue.no_worker_wait_s`).

`WakeCalls` wakes models that requests wait for, and ends those that wait for one that cannot be woken. A
request for a model that is asleep waits in its queue like any other. The code that accepts one says so
(`wanted`), and the models that are asleep are looked at now and then, for a request that ran elsewhere may
come back to a queue (`look`).
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping

from penstock.clock import NS_PER_S
from penstock.config.flow import QueueConfig
from penstock.errors import Draining, Overloaded, PenstockError, WorkerUnavailable
from penstock.fleet.cells import CellBackend
from penstock.fleet.registry import Registry, Worker
from penstock.fleet.sleep import Sleeper
from penstock.gateway.dispatch.prober import probed_as
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.models.served import ServedModel
from penstock.gateway.relay.reply import Reply
from penstock.policy.flow import State
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.resilience.anomalies import Anomalies, Standing
from penstock.policy.resilience.worker_state import WorkerState
from penstock.policy.terms import CellView, part_of, queue_terms
from penstock.protocol.worker import ModelInfo, Stats
from penstock.telemetry.log import Log
from penstock.types import TenantId, WorkerId

_LOST = (WorkerState.STARTING, WorkerState.LOADING, WorkerState.WARMING)
"""Nothing runs there: its process is a new one, or cannot be reached."""


class WorkerFeed:
    """Between the registry and flow control."""

    def __init__(
        self,
        control: FlowControl,
        registry: Registry,
        meters: Meters,
        anomalies: Anomalies,
        *,
        processes: int,
        shed_kv_above: float,
        on_change: Callable[[], None],
    ) -> None:
        """`processes`: gateways that use the workers; of several, what runs there is not all ours.

        `on_change` is called for a change that cannot wait for the next request: some wait, or a worker's KV
        memory is fuller than the share `shed_kv_above`. It may ask for a `refresh`, later.
        """
        self._control, self._meters, self._processes = control, meters, processes
        self._anomalies = anomalies
        self._shed_kv_above, self._on_change = shed_kv_above, on_change
        self._changed: dict[WorkerId, Worker] = {worker.id: worker for worker in registry}
        self._round_trips: dict[str, int] = {}
        self._ready: set[WorkerId] = set()
        """Workers that are ready."""
        self._routes: dict[str, None] = {}
        self._to_come: set[str] = set()
        registry.listen(self._note)

    def refresh(self, now_ns: int) -> None:
        """Tell flow control what has changed since the last time."""
        if self._changed:
            changed, self._changed = self._changed, {}
            for worker in changed.values():
                self._tell(now_ns, worker)

    def expect(self, now_ns: int, to_come: Mapping[str, float]) -> None:
        """These models have no worker and get one when somebody asks, in so many seconds: like those that
        sleep, they can be waited for.
        """
        for route in self._to_come - to_come.keys():
            self._control.set_worker(now_ns, route, _to_come(route), None)
        for route, seconds in to_come.items():
            view = WorkerView(ready=False, wake_ns=max(1, int(seconds * NS_PER_S)))
            self._control.set_worker(now_ns, route, _to_come(route), view)
        self._to_come = set(to_come)

    def num_waiting(self) -> Iterator[tuple[str, int]]:
        """Each model, and how many requests wait for it."""
        for route in self._routes:
            model_queue = self._control.model_queue(route)
            if model_queue is not None:
                yield route, model_queue.queue.num_waiting

    def round_trips(self) -> Iterator[tuple[str, int]]:
        """Each peer cell, and how far it is, there and back."""
        yield from self._round_trips.items()

    def _note(self, worker: Worker) -> None:
        self._changed[worker.id] = worker
        if any(count for _, count in self.num_waiting()) or self._is_nearly_full(worker):
            self._on_change()

    def _is_nearly_full(self, worker: Worker) -> bool:
        """Whether streams may have to end there for the sake of others that run there: no request need wait
        for that.
        """
        stats = worker.backend.status.stats
        return stats is not None and stats.blocks_used > self._shed_kv_above * stats.blocks_total > 0

    def _tell(self, now_ns: int, worker: Worker) -> None:
        route = worker.route
        self._routes[route] = None
        if worker.state is WorkerState.GONE:
            self._ready.discard(worker.id)
            self._meters.left(now_ns, worker.id)
            self._anomalies.gone(worker.id)
            self._control.set_worker(now_ns, route, worker.id, None)
            return
        if worker.is_ready:
            self._ready.add(worker.id)
        else:
            self._ready.discard(worker.id)
        self._watch(now_ns, worker)
        self._tell_meters(now_ns, worker)
        self._control.set_worker(now_ns, route, worker.id, self._view(worker))

    def left_alone(self, route: str) -> dict[WorkerId, str]:
        """Ready workers of a model that are given less or nothing for what they compute, and why."""
        watched = {each: self._anomalies.get(each) for each in self._ready}
        return {
            worker_id: f"it is {found.standing.value}: {found.why}"
            for worker_id, found in watched.items()
            if found is not None and found.route == route and found.standing is not Standing.WELL
        }

    def _tell_meters(self, now_ns: int, worker: Worker) -> None:
        meters, name = self._meters, worker.id
        if worker.cell is not None:
            return  # Its machines are on its own bill.
        meters.has_worker(now_ns, worker.route, name, tells=worker.engine == "penstock")
        in_service = worker.is_ready and self._anomalies.weight(name) > 0
        meters.serves(now_ns, name, in_service=in_service, is_lost=worker.state in _LOST)
        if (stats := worker.backend.status.stats) is not None:
            num = stats.running + stats.waiting
            meters.reported(now_ns, name, busy_ns=stats.busy_ns, num_requests=num, floor_ns=stats.floor_ns)

    def _watch(self, now_ns: int, worker: Worker) -> None:
        status = worker.backend.status
        identity, beats = probed_as(worker)
        self._anomalies.worker(
            now_ns,
            worker.route,
            worker.id,
            ready=worker.is_ready,
            epoch=worker.epoch,
            identity=identity,
            kind=worker.kind,
            beats=beats,
        )
        if (stats := status.stats) is not None:
            self._anomalies.stepped(worker.id, stats.timed)

    def _view(self, worker: Worker) -> WorkerView:
        info, stats = worker.backend.status.info, worker.backend.status.stats
        adapters, weight = worker.backend.status.adapters, self._anomalies.weight(worker.id)
        rows, cell = math.ceil(weight * _rows(info, stats)), cell_view(worker)
        if cell is not None:
            self._round_trips[cell.name] = cell.rtt_ns
        is_external = worker.engine != "penstock" and cell is None
        is_shared = cell is not None or (self._processes > 1 and not (is_external and rows))
        return WorkerView(
            ready=worker.is_ready and weight > 0,
            max_running=part_of(rows, self._processes) if is_external else rows,
            running=stats.running if stats is not None and is_shared else 0,
            waiting=stats.waiting if stats is not None and is_shared else 0,
            kv_blocks_total=stats.blocks_total if stats is not None else 0,
            kv_blocks_used=stats.blocks_used if stats is not None else 0,
            kind=worker.kind,
            max_model_len=info.max_model_len if info is not None else 0,
            resumes=worker.backend.status.resumes,
            terms=worker.terms and worker.terms.part(self._processes),
            is_external=is_external,
            identity=info.identity if info is not None else "",
            adapters=adapters.loaded,
            adapters_served=adapters.served,
            adapters_max=adapters.room,
            adapter_load_ns=adapters.load_ns,
            capabilities=worker.capabilities or worker.places,
            wake_ns=0 if worker.backend.status.asleep is None else worker.backend.status.asleep.wake_ns,
            cell=cell,
        )


def cell_view(worker: Worker) -> CellView | None:
    """The distance and the price of a worker that is a peer cell; None: it is a worker of this one."""
    if worker.cell is None:
        return None
    assert isinstance(worker.backend, CellBackend), "who is a peer speaks as one"
    rtt_ns, wait_ns = worker.backend.rtt_ns, worker.backend.cell_report.wait_ns
    return CellView(name=worker.cell.name, rtt_ns=rtt_ns, wait_ns=wait_ns, price=worker.cell.egress_price)


def _to_come(route: str) -> WorkerId:
    """Stands for the worker that a model will have; no worker of a launcher has such a name."""
    return WorkerId(f"{route} (to come)")


def _rows(info: ModelInfo | None, stats: Stats | None) -> int:
    """Requests that the worker runs at once; 0 if it does not tell."""
    if info is None:
        return 0
    return min(info.max_running, stats.rows_max) if stats is not None and stats.rows_max else info.max_running


class _Line:
    """The requests that wait for one model, in the order in which they came."""

    __slots__ = ("by_tenant", "num_bytes", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}
        self.by_tenant: dict[TenantId, int] = {}
        self.num_bytes = 0


class ColdStarts:
    """See the module. One per gateway."""

    def __init__(self, config: QueueConfig, registry: Registry) -> None:
        self._config = queue_terms(config)
        self._lines: dict[str, _Line] = {}
        self._closed = False
        self.to_come: Mapping[str, float] = {}
        """Models that get a worker when somebody asks, in so many seconds."""
        registry.listen(self._changed)

    def num_waiting(self, route: str) -> int:
        """Requests that wait for a model's first worker."""
        line = self._lines.get(route)
        return 0 if line is None else len(line.waiting)

    async def wait(self, model: ServedModel, exchange: Exchange, num_bytes: int, tenant: TenantId) -> None:
        """Return once a worker of the model has been ready, or the client has left; the request takes
        `num_bytes` meanwhile.

        Raises:
            WorkerUnavailable: there was none for as long as requests wait.
            Overloaded: too many wait already.
            Draining: the server is going away.
        """
        config = self._config
        if model.workers.info is not None:
            return
        wait_s = config.no_worker_wait_s + 2 * self.to_come.get(model.name, 0.0)
        if not wait_s:
            raise _not_ready(model)
        line = self._lines.setdefault(model.name, _Line())
        self._check_room(line, model, num_bytes, tenant)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting[waiter] = None
        line.num_bytes += num_bytes
        line.by_tenant[tenant] = line.by_tenant.get(tenant, 0) + 1
        exchange.on_disconnect = lambda: _wake(waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter
        except TimeoutError:
            raise _not_ready(model) from None
        finally:
            exchange.on_disconnect = None
            del line.waiting[waiter]
            line.num_bytes -= num_bytes
            line.by_tenant[tenant] -= 1
            if not line.by_tenant[tenant]:
                del line.by_tenant[tenant]
        if self._closed:
            raise Draining("The server is shutting down.")

    def close(self) -> None:
        """The server is going away: nothing waits any more."""
        self._closed = True
        for line in self._lines.values():
            for waiter in line.waiting:
                _wake(waiter)

    def _check_room(self, line: _Line, model: ServedModel, num_bytes: int, tenant: TenantId) -> None:
        config = self._config
        share = math.ceil(config.requests_max * config.tenant_share)
        if (
            len(line.waiting) >= config.requests_max
            or line.num_bytes + num_bytes > config.bytes_max
            or line.by_tenant.get(tenant, 0) >= share
        ):
            raise Overloaded(
                f"Too many requests wait for the model '{model.name}' to start. Try again in a moment."
            )

    def _changed(self, worker: Worker) -> None:
        line = self._lines.get(worker.route)
        if line is not None and worker.is_ready:
            for waiter in line.waiting:
                _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _not_ready(model: ServedModel) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"The model '{model.name}' is not ready: {model.workers.summary().public_stage}."
    )


class WakeCalls:
    """One per gateway process. Of each model at most one call is under way."""

    def __init__(self, sleeper: Sleeper | None, registry: Registry, control: FlowControl, log: Log) -> None:
        """Without a `sleeper` nothing sleeps."""
        self.sleeper = sleeper
        self._registry, self._control, self._log = registry, control, log
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def wanted(self, route: str) -> None:
        """A request waits for this model, which sleeps, or would have: wake it."""
        if self.sleeper is None or route in self._under_way:
            return
        task = asyncio.get_running_loop().create_task(self._wake(self.sleeper, route), name=f"wake {route}")
        self._under_way[route] = task
        task.add_done_callback(lambda _: self._under_way.pop(route, None))

    def look(self) -> None:
        """Wake every model that something waits for."""
        for route in dict.fromkeys(worker.route for worker in self._registry if worker.sleeps):
            model_queue = self._control.model_queue(route)
            if self._registry.of(route).sleeps and model_queue is not None and model_queue.queue.num_waiting:
                self.wanted(route)

    def close(self) -> None:
        """Wake nothing more."""
        for task in self._under_way.values():
            task.cancel()

    async def _wake(self, sleeper: Sleeper, route: str) -> None:
        try:
            await sleeper.wake(route)
        except PenstockError as error:
            self._log.warning("a model cannot be woken", model=route, error=error)
            if type(error) is WorkerUnavailable:  # Its reason may name this machine's files: for the log.
                error = WorkerUnavailable(f"The model '{route[:64]}' cannot be woken.")
            self._refuse(route, error)

    def _refuse(self, route: str, error: PenstockError) -> None:
        """End what waits for it: nothing that waits has given output."""
        if self._registry.of(route).is_ready:
            return
        for request in list(self._control.requests()):
            if request.facts.route == route and request.state is State.QUEUED:
                assert isinstance(request.io, Reply), f"{request.id} has no reply"
                request.io.fail(error)
