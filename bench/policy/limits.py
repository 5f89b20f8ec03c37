"""The cost of rate limits and budgets per request in CPU time: reserve, renew, headers, settle; alone and
with leases.

    python -m bench.policy.limits [--requests 20000] [--rounds 7] [--json FILE]

Beside each figure stands its ratio to a bare loop that does for each request what no limiter can do without:
one dictionary look-up, one object with four fields, and two integer comparisons. The share of limits in a
whole request's CPU is measured by `bench/relay/peers.py --features`.
"""

import time
from collections.abc import Callable

from bench.harness import Spread, command_line, in_turns, ratio, spread, table, write_result
from penstock.clock import NS_PER_MS, NS_PER_US
from penstock.config.flow import LimitsConfig, SharedConfig
from penstock.config.ledger import BudgetsConfig
from penstock.policy.estimates import OutputLengths
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.lease_table import LeaseTable
from penstock.policy.limits.rate_limit import Limiter, LimitReservation
from penstock.policy.tenant import Tenant
from penstock.types import TenantId

TENANTS = [
    Tenant(
        id=TenantId(f"t{i}"),
        requests_per_minute=10**7,
        tokens_per_minute=10**9,
        concurrent_max=1000,
        budget_day_micros=10**12,
        budget_month_micros=10**13,
    )
    for i in range(100)
]
EMPTY = Tenant(id=TenantId("empty"), requests_per_minute=1, tokens_per_minute=10**9)
STEP_NS = 100 * NS_PER_US
Work = Callable[[int], int]
"""Number of requests -> nanoseconds of CPU that they took."""


class Bare:
    """The objects made for each request in the bare loop."""

    __slots__ = ("a", "b", "c", "d")

    def __init__(self, a: int, b: int, c: int, d: int) -> None:
        self.a, self.b, self.c, self.d = a, b, c, d


def bare(num_requests: int) -> int:
    table = {tenant.id: Bare(0, 0, 10**18, 0) for tenant in TENANTS}
    start = time.process_time_ns()
    for i in range(num_requests):
        use = table[TENANTS[i % 100].id]
        if use.a < use.c and use.b < use.c:
            Bare(i, i, i, i)
    return time.process_time_ns() - start


def limiter_of(kind: str) -> tuple[Limiter, Callable[[int], None]]:
    """A limiter, and what its keeper would do every ten milliseconds (counted in)."""
    if kind == "alone":
        return Limiter(LimitsConfig()), lambda now_ns: None
    config = SharedConfig()
    leases, table = Leases(config), LeaseTable(config)

    def keep(now_ns: int) -> None:
        leases.look_for_idle(now_ns)
        leases.granted(now_ns, table.lease(now_ns, "g", leases.asks(now_ns)))

    return Limiter(LimitsConfig(), leases.make_bucket), keep


def life(kind: str, *, headers: bool, renewals: int = 0) -> Work:
    """Reserve, headers where wanted, renewals, settle."""

    def work(num_requests: int) -> int:
        limiter, keep = limiter_of(kind)
        now_ns = kept_ns = 0
        start = time.process_time_ns()
        for i in range(num_requests):
            now_ns += STEP_NS
            if now_ns - kept_ns > 10 * NS_PER_MS:
                keep(now_ns)
                kept_ns = now_ns
            tenant = TENANTS[i % 100]
            reservation = limiter.reserve(now_ns, tenant, 500, 200)
            assert isinstance(reservation, LimitReservation)
            for done in range(renewals):
                reservation.renew(now_ns, 200 + 256 * done + 1)
            if headers:
                limiter.headers(now_ns, tenant)
            reservation.settle(now_ns, 650)
        return time.process_time_ns() - start

    return work


def budgets(kind: str) -> Work:
    """Reserve the price of a request, with another slice of its answer, and settle."""

    def work(num_requests: int) -> int:
        config = SharedConfig()
        leases, table = Leases(config, process="p") if kind == "leased" else None, LeaseTable(config)
        money = TenantBudgets(BudgetsConfig(), wall_offset_ns=0, leases=leases)
        now_ns = kept_ns = num_refused = 0
        start = time.process_time_ns()
        for i in range(num_requests):
            now_ns += STEP_NS
            tenant = TENANTS[i % 100]
            waits = money.lacks(now_ns, tenant, 2000)
            if leases is not None and (waits or now_ns - kept_ns > 10 * NS_PER_MS):
                leases.look_for_idle(now_ns)
                leases.granted(now_ns, table.lease(now_ns, "g", leases.asks(now_ns)))
                kept_ns = now_ns
            if money.reserve(now_ns, tenant, 2000) is not None:
                num_refused += 1
                continue
            money.renew(now_ns, tenant.id, 2000, 3000)
            money.settle(now_ns, tenant.id, 3000, 2500)
        taken_ns = time.process_time_ns() - start
        assert not num_refused, f"{num_refused} requests were refused"
        return taken_ns

    return work


def refusals(num_requests: int) -> int:
    limiter = Limiter(LimitsConfig())
    limiter.reserve(0, EMPTY, 1, 1)
    start = time.process_time_ns()
    for i in range(num_requests):
        limiter.reserve(i, EMPTY, 500, 200, request_id="chatcmpl-0123456789abcdef00000001")
    return time.process_time_ns() - start


def lengths(num_requests: int) -> int:
    known = OutputLengths(LimitsConfig())
    start = time.process_time_ns()
    for i in range(num_requests):
        tenant = TENANTS[i % 100].id
        known.expect(tenant, "m", 4096)
        known.observe(tenant, "m", i * 7919 % 1500)
    return time.process_time_ns() - start


WORKS: dict[str, Work] = {
    "bare loop": bare,
    "reserve + settle": life("alone", headers=False),
    "reserve + headers + settle": life("alone", headers=True),
    "the same, 4 renewals": life("alone", headers=True, renewals=4),
    "reserve + headers + settle, leases and store": life("leased", headers=True),
    "a budget: reserve + slice + settle": budgets("alone"),
    "the same, leases and store included": budgets("leased"),
    "a refusal": refusals,
    "expect + observe a length": lengths,
}


def us_per_request(requests: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU, by work and round."""
    per_request = requests * NS_PER_US
    return in_turns(rounds, {name: lambda w=work: w(requests) / per_request for name, work in WORKS.items()})


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: times the bare loop."""
    times = us_per_request(5_000, rounds)
    return {
        name: ratio(times[name], times["bare loop"])
        for name in ("reserve + headers + settle", "a budget: reserve + slice + settle")
    }


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    times = us_per_request(args.requests, args.rounds)
    rows = [(name, spread(took), ratio(took, times["bare loop"])) for name, took in times.items()]
    print(table(("per request", "us of CPU", "x bare"), rows))
    write_result(args.json, {"requests": args.requests, "us_per_request": times})


if __name__ == "__main__":
    main()
