"""What a world lets others see while it runs."""

from collections.abc import Sequence
from typing import Protocol

from penstock.policy.record import UsageRecord
from penstock.sim.traffic.request import RequestRecord, SimRequest
from penstock.sim.world.messages import Submission, WorkerMessage
from penstock.sim.world.worker import SimWorker
from penstock.types import WorkerId


class Watcher(Protocol):
    """Whoever looks on, to check: see checks.py."""

    def asked(self, request: SimRequest) -> None:
        """A client asks."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, or was refused."""
        ...

    def billed(self, record: UsageRecord) -> None:
        """One line of the ledger."""
        ...

    def submitted(self, worker_id: WorkerId, submission: Submission, model: str) -> None:
        """A gateway sends a request to a worker of this model."""
        ...

    def on_messages(self, worker: SimWorker, gateway: int, messages: Sequence[WorkerMessage]) -> None:
        """A worker says something of requests to the gateway with this number."""
        ...

    def happened(self, num_events: int) -> None:
        """An event is over; so many were until now."""
        ...
