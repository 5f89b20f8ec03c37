"""Money that a tenant may spend per UTC day and per UTC month: reserved before, renewed in slices, settled
once.

    reserve ──renew──> ... ──renew──> settle      once for each request that was let in, at its end; refused
       │        └─ False: stop the answer here    elsewhere it costs nothing
       └──> BudgetRefusal (which budget, and when to ask again)

A request holds the price of its prompt and of the first slice of the answer; before every further slice the
hold is renewed for that one too. How much it holds is the request's own field (`Request.money`); the sum of a
tenant's is here. The reserved and the spent amounts never come to more than the budget, so a tenant spends
more than its budget only by the tokens that its running answers generate between the end of a slice and their
stop: at most one slice for each that runs. Money counts for the day and month in which its request
ends, as in the ledger, so the sum of what was settled is the sum of the ledger's records, to the millionth.

A request whose first slice costs nothing and whose tenant has no budget holds nothing; should it cost
something after all, `spend` books it at its end, and it is not stopped.

`restore` takes over what the ledger of this machine knows of other processes. Where gateways share a store,
each spends from a lease of the budget (budget_lease.py), so that all of them together hold it.

Pure: times are the gateway's monotonic clock; `wall_offset_ns` makes dates of them. Days and months of the
UTC calendar are plain integers: a day is its number since 1970-01-01, a month is 12 * year + (month - 1).
They are computed after Howard Hinnant, "chrono-compatible low-level date algorithms" (civil_from_days and
days_from_civil), which are exact for the proleptic Gregorian calendar.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.clock import NS_PER_S
from penstock.config.branch import extended
from penstock.config.ledger import BudgetsConfig
from penstock.errors import BudgetExhausted
from penstock.policy.limits.budget_lease import BudgetLease
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.price import MICROS
from penstock.policy.tenant import Tenant
from penstock.types import TenantId

_DAY_S = 86_400
DAY_NS = _DAY_S * NS_PER_S


def day_of(wall_ns: int) -> int:
    """The day of a wall-clock time."""
    return wall_ns // DAY_NS


def month_of(day: int) -> int:
    """The month that a day is in."""
    era, day_of_era = divmod(day + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    from_march = (5 * day_of_year + 2) // 153
    assert 0 <= day_of_year < 366, day_of_year
    assert 0 <= from_march < 12, from_march
    return 12 * (era * 400 + year_of_era) + from_march + 2


def first_day(month: int) -> int:
    """The first day of a month."""
    # The year begins in March, so that the leap day is its last.
    year, from_march = divmod(month - 2, 12)
    era, year_of_era = divmod(year, 400)
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + (153 * from_march + 2) // 5
    return era * 146_097 + day_of_era - 719_468


PeriodName = Literal["day", "month"]
EVENTS_MAX = 1024
"""Warnings that were not taken yet; the oldest go first."""
_COLLECT_MIN = 256
_STORE_RETRY_NS = NS_PER_S
"""When to ask again for what may be left, while the store that knows is late or away."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Spent:
    """A tenant's spending in one day and its month by requests of one process."""

    tenant: TenantId
    process: str
    """As the ids of its requests name it."""
    day: int
    """Since 1970-01-01."""
    day_micros: int
    month_micros: int


@dataclass(slots=True, frozen=True, kw_only=True)
class BudgetEvent:
    """A share of a budget is used up; once for each share and period."""

    tenant: TenantId
    period: PeriodName
    share: float
    spent_micros: int
    limit_micros: int


@dataclass(slots=True, frozen=True, kw_only=True)
class BudgetRefusal:
    """Why a request may not start, and when it may."""

    kind: Literal["budget_day", "budget_month"]
    limit_micros: int
    used_micros: int
    """Spent, and reserved by what runs."""
    requested_micros: int
    retry_after_ns: int
    """Until the day or month is over, or until a store may answer that is late or away."""

    @property
    def message(self) -> str:
        """The message for the person who must act on it."""
        name = "daily" if self.kind == "budget_day" else "monthly"
        wait_s = self.retry_after_ns // NS_PER_S + 1
        budget = f"Your {name} budget of {self.limit_micros / MICROS:.2f}"
        if self.used_micros + self.requested_micros <= self.limit_micros:
            return (
                f"{budget} may have enough left, but the store that knows does not answer now. "
                f"Try again in {wait_s} s."
            )
        return (
            f"{budget} is used up: {self.used_micros / MICROS:.6f} are spent or in use, and this request "
            f"needs {self.requested_micros / MICROS:.6f}. The next one begins in {wait_s} s."
        )

    def error(self) -> BudgetExhausted:
        """The refusal as an error."""
        return BudgetExhausted(self.message, retry_after_s=self.retry_after_ns / NS_PER_S)


