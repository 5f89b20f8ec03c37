"""A simulated gateway's watch over its workers' speed, in worlds that want one (`WorldSpec`)."""

from collections.abc import Callable

from penstock.policy.resilience.anomalies import Anomalies, Change
from penstock.sim.world.messages import WorkerLoadReport
from penstock.sim.world.worker import SimWorker
from penstock.types import WorkerId

Report = tuple[str, SimWorker, WorkerLoadReport | None, bool]
"""Model, worker, what it said last, and whether it is ready."""


class SpeedWatch:
    """One for a gateway."""

    def __init__(self, anomalies: Anomalies) -> None:
        self._anomalies = anomalies
        self._reports: dict[WorkerId, Report] = {}
        self.standings: list[tuple[int, Change]] = []
        """What became of workers that were slow, and when."""

    def weight(self, now_ns: int, report: Report, again: Callable[[Report], None]) -> float:
        """What of a worker is used. One without work reports nothing, so what changes for others is carried
        out at any report: by what they said last, `again`.
        """
        route, worker, load, ready = self._reports[report[1].id] = report
        self._anomalies.worker(now_ns, route, worker.id, ready=ready, kind=worker.spec.kind)
        if load is not None:
            self._anomalies.stepped(worker.id, load.timed)
        for change in self._anomalies.tick(now_ns):
            self.standings.append((now_ns, change))
            if change.worker != worker.id and (last := self._reports.get(change.worker)) is not None:
                again(last)
        return self._anomalies.weight(worker.id)

    def gone(self, worker_id: WorkerId) -> None:
        """It is no more."""
        self._anomalies.gone(worker_id)
        self._reports.pop(worker_id, None)
