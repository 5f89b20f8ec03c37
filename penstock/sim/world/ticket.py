"""One accepted request as its simulated gateway knows it."""

import msgspec

from penstock.policy.flow import Arrival
from penstock.policy.lifecycle.life import continued
from penstock.sim.traffic.request import SimRequest
from penstock.types import Usage


class Ticket:
    """One accepted request."""

    __slots__ = (
        "arrival",
        "attempt",
        "beside",
        "carried",
        "first_ns",
        "num_told",
        "number",
        "request",
        "usage",
    )

    def __init__(self, request: SimRequest, number: int, arrival: Arrival) -> None:
        self.request, self.number, self.arrival = request, number, arrival
        self.attempt = 0
        """Of which words count; 0: of none."""
        self.beside = 0
        """Likewise, of a second one that runs at once."""
        self.num_told = 0
        """Tokens of the answer that the client has."""
        self.first_ns = -1
        self.usage = Usage()
        """What the worker told with the first token."""
        self.carried: Usage | None = None
        """What was used on workers that were lost in the middle of the answer."""

    def break_off(self) -> Usage | None:
        """Its worker is lost: what it used until now, if it has begun."""
        self.attempt = 0
        if self.first_ns >= 0:
            here = msgspec.structs.replace(self.usage, completion_tokens=self.num_told)
            self.carried = here if self.carried is None else continued(self.carried, here)
        return self.carried
