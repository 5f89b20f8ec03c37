"""What a world lets others see while it runs."""

from typing import Protocol

from penstock.policy.record import UsageRecord
from penstock.sim.request import RequestRecord, SimRequest


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

    def happened(self, num_events: int) -> None:
        """An event is over; so many were until now."""
        ...
