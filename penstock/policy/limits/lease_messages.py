"""The questions of gateways to the store of what they share, and its answers: what lease.py and
budget_lease.py say, and what `Leases` needs of either.
"""

from typing import Protocol

import msgspec


class LeaseAsk(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=0):
    """One question to the store, about one limit of one tenant. Amounts are whole tokens or requests."""

    key: str
    rate: int
    """Per minute."""
    burst: int
    seq: int
    """Numbers the gateway's questions, upwards: only a number that is new for the key is carried out."""
    owed: int = 0
    """Spent beyond what was granted: charged, into debt if need be."""
    returned: int = 0
    """Granted and not spent."""
    want: int = 0
    """To be granted, or as much of it as is there."""
    epoch: int = 0
    """Which life of the bucket the next two are about: a store that lost its memory takes it from here. 0 is
    none."""
    known_level: int = 0
    known_us: int = 0


class BudgetAsk(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """One question about a tenant's budget of one day or month, in millionths.

    Totals, never increments: any of them may be said again, after a crash or to a store that lost its memory.
    """

    key: str
    limit: int
    seq: int
    """As of `LeaseAsk`."""
    process: str
    """Names the one that asks, as the ids of its requests do."""
    spent: int
    """By the requests of this process that ended in the period."""
    held: int
    """Granted to this gateway and not spent, what its running requests reserve included."""
    want: int = 0
    """To be granted, or as much of it as is left."""
    least: int = 0
    """Less than this is of no use: then nothing is granted."""
    kept_s: int = 0
    """For how long the store keeps what it knows of the period."""
    past: tuple[tuple[str, int], ...] = ()
    """What other processes have spent in it, by the ledger of this machine."""


Ask = LeaseAsk | BudgetAsk


class LeaseGrant(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The store's answer to one question."""

    granted: int
    level: int
    """What is left in the bucket, rounded down; negative is debt."""
    epoch: int
    at_us: int
    """The store's time."""
    spent: int = 0
    """Of a budget, by all processes."""


class LeaseReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The store's answer to one batch: grants in the order of the questions."""

    num_gateways: int
    """Gateways that asked something lately, this one included."""
    grants: tuple[LeaseGrant, ...]


class Leased(Protocol):
    """What is on lease: a limit's bucket, or a budget (budget_lease.py)."""

    listed: bool
    recall: bool
    """Whether to ask even if nothing is wanted, so that the store learns what it may have forgotten."""
    active_ns: int
    not_before_ns: int

    @property
    def pending(self) -> Ask | None:
        """A question that was asked and not answered."""
        ...

    @property
    def is_unsaid(self) -> bool:
        """Whether the store is to learn of what was returned, or spent."""
        ...

    def ask(self, now_ns: int) -> Ask | None:
        """The next question, which stays the question until it is answered; None: nothing to ask."""
        ...

    def granted(self, now_ns: int, grant: LeaseGrant) -> None:
        """The store's answer to the pending question."""
        ...

    def is_done(self, now_ns: int) -> bool:
        """Whether the store may forget it without a loss."""
        ...

    def leave(self) -> None:
        """The gateway ends: hand back at the next question what would not come back otherwise."""
        ...
