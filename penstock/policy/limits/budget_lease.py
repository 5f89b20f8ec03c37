"""A budget that several gateways share: one day or month of a tenant, as one gateway has it.

    left = limit - spent by all processes - held by all gateways           the store (lease_table.py)

A gateway holds what its running requests reserve and a little ahead of it: the next slices of its running
answers and what it spends in two seconds, at most a quarter of what is left over all gateways. A request that
this does not cover asks the store and waits for the answer, within a deadline; what is not needed any more
goes back at the next question. So what all gateways spend and reserve never comes to more than the budget
while the store answers in time. When it is late a gateway may have **one slice on credit**, if the store's
last word says that it is left: so all gateways together overspend by at most one slice each.

Questions say totals: what this process has spent in the period, what it holds, and what the ledger of its
machine knows of other processes. So a store that lost its memory learns everything again, and nothing counts
twice. An amount that a forgotten gateway held is free again; what it had spent is in its ledger.
"""

from typing import Protocol

from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import BudgetAsk, LeaseGrant

_AHEAD = 2
"""Slices of each running answer, and lease times of spending, that are held ahead."""
_AHEAD_SHARE = 4
"""All gateways together hold at most 1/4 of what is left ahead."""
_IDLE_LEASES = 5
_WAITS_PER_LEASE = 8


class Spender(Protocol):
    """The requests that are paid from the budget."""

    live: int
    """Requests that run."""
    reserved: int
    """For them, in millionths."""
    slice_micros: int
    """The price of the last slice."""


class Spendings(Protocol):
    """The spending of the period, as known on this machine."""

    limit: int
    spent: int
    """By this process."""
    past: dict[str, int]
    """By other processes, by the ledger."""

    @property
    def here(self) -> int:
        """The sum of both."""
        ...


