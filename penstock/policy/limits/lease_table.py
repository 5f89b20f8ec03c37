"""The store's side of leases: the questions of gateways about what they share and its answers, which lease.py
and budget_lease.py say, and the table of true buckets and budgets from which gateways are granted slices.

Pure; the parent of several gateway processes runs the table behind a socket, and Redis runs the same rules as
a script.
"""

from collections.abc import Container, Sequence
from typing import Protocol

import msgspec

from penstock.clock import NS_PER_S, NS_PER_US
from penstock.config.flow import SharedConfig
from penstock.policy.limits.bucket import UNIT, Bucket
from penstock.policy.terms import shared_terms


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
    """The spending of other processes in it, by the ledger of this machine."""


Ask = LeaseAsk | BudgetAsk


class LeaseGrant(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The store's answer to one question."""

    granted: int
    level: int
    """The rest of the bucket, rounded down; negative is debt."""
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
    """The amount on lease: a limit's bucket, or a budget (budget_lease.py)."""

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


_COLLECT_MIN = 1024


class _Budget:
    """One day or month of one tenant."""

    __slots__ = ("answers", "epoch", "forget_ns", "held", "spent", "total")

    def __init__(self, epoch: int) -> None:
        self.epoch, self.total, self.forget_ns = epoch, 0, 0
        self.spent: dict[str, int] = {}
        """By process."""
        self.held: dict[str, int] = {}
        """By gateway."""
        self.answers: dict[str, tuple[int, int]] = {}
        """The last question's number and grant, by gateway."""

    def count(self, process: str, spent: int) -> None:
        """A process has spent so much in all; less than is known is old news."""
        more = spent - self.spent.get(process, 0)
        if more > 0:
            self.spent[process] = spent
            self.total += more

    def forget(self, alive: Container[str]) -> None:
        """The amount that a lost gateway held is free again."""
        assert self.held.keys() == self.answers.keys(), "what is held was answered"
        for gone in [gateway for gateway in self.held if gateway not in alive]:
            del self.held[gone], self.answers[gone]


class BudgetTable:
    """All shared budgets."""

    __slots__ = ("_budgets", "_collect_at")

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}
        self._collect_at = _COLLECT_MIN

    def grant(
        self, now_ns: int, gateway: str, ask: BudgetAsk, alive: Container[str], epoch: int
    ) -> LeaseGrant:
        """Answer one question; `alive` are the gateways that count, and `epoch` is the number of a budget
        that is new.
        """
        budget = self._of(now_ns, ask.key, epoch)
        budget.forget_ns = now_ns + ask.kept_s * NS_PER_S
        budget.forget(alive)
        seq, granted = budget.answers.get(gateway, (-1, 0))
        if ask.seq > seq:  # Else it is asked again, or a copy of it that was on its way for long.
            for process, spent in ((ask.process, ask.spent), *ask.past):
                budget.count(process, spent)
            budget.held[gateway] = ask.held
            left = _left(ask.limit, budget)
            granted = max(0, min(ask.want, left)) if left >= ask.least else 0
            budget.held[gateway] += granted
            budget.answers[gateway] = (ask.seq, granted)
            assert not granted or _left(ask.limit, budget) >= 0, "a grant is never on credit"
        return LeaseGrant(
            granted=granted,
            level=_left(ask.limit, budget),
            epoch=budget.epoch,
            at_us=now_ns // NS_PER_US,
            spent=budget.total,
        )

    def __len__(self) -> int:
        return len(self._budgets)

    def _of(self, now_ns: int, key: str, epoch: int) -> _Budget:
        assert epoch > 0, "0 is no life"
        budget = self._budgets.get(key)
        if budget is None:
            if len(self._budgets) >= self._collect_at:
                for old in [old for old, each in self._budgets.items() if each.forget_ns < now_ns]:
                    del self._budgets[old]
                self._collect_at = max(_COLLECT_MIN, 2 * len(self._budgets))
            budget = self._budgets[key] = _Budget(epoch)
        return budget


def _left(limit: int, budget: _Budget) -> int:
    return limit - budget.total - sum(budget.held.values())


_GRACE_NS = 2 * NS_PER_S


class _Shared:
    """One limit of one tenant: the bucket, its life's number, what it gave, and the last answer to each
    gateway.
    """

    __slots__ = ("answers", "bucket", "burst", "epoch", "given", "rate")

    def __init__(self, now_ns: int, rate: int, burst: int, epoch: int) -> None:
        self.bucket, self.epoch, self.given = Bucket(now_ns, rate, burst), epoch, 0
        self.rate, self.burst = rate, burst
        self.answers: dict[str, tuple[int, int]] = {}