class _Period:
    """One tenant's day or month."""

    __slots__ = ("kept_s", "lease", "limit", "name", "number", "past", "past_micros", "spent", "warned")

    def __init__(self, name: PeriodName, kept_s: int) -> None:
        self.name: PeriodName = name
        self.kept_s = kept_s
        """How long a store keeps what it knows of it."""
        self.number = -1
        self.limit = 0
        self.spent = 0
        """By this process."""
        self.past: dict[str, int] = {}
        """By others of this machine, by the ledger."""
        self.past_micros = 0
        self.warned = 0.0
        """The highest share that was told."""
        self.lease: BudgetLease | None = None
        """None where nothing is shared, or nothing is limited."""

    @property
    def here(self) -> int:
        """Spent on this machine, as far as this process knows."""
        return self.spent + self.past_micros

    @property
    def total(self) -> int:
        """Spent everywhere."""
        return self.spent + self.past_micros if self.lease is None else self.lease.total

    def enter(self, number: int) -> None:
        """Begin from nothing if it is another day or month."""
        assert number >= self.number, "time does not go back"
        if number != self.number:
            self.number, self.warned = number, 0.0
            self.spent = self.past_micros = 0
            self.past = {}
            self.end_lease()

    def end_lease(self) -> None:
        """Nothing is held of it any more."""
        if self.lease is not None:
            self.lease.is_over = True
            self.lease = None

    def learn(self, process: str, micros: int) -> None:
        """The ledger says that another process has spent so much."""
        assert micros >= 0, "the ledger has no negative costs"
        more = micros - self.past.get(process, 0)
        if more > 0:
            self.past[process] = micros
            self.past_micros += more
            if self.lease is not None:
                self.lease.learn()


class _Account:
    """The spending of one tenant."""

    __slots__ = ("day", "live", "month", "reserved", "slice_micros", "tenant")

    def __init__(self, tenant: TenantId) -> None:
        self.tenant = tenant
        self.day, self.month = _Period("day", 3 * _DAY_S), _Period("month", 63 * _DAY_S)
        self.live = self.reserved = self.slice_micros = 0

    @property
    def periods(self) -> tuple[_Period, _Period]:
        return self.day, self.month

    def hold(self, micros: int) -> None:
        """Reserve so much more."""
        assert micros >= 0, micros
        self.reserved += micros
        self.slice_micros = micros
        if (lease := self.day.lease) is not None:
            lease.reserved()
        if (lease := self.month.lease) is not None:
            lease.reserved()


WARN_AT = (0.5, 0.8, 1.0)
"""Shares of a budget; crossing one of them is logged and counted."""


class BudgetTerms(BudgetsConfig, frozen=True, kw_only=True):
    """The section, and what memory the budgets may take."""

    tenants_max: int = 100_000
    """Tenants whose spending is kept in mind; further ones are looked up as if they had spent nothing."""