class BudgetLease:
    """A part of one budget."""

    __slots__ = (
        "_epoch",
        "_kept_s",
        "_known",
        "_known_spent",
        "_leases",
        "_least",
        "_limit",
        "_needed",
        "_said_spent",
        "_spender",
        "_spendings",
        "_unanswered",
        "_window_ns",
        "_window_spent",
        "active_ns",
        "empty_until_ns",
        "held",
        "is_over",
        "key",
        "listed",
        "not_before_ns",
        "pending",
        "recall",
    )

    def __init__(
        self, leases: Leases, now_ns: int, key: str, kept_s: int, spender: Spender, spendings: Spendings
    ) -> None:
        assert spendings.limit > 0, "only a budget is on lease"
        self._leases, self.key, self._kept_s = leases, key, kept_s
        self._spender, self._spendings, self._limit = spender, spendings, spendings.limit
        self.held = 0
        """Granted and not spent; what is on credit is not in it, and makes it negative once it is spent."""
        self.pending: BudgetAsk | None = None
        self.listed = self.is_over = False
        self.recall = True
        self.active_ns = self.not_before_ns = self._window_ns = now_ns
        self.empty_until_ns = now_ns
        """The store has just said that too little is left."""
        self._needed = self._least = 0
        self._unanswered = 0
        """The amount on credit when the pending question was asked, which counts as held since."""
        self._window_spent = spendings.spent
        # The store's last answer; before it said anything, that all that was spent was spent here.
        self._epoch, self._known, self._known_spent = 0, spendings.limit - spendings.here, 0
        self._said_spent = spendings.spent

    @property
    def total(self) -> int:
        """Spent by all processes, as far as this one knows."""
        return max(self._spendings.here, self._known_spent + self._spendings.spent - self._said_spent)

    @property
    def used(self) -> int:
        """Spent, reserved or held by all gateways, less what is free in this one."""
        return self._limit - self._known + self._short(0)

    # --- spending -----------------------------------------------------------------------------

    def has(self, now_ns: int, micros: int) -> bool:
        """Whether so much more may be reserved."""
        assert micros >= 0, micros
        self.active_ns, leases = now_ns, self._leases
        short = self._short(micros)
        if self._spender.reserved + micros <= self.held:
            return True
        if leases.down_ns is not None:
            shares = {"closed": 0, "open": self._known, "local-share": self._known // leases.num_gateways}
            return short <= shares[leases.config.on_store_down]
        leases.want(self)
        return now_ns >= self.empty_until_ns and short <= min(micros, self._known)

    def may_be_left(self, micros: int) -> bool:
        """Whether so much more is left by the store's last word, which a late store may not confirm."""
        return self._short(micros) <= self._known

    def lacks(self, now_ns: int, micros: int) -> bool:
        """Whether the store is asked first, since what is held does not cover so much more. Never waits."""
        self.active_ns, leases = now_ns, self._leases
        if self._spender.reserved + micros <= self.held or leases.down_ns is not None or leases.is_late:
            return False
        if now_ns < self.empty_until_ns or micros > self._limit:
            return False
        self._needed = min(self._limit, self._needed + micros)
        self._least = min(self._least or micros, micros)
        self.not_before_ns = now_ns
        leases.need(self)
        return True

    def reserved(self) -> None:
        """The spender has reserved more: hold the next slices ahead."""
        self._leases.want(self)

    def settled(self, micros: int) -> None:
        """A request has ended and has cost so much, which is counted already."""
        assert 0 <= micros <= self._spendings.spent, "it is counted already"
        self.held -= micros
        self._leases.want(self)

    def change(self, limit: int) -> None:
        """The budget is another one. The store learns it from the next question."""
        assert limit > 0, "a lease ends with its budget"
        self._known += limit - self._limit
        self._limit = limit
        self._leases.want(self)

    def learn(self) -> None:
        """The ledger knows of more: tell the store."""
        self.recall = True
        self._leases.want(self)

    # --- leasing ------------------------------------------------------------------------------

    @property
    def is_unsaid(self) -> bool:
        """See `Leased.is_unsaid`."""
        unsaid = self.held > self._spender.reserved or self._spendings.spent > self._said_spent
        return unsaid and not self.is_over

    def is_done(self, now_ns: int) -> bool:
        """See `Leased.is_done`: never before the period is over, for the store may lose its memory."""
        del now_ns
        return self.is_over

    def leave(self) -> None:
        """Hand everything back at the next question."""
        self.recall, self._needed, self._least, self.not_before_ns = True, 0, 0, 0
        self.active_ns = -_IDLE_LEASES * self._leases.lease_ns
        self._leases.want(self)

    def ask(self, now_ns: int) -> BudgetAsk | None:
        """See `Leased.ask`."""
        assert self.pending is None, "one question at a time"
        needed, least, self._needed, self._least = self._needed, self._least, 0, 0
        if self.is_over:
            return None
        reserved, spent, ahead = self._spender.reserved, self._spendings.spent, self._ahead(now_ns)
        held = max(self.held, reserved)  # The amount on credit is reported.
        if held > reserved + ahead + ahead // 2:
            # Also while a request waits: at a budget's end each gateway may hold too little for it.
            held = reserved + ahead
        self._unanswered = max(0, held - self.held)
        want = max(0, reserved + needed + ahead - held)
        least = max(0, least - (held - reserved))
        assert held >= reserved, "what runs is held"
        assert not least or want >= least, "what a waiting request needs is asked for"
        if not (want or self.recall or held != self.held or spent > self._said_spent):
            return None
        past = tuple(self._spendings.past.items()) if self.recall else ()
        self.held, self.recall = held, False
        self.pending = BudgetAsk(
            key=self.key,
            limit=self._limit,
            seq=self._leases.next_seq(),
            process=self._leases.process,
            spent=spent,
            held=held,
            want=want,
            least=least,
            kept_s=self._kept_s,
            past=past,
        )
        return self.pending

    def granted(self, now_ns: int, grant: LeaseGrant) -> None:
        """See `Leased.granted`."""
        ask, self.pending = self.pending, None
        assert ask is not None, "an answer without a question"
        assert 0 <= grant.granted <= ask.want, "no more than was asked for"
        assert grant.spent >= 0, "what was spent is counted upwards"
        self.held += grant.granted
        self._unanswered = 0
        self._known, self._known_spent, self._said_spent = grant.level, grant.spent, ask.spent
        pause_ns = self._leases.lease_ns // _WAITS_PER_LEASE
        self.not_before_ns = now_ns + pause_ns
        if ask.least and not grant.granted:
            self.empty_until_ns = now_ns + pause_ns  # Others may give back before we ask again.
        if self._epoch not in (0, grant.epoch):
            self._leases.recall()
        self._epoch = grant.epoch
        if self._spender.live or self.is_unsaid:
            self._leases.want(self)

    def _short(self, micros: int) -> int:
        """The part of so much more that is beyond what the store knows to be held."""
        assert self._unanswered >= 0, "credit is not given back"
        return self._spender.reserved + micros - self.held + self._unanswered

    def _ahead(self, now_ns: int) -> int:
        """The amount held beyond what is reserved."""
        leases, spender = self._leases, self._spender
        if not spender.live and now_ns - self.active_ns >= _IDLE_LEASES * leases.lease_ns:
            return 0
        elapsed_ns = max(leases.lease_ns, now_ns - self._window_ns)
        spent = (self._spendings.spent - self._window_spent) * leases.lease_ns // elapsed_ns
        if now_ns - self._window_ns >= leases.lease_ns:
            self._window_ns, self._window_spent = now_ns, self._spendings.spent
        share = max(0, self._known) // (_AHEAD_SHARE * leases.num_gateways)
        assert spent >= 0, "what was spent stays spent"
        return min(share, _AHEAD * max(spender.live * spender.slice_micros, spent))
