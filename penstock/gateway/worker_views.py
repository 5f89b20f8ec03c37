"""What the workers say of themselves, brought to flow control when it has changed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.gateway.meters import Meters
from penstock.gateway.models import ServedModel
from penstock.policy.control import FlowControl
from penstock.policy.gate import Gate
from penstock.policy.lane import Lane
from penstock.policy.room import WorkerView
from penstock.protocol.worker import ModelInfo, Stats
from penstock.types import WorkerId


@dataclass(slots=True, eq=False)
class _Seen:
    """One model's worker, as it was told last."""

    model: ServedModel
    worker_id: WorkerId
    ready: bool | None = None
    info: ModelInfo | None = None
    stats: Stats | None = None
    lane: Lane | None = None


class WorkerViews:
    """One worker for each model. Looking costs a few attribute reads while nothing has changed."""

    def __init__(
        self,
        control: FlowControl,
        models: Iterable[ServedModel],
        gate: Gate,
        meters: Meters,
        *,
        is_shared: bool,
    ) -> None:
        """`is_shared`: other gateways use the workers too, so what runs there is not all ours."""
        self._control, self._gate, self._meters, self._is_shared = control, gate, meters, is_shared
        self._seen = [_Seen(model, WorkerId(f"{model.name}-0")) for model in models]

    def refresh(self, now_ns: int) -> None:
        """Tell what has changed since the last time."""
        for seen in self._seen:
            status = seen.model.backend.status
            if (
                status.stats is not seen.stats
                or status.ready is not seen.ready
                or status.info is not seen.info
            ):
                if status.ready and not seen.ready:
                    self._gate.worker_started(seen.model.name, seen.worker_id)
                seen.stats, seen.ready, seen.info = status.stats, status.ready, status.info
                self._tell(now_ns, seen)

    def num_waiting(self) -> Iterator[tuple[str, int]]:
        """Each model, and how many requests wait for it."""
        for seen in self._seen:
            if seen.lane is not None:
                yield seen.model.name, seen.lane.queue.num_waiting

    def any_waits(self) -> bool:
        """Whether requests wait for any of the models."""
        return any(seen.lane is not None and seen.lane.queue.num_waiting for seen in self._seen)

    def _tell(self, now_ns: int, seen: _Seen) -> None:
        info, stats, route = seen.info, seen.stats, seen.model.name
        view = WorkerView(
            ready=bool(seen.ready),
            max_running=info.max_running if info is not None else 0,
            running=stats.running if stats is not None and self._is_shared else 0,
            waiting=stats.waiting if stats is not None and self._is_shared else 0,
            kv_blocks_total=stats.blocks_total if stats is not None else 0,
            kv_blocks_used=stats.blocks_used if stats is not None else 0,
        )
        if view.ready:
            self._meters.has_worker(now_ns, route, seen.worker_id)
        self._control.set_worker(now_ns, route, seen.worker_id, view)
        seen.lane = self._control.lane(route)