class TenantBudgets:
    """The budgets of all tenants: the same shape as the limiter's."""

    __slots__ = (
        "_accounts", "_collect_at", "_config", "_events", "_leases", "_wall_offset_ns", "settled_micros"
    )  # fmt: skip

    def __init__(self, config: BudgetsConfig, *, wall_offset_ns: int, leases: Leases | None = None) -> None:
        """`wall_offset_ns` is the wall clock minus the monotonic one; `leases` are those of the store that
        several gateways share.
        """
        self._config, self._wall_offset_ns = extended(config, BudgetTerms), wall_offset_ns
        self._leases = leases
        self._accounts: dict[TenantId, _Account] = {}
        self._collect_at = _COLLECT_MIN
        self._events: deque[BudgetEvent] = deque(maxlen=EVENTS_MAX)
        self.settled_micros = 0
        """The amount settled since the start, all tenants and periods together."""

    def reserve(self, now_ns: int, tenant: Tenant, micros: int) -> BudgetRefusal | None:
        """Hold `micros` for a request: its prompt and the first slice of its answer. None: it has them, until
        `settle`.

        A tenant whose budgets changed has the new ones from this call on.
        """
        assert micros >= 0, micros
        account = self._of(now_ns, tenant.id)
        self._limit(now_ns, account, tenant)
        if (period := self._over(now_ns, account, micros)) is not None:
            return self._refusal(now_ns, account, period, micros)
        account.live += 1
        account.hold(micros)
        assert account.reserved >= micros, "what runs holds nothing below zero"
        return None

    def renew(self, now_ns: int, tenant: TenantId, held: int, total: int) -> bool:
        """Before the next slice: hold `total` for a request in place of `held`, if it is more.

        False: it must stop now, and holds what it held.
        """
        account = self._accounts[tenant]
        assert account.live, "renewed after its end"
        if total <= held:
            return True
        self._enter(now_ns, account)
        if self._over(now_ns, account, total - held) is not None:
            return False
        account.hold(total - held)
        assert total <= account.reserved, "a request holds a part of what its tenant does"
        return True

    def settle(self, now_ns: int, tenant: TenantId, held: int, actual: int) -> None:
        """A request that holds `held` has ended, however it did, and cost `actual`: nothing, if it was
        refused elsewhere. Exactly once for each that `reserve` let in.
        """
        account = self._accounts[tenant]
        account.live -= 1
        account.reserved -= held
        assert account.live >= 0 <= account.reserved, "more ended than was reserved"
        self._spend(now_ns, account, actual)

    def spend(self, now_ns: int, tenant: TenantId, micros: int) -> None:
        """A request cost so much that holds nothing: its first slice cost nothing, and its tenant had no
        budget when it began.
        """
        assert micros > 0, "nothing is not spent"
        self._spend(now_ns, self._of(now_ns, tenant), micros)

    def lacks(self, now_ns: int, tenant: Tenant, micros: int) -> bool:
        """Whether a store is asked first for what a request of this price is not covered by here."""
        if self._leases is None or not tenant.has_budget:
            return False
        account, lacks = self._of(now_ns, tenant.id), False
        self._limit(now_ns, account, tenant)
        for period in account.periods:
            if period.lease is not None:
                lacks |= period.lease.lacks(now_ns, micros)
        return lacks and self._config.hard

    def nears_end(self, now_ns: int, tenant: Tenant) -> bool:
        """Whether it has spent, or reserved, `downgrade_at` of a budget."""
        account = self._accounts.get(tenant.id)
        if account is None:
            return False
        self._enter(now_ns, account)
        share = self._config.downgrade_at
        limits = ((account.day, tenant.budget_day_micros), (account.month, tenant.budget_month_micros))
        return any(0 < share * limit <= period.total + account.reserved for period, limit in limits)

    def spent(self, now_ns: int, tenant: TenantId) -> tuple[int, int]:
        """Its spending of this day and this month, everywhere."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0, 0
        self._enter(now_ns, account)
        return account.day.total, account.month.total

    def change(self, config: BudgetsConfig) -> None:
        """Take new settings; what was spent stays spent."""
        self._config = extended(config, BudgetTerms)

    def restore(self, now_ns: int, spent: Iterable[Spent]) -> None:
        """Take over what the ledger knows of other processes than this one."""
        day = day_of(now_ns + self._wall_offset_ns)
        for entry in spent:
            account = self._of(now_ns, entry.tenant)
            if self._leases is not None and entry.process == self._leases.process:
                continue
            if entry.day == day:
                account.day.learn(entry.process, entry.day_micros)
            if month_of(entry.day) == account.month.number:
                account.month.learn(entry.process, entry.month_micros)

    def take_events(self) -> list[BudgetEvent]:
        """The warnings since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._accounts)

    # --- inside ----------------------------------------------------------------------------------

    def _over(self, now_ns: int, account: _Account, micros: int) -> _Period | None:
        """The budget that `micros` more do not fit; the month before the day, since it holds longer. The
        account has entered `now_ns`.
        """
        if not (account.month.limit or account.day.limit):
            return None
        for period in (account.month, account.day):
            lease = period.lease
            if lease is not None:
                fits = lease.has(now_ns, micros)
            else:
                fits = period.spent + period.past_micros + account.reserved + micros <= period.limit
            if period.limit > 0 and not fits:
                self._warn(account, period, 1.0)
                if self._config.hard:
                    return period
        return None

    def _spend(self, now_ns: int, account: _Account, micros: int) -> None:
        """Count what a request has cost that has ended."""
        self._enter(now_ns, account)
        assert micros >= 0, "what was spent stays spent"
        self.settled_micros += micros
        for period in account.periods:
            period.spent += micros
            if period.lease is not None:
                period.lease.settled(micros)
            if micros and period.limit:
                self._warn_of_reached(account, period)

    def _warn_of_reached(self, account: _Account, period: _Period) -> None:
        if (total := period.total) >= WARN_AT[0] * period.limit:
            self._warn(account, period, max(share for share in WARN_AT if total >= share * period.limit))

    def _warn(self, account: _Account, period: _Period, share: float) -> None:
        if share <= period.warned or share not in WARN_AT:
            return
        assert period.limit > 0, "a budget that is not there has no share"
        period.warned = share
        self._events.append(
            BudgetEvent(
                tenant=account.tenant,
                period=period.name,
                share=share,
                spent_micros=period.total,
                limit_micros=period.limit,
            )
        )

    def _enter(self, now_ns: int, account: _Account) -> None:
        day = day_of(now_ns + self._wall_offset_ns)
        if day != account.day.number:
            account.day.enter(day)
            account.month.enter(month_of(day))
            self._lease(now_ns, account)

    def _limit(self, now_ns: int, account: _Account, tenant: Tenant) -> None:
        day, month = tenant.budget_day_micros, tenant.budget_month_micros
        if account.day.limit == day and account.month.limit == month:
            return
        account.day.limit, account.month.limit = day, month
        self._lease(now_ns, account)

    def _lease(self, now_ns: int, account: _Account) -> None:
        """Have a lease of each period that has a limit, and of no other one."""
        if self._leases is None:
            return
        for period in account.periods:
            if not period.limit:
                period.end_lease()
            elif period.lease is not None:
                period.lease.change(period.limit)
            else:
                key = f"{period.name}:{period.number}:{account.tenant}"
                period.lease = BudgetLease(self._leases, now_ns, key, period.kept_s, account, period)

    def _refusal(self, now_ns: int, account: _Account, period: _Period, micros: int) -> BudgetRefusal:
        assert period in account.periods, "the budget is its tenant's"
        next_day = account.day.number + 1 if period is account.day else first_day(account.month.number + 1)
        lease, retry_after_ns = period.lease, next_day * DAY_NS - (now_ns + self._wall_offset_ns)
        if lease is not None and lease.may_be_left(micros):
            retry_after_ns = min(retry_after_ns, _STORE_RETRY_NS)
        return BudgetRefusal(
            kind="budget_day" if period is account.day else "budget_month",
            limit_micros=period.limit,
            used_micros=period.total + account.reserved if lease is None else lease.used,
            requested_micros=micros,
            retry_after_ns=retry_after_ns,
        )

    def _of(self, now_ns: int, tenant: TenantId) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._collect_at:
                self._collect(now_ns)
            account = self._accounts[tenant] = _Account(tenant)
        self._enter(now_ns, account)
        return account

    def _collect(self, now_ns: int) -> None:
        """Forget tenants of other months, then those without a budget, then those that spent least.

        Called when their number has doubled since the last time, so that it costs O(1) per request.
        """
        month = month_of(day_of(now_ns + self._wall_offset_ns))
        for key in [k for k, a in self._accounts.items() if not a.live and a.month.number != month]:
            for period in self._accounts.pop(key).periods:
                period.end_lease()
        excess = len(self._accounts) - self._config.tenants_max * 7 // 8
        if excess > 0:
            # A process that forgot what it has spent would say less than it did.
            idle = [a for a in self._accounts.values() if not (a.live or a.day.lease or a.month.lease)]
            idle.sort(key=lambda a: (bool(a.day.limit or a.month.limit), a.month.spent, a.tenant))
            for account in idle[:excess]:
                del self._accounts[account.tenant]
        bound = max(self._config.tenants_max, len(self._accounts) * 9 // 8)
        self._collect_at = min(bound, max(_COLLECT_MIN, 2 * len(self._accounts)))
