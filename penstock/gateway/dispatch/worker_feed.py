"""What the registry tells of workers, brought to flow control when it is next asked: once for each worker
that has changed, however often it did. Costs nothing while nothing changes, however many workers there are.
"""

from collections.abc import Callable, Iterator

from penstock.fleet.registry import Registry, Worker
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.queueing.capacity import WorkerView
from penstock.policy.resilience.worker_state import WorkerState
from penstock.protocol.worker import ModelInfo, Stats
from penstock.types import WorkerId


class WorkerFeed:
    """Between the registry and flow control."""

    def __init__(
        self,
        control: FlowControl,
        registry: Registry,
        meters: Meters,
        *,
        is_shared: bool,
        shed_kv_above: float,
        on_news: Callable[[], None],
    ) -> None:
        """`is_shared`: other gateways use the workers too, so what runs there is not all ours.

        `on_news` is called for a change that cannot wait for the next request: some wait, or a worker's KV
        memory is fuller than the share `shed_kv_above`. It may ask for a `refresh`, later.
        """
        self._control, self._meters, self._is_shared = control, meters, is_shared
        self._shed_kv_above, self._on_news = shed_kv_above, on_news
        self._changed: dict[WorkerId, Worker] = {worker.id: worker for worker in registry}
        self._ready: dict[WorkerId, int] = {}
        """Workers that flow control counts as ready, and in which of their lives."""
        self._routes: dict[str, None] = {}
        registry.listen(self._note)

    def refresh(self, now_ns: int) -> None:
        """Tell flow control what has changed since the last time."""
        if self._changed:
            changed, self._changed = self._changed, {}
            for worker in changed.values():
                self._tell(now_ns, worker)

    def num_waiting(self) -> Iterator[tuple[str, int]]:
        """Each model, and how many requests wait for it."""
        for route in self._routes:
            lane = self._control.lane(route)
            if lane is not None:
                yield route, lane.queue.num_waiting

    def _note(self, worker: Worker) -> None:
        self._changed[worker.id] = worker
        if any(count for _, count in self.num_waiting()) or self._is_nearly_full(worker):
            self._on_news()

    def _is_nearly_full(self, worker: Worker) -> bool:
        """Whether streams may have to end there for the sake of others that run there: nobody need wait for
        that.
        """
        stats = worker.backend.status.stats
        return stats is not None and stats.blocks_used > self._shed_kv_above * stats.blocks_total > 0

    def _tell(self, now_ns: int, worker: Worker) -> None:
        route = worker.route
        self._routes[route] = None
        if worker.state is WorkerState.GONE:
            self._ready.pop(worker.id, None)
            self._meters.left(now_ns, worker.id)
            self._control.set_worker(now_ns, route, worker.id, None)
            return
        if not worker.is_ready:
            self._ready.pop(worker.id, None)
        elif self._ready.get(worker.id) != worker.epoch:
            self._ready[worker.id] = worker.epoch
            self._meters.has_worker(now_ns, route, worker.id, tells=worker.engine == "penstock")
        if (stats := worker.backend.status.stats) is not None:
            num = stats.running + stats.waiting
            self._meters.reported(now_ns, worker.id, busy_ns=stats.busy_ns, num_requests=num)
        self._control.set_worker(now_ns, route, worker.id, self._view(worker))

    def _view(self, worker: Worker) -> WorkerView:
        info, stats = worker.backend.status.info, worker.backend.status.stats
        adapters = worker.backend.status.adapters
        return WorkerView(
            ready=worker.is_ready,
            max_running=_rows(info, stats),
            running=stats.running if stats is not None and self._is_shared else 0,
            waiting=stats.waiting if stats is not None and self._is_shared else 0,
            kv_blocks_total=stats.blocks_total if stats is not None else 0,
            kv_blocks_used=stats.blocks_used if stats is not None else 0,
            kind=worker.kind,
            max_model_len=info.max_model_len if info is not None else 0,
            # No other engine's tokens are a function of seed and position.
            resumes=worker.engine == "penstock",
            identity=info.identity if info is not None else "",
            adapters=adapters.loaded,
            adapters_served=adapters.served,
            capabilities=worker.backend.status.capabilities or frozenset(),
        )


def _rows(info: ModelInfo | None, stats: Stats | None) -> int:
    """Requests that the worker runs at once; 0 if it does not tell."""
    if info is None:
        return 0
    return min(info.max_running, stats.rows_max) if stats is not None and stats.rows_max else info.max_running