class LeaseTable:
    """All shared buckets and budgets. Forgets those that are full again and gateways that are gone."""

    __slots__ = ("_budgets", "_collect_at", "_epoch", "_gateways", "_shared", "_ttl_ns")

    def __init__(self, config: SharedConfig, *, epoch: int = 1) -> None:
        assert epoch > 0, epoch
        self._ttl_ns = int(shared_terms(config).gateway_ttl_s * NS_PER_S)
        self._shared: dict[str, _Shared] = {}
        self._budgets = BudgetTable()
        self._gateways: dict[str, int] = {}
        self._epoch, self._collect_at = epoch, _COLLECT_MIN

    def lease(self, now_ns: int, gateway: str, asks: Sequence[Ask]) -> LeaseReply:
        """Answer one batch of a gateway's questions."""
        self._gateways[gateway] = now_ns
        num_gateways = self._num_gateways(now_ns)
        grants = tuple(self._answer(now_ns, gateway, ask) for ask in asks)
        assert len(grants) == len(asks), "a grant for each question"
        return LeaseReply(num_gateways=num_gateways, grants=grants)

    def left(self, now_ns: int, gateway: str) -> None:
        """This gateway hung up. Unless it is back within two seconds it is counted no more.

        The amount that it had leased and not spent comes back only as refill.
        """
        if gateway in self._gateways:
            self._gateways[gateway] = min(self._gateways[gateway], now_ns - self._ttl_ns + _GRACE_NS)

    def level(self, now_ns: int, key: str) -> int | None:
        """The content of a bucket, rounded down; None if it is not known, that is full."""
        shared = self._shared.get(key)
        return None if shared is None else shared.bucket.level(now_ns) // UNIT

    def __len__(self) -> int:
        return len(self._shared)

    def _answer(self, now_ns: int, gateway: str, ask: Ask) -> LeaseGrant:
        if isinstance(ask, LeaseAsk):
            return self._grant(now_ns, gateway, ask)
        self._epoch += 1
        return self._budgets.grant(now_ns, gateway, ask, self._gateways, self._epoch)

    def _grant(self, now_ns: int, gateway: str, ask: LeaseAsk) -> LeaseGrant:
        shared = self._of(now_ns, ask)
        bucket = shared.bucket
        seq, granted = shared.answers.get(gateway, (-1, 0))
        if ask.seq > seq:  # Else it is asked again, or a copy of it that was on its way for long.
            if ask.epoch not in (0, shared.epoch):
                _recall(now_ns, shared, ask)
            bucket.give(now_ns, ask.returned)
            bucket.take(now_ns, ask.owed)
            granted = min(ask.want, max(0, bucket.level(now_ns) // UNIT))
            bucket.take(now_ns, granted)
            shared.given += granted + ask.owed - ask.returned
            shared.answers[gateway] = (ask.seq, granted)
        return LeaseGrant(
            granted=granted,
            level=bucket.level(now_ns) // UNIT,
            epoch=shared.epoch,
            at_us=now_ns // NS_PER_US,
        )

    def _of(self, now_ns: int, ask: LeaseAsk) -> _Shared:
        shared = self._shared.get(ask.key)
        if shared is None:
            if len(self._shared) >= self._collect_at:
                self._collect(now_ns)
            shared = self._shared[ask.key] = _Shared(now_ns, ask.rate, ask.burst, self._epoch)
            self._epoch += 1
            assert shared.epoch < self._epoch, "every life of a bucket has a number of its own"
        elif (shared.rate, shared.burst) != (ask.rate, ask.burst):
            shared.bucket.change(now_ns, ask.rate, ask.burst)
            shared.rate, shared.burst = ask.rate, ask.burst
        return shared

    def _num_gateways(self, now_ns: int) -> int:
        for gone in [name for name, seen_ns in self._gateways.items() if now_ns - seen_ns > self._ttl_ns]:
            del self._gateways[gone]
            for shared in self._shared.values():
                shared.answers.pop(gone, None)
        return len(self._gateways)

    def _collect(self, now_ns: int) -> None:
        """Forget full buckets: a new one would be the same. Called when their number has doubled."""
        for key in [key for key, shared in self._shared.items() if shared.bucket.standing(now_ns)[1] == 0]:
            del self._shared[key]
        self._collect_at = max(_COLLECT_MIN, 2 * len(self._shared))


def _recall(now_ns: int, shared: _Shared, ask: LeaseAsk) -> None:
    """The gateway knew an earlier life of this bucket: it has no more than what that had then, refilled
    since.

    So a store that lost its memory gives nothing twice but what gateways that have not asked again yet had
    leased.
    """
    known_ns = max(0, now_ns - ask.known_us * NS_PER_US)
    known = min(ask.burst, ask.known_level + known_ns * ask.rate // UNIT) - shared.given
    excess = shared.bucket.level(now_ns) // UNIT - known
    if excess > 0:
        shared.bucket.take(now_ns, excess)
