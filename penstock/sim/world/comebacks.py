"""Clients that come again after they were refused: when they were told to, or whenever they like."""

from collections.abc import Callable
from math import ceil

from msgspec import structs

from penstock.clock import NS_PER_S
from penstock.policy.record import Outcome
from penstock.sim.traffic.request import RETRY_MARK, RequestRecord, SimRequest

_TOLD_NOTHING_NS = NS_PER_S
_REFUSED = (Outcome.REJECTED, Outcome.EVICTED)


class Comebacks:
    """Remembers requests whose clients would come again, while they last."""

    def __init__(self, ask_at: Callable[[int, SimRequest], None]) -> None:
        """`ask_at` lets a request come at a time."""
        self._ask_at = ask_at
        self._asked: dict[str, SimRequest] = {}

    def asked(self, request: SimRequest) -> None:
        """It comes."""
        if request.retries:
            self._asked[request.id] = request

    def ended(self, record: RequestRecord) -> None:
        """It has ended, and may come again. A header tells whole seconds."""
        request = self._asked.pop(record.id, None)
        if request is None or record.outcome not in _REFUSED or record.first_ns >= 0:
            return
        told_ns = ceil(record.retry_after_ns / NS_PER_S) * NS_PER_S or _TOLD_NOTHING_NS
        at_ns = record.end_ns + (request.retry_ns or told_ns)
        again = structs.replace(
            request, id=request.id + RETRY_MARK, at_ns=at_ns, retries=request.retries - 1, cancel_at_ns=0
        )
        self._ask_at(at_ns, again)
