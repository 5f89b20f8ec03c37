"""What do a request's rate limits and budget cost, and what a refusal? Microseconds beside a bare loop.

    python -m bench.policy.limits [--requests 20000] [--rounds 7] [--json FILE]

The ratio is to a bare loop that does for each request what no limiter can do without: one dictionary look-up,
one object with four fields, and two integer comparisons.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.harness import Spread, command_line, cpu_us, in_turns, ratio, rounds_table, write_result
from penstock.clock import NS_PER_US
from penstock.config.flow import LimitsConfig
from penstock.config.ledger import BudgetsConfig
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.rate_limit import Limiter, LimitReservation
from penstock.policy.tenant import Tenant
from penstock.types import TenantId

TENANTS = [
    Tenant(
        id=TenantId(f"t{i}"), requests_per_minute=10**7, tokens_per_minute=10**9, concurrent_max=1000,
        budget_day_micros=10**12, budget_month_micros=10**13,
    )
    for i in range(100)
]  # fmt: skip
EMPTY = Tenant(id=TenantId("empty"), requests_per_minute=1, tokens_per_minute=10**9)
STEP_NS = 100 * NS_PER_US
BARE, LIMITS, BUDGET = "bare loop", "reserve + headers + settle", "a budget: reserve + slice + settle"
Request = Callable[[int, int, Tenant], object]
"""One request: its number, the time, its tenant."""


@dataclass(slots=True)
class Bare:
    """The object made for each request in the bare loop."""

    a: int
    b: int
    c: int
    d: int


def bare() -> Request:
    uses = {tenant.id: Bare(0, 0, 10**18, 0) for tenant in TENANTS}

    def one(i: int, _: int, tenant: Tenant) -> None:
        use = uses[tenant.id]
        if use.a < use.c and use.b < use.c:
            Bare(i, i, i, i)

    return one


def limits() -> Request:
    """Reserve, headers, settle."""
    limiter = Limiter(LimitsConfig())

    def one(_: int, now_ns: int, tenant: Tenant) -> None:
        reservation = limiter.reserve(now_ns, tenant, 500, 200)
        assert isinstance(reservation, LimitReservation)
        limiter.headers(now_ns, tenant)
        reservation.settle(now_ns, 650)

    return one


def budgets() -> Request:
    """Reserve the price of a request, with another slice of its answer, and settle."""
    money = TenantBudgets(BudgetsConfig(), wall_offset_ns=0)

    def one(_: int, now_ns: int, tenant: Tenant) -> None:
        assert not money.lacks(now_ns, tenant, 2000)
        assert money.reserve(now_ns, tenant, 2000) is None, "it was refused"
        money.renew(now_ns, tenant.id, 2000, 3000)
        money.settle(now_ns, tenant.id, 3000, 2500)

    return one


def refusals() -> Request:
    limiter = Limiter(LimitsConfig())
    limiter.reserve(0, EMPTY, 1, 1)
    return lambda i, _, __: limiter.reserve(
        i, EMPTY, 500, 200, request_id="chatcmpl-0123456789abcdef00000001"
    )


KINDS: dict[str, Callable[[], Request]] = {
    BARE: bare, LIMITS: limits, BUDGET: budgets, "a refusal": refusals
}  # fmt: skip


def times(requests: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a request by kind and round."""

    def one_round(make: Callable[[], Request]) -> float:
        one = make()

        def all_of_them() -> None:
            for i in range(requests):
                one(i, STEP_NS * (i + 1), TENANTS[i % 100])

        return cpu_us(all_of_them, requests)

    return in_turns(rounds, {name: partial(one_round, make) for name, make in KINDS.items()})


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: times the bare loop."""
    found = times(5_000, rounds)
    return {name: ratio(found[name], found[BARE]) for name in (LIMITS, BUDGET)}


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    found = times(args.requests, args.rounds)
    print(rounds_table("", "us of CPU", {"a request": found}))
    write_result(args.json, {"requests": args.requests, "us_per_request": found})


if __name__ == "__main__":
    main()
