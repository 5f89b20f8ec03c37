"""What a simulated gateway keeps with each accepted request."""

from penstock.policy.requests.request import Request
from penstock.sim.traffic.request import SimRequest
from penstock.types import Usage


class Ticket:
    """One request as its client sees it."""

    __slots__ = ("first_ns", "num_told", "number", "request", "usage")

    def __init__(self, request: SimRequest, number: int) -> None:
        self.request, self.number = request, number
        self.num_told = 0
        """Tokens of the answer that the client has."""
        self.first_ns = -1
        self.usage = Usage()
        """What the worker reported with the first token."""


def ticket_of(request: Request) -> Ticket:
    """The ticket that the gateway submitted it with."""
    assert isinstance(request.io, Ticket), f"{request.id} is not a simulated request"
    return request.io
