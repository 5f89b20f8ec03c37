"""docs/limits.md as it stands: its configuration is accepted, its table and its sums come out."""

import re

import pages

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.flow import LimitsConfig
from penstock.policy.estimates import OutputLengths
from penstock.policy.limits.lease import Leases
from penstock.policy.limits.rate_limit import Limiter, LimitRefusal, LimitReservation
from penstock.policy.tenant import Tenant
from penstock.types import TenantId

PAGE = pages.text_of("limits")
LIMITS, _, SHARED = pages.configs("limits")
TIER = LIMITS.tiers[0]
ACME = Tenant(
    id=TenantId("acme"),
    requests_per_minute=TIER.requests_per_minute,
    tokens_per_minute=TIER.tokens_per_minute,
)
PROMPT, EXPECTED = 1200, 300


def reserved(limiter: Limiter, now_ns: int, prompt: int = PROMPT, output: int = EXPECTED) -> LimitReservation:
    found = limiter.reserve(now_ns, ACME, prompt, output)
    assert isinstance(found, LimitReservation)
    return found


def left(limiter: Limiter, now_ns: int) -> int:
    return int(dict(limiter.headers(now_ns, ACME))[b"x-ratelimit-remaining-tokens"])


def test_one_request_with_numbers() -> None:
    taken = [pages.number(row[2]) for row in pages.table("limits", "when")]
    remaining = [row[3] for row in pages.table("limits", "when")]
    limiter, at_ns = Limiter(LIMITS.limits), 10 * NS_PER_S
    held = reserved(limiter, 0)
    assert (held.reserved, left(limiter, 0)) == (taken[0], pages.number(remaining[0]))
    held.renew(0, EXPECTED)
    assert held.reserved == taken[0], "as long as was expected: nothing to pay"
    held.renew(at_ns, EXPECTED + 1)
    assert held.reserved == taken[1]
    assert left(limiter, at_ns) == pages.number(remaining[1].split(" ")[0])
    held.renew(at_ns, 557)
    assert held.reserved == taken[2]
    before = left(limiter, at_ns)
    held.settle(at_ns, taken[3])
    assert left(limiter, at_ns) - before == taken[2] - taken[3] == 212
    assert limiter.settled == taken[3]


def test_the_headers_of_the_first_request() -> None:
    limiter = Limiter(LIMITS.limits)
    reserved(limiter, 0)
    reported = dict(re.findall(r"(x-ratelimit-[a-z-]+): (\S+)", PAGE))
    assert len(reported) == 6
    assert {name.decode(): value.decode() for name, value in limiter.headers(0, ACME)} == reported


def test_two_hundred_refused_clients_have_places_in_the_refill() -> None:
    limiter, who = Limiter(LimitsConfig()), Tenant(id=TenantId("acme"), tokens_per_minute=60_000)
    all_of_it = limiter.reserve(0, who, 60_000, 0)
    assert isinstance(all_of_it, LimitReservation)
    waits = []
    for number in range(200):
        refusal = limiter.reserve(0, who, 300, 0, request_id=f"r{number}")
        assert isinstance(refusal, LimitRefusal)
        waits.append(refusal.retry_after_ns)
    for place, wait_ns in enumerate(waits, 1):
        exact_ns = place * 300 * NS_PER_MS
        assert exact_ns <= wait_ns <= exact_ns * 9 // 8 + 1
    for wait_ns in sorted(waits):
        assert isinstance(limiter.reserve(wait_ns, who, 300, 0), LimitReservation), (
            "all are let in at their first retry"
        )


def test_a_reload_leaves_what_was_used_used() -> None:
    used, before, after, remaining = map(
        pages.number, re.findall(r"(\d+) of (\d+) used and a new limit of ([\d,]+) leaves (\d+)", PAGE)[0]
    )
    limiter = Limiter(LimitsConfig())
    limiter.reserve(0, Tenant(id=TenantId("a"), tokens_per_minute=before), used, 0)
    changed = Tenant(id=TenantId("a"), tokens_per_minute=after)
    limiter.reserve(0, changed, 0, 0)
    assert dict(limiter.headers(0, changed))[b"x-ratelimit-remaining-tokens"] == b"%d" % remaining


def test_what_can_never_pass_is_refused_and_an_expected_answer_is_cut() -> None:
    limiter = Limiter(LIMITS.limits)
    refusal = limiter.reserve(0, ACME, TIER.tokens_per_minute + 1, 1)
    assert isinstance(refusal, LimitRefusal)
    assert refusal.kind == "too_large"
    assert reserved(limiter, 0, 59_000, 5000).reserved == TIER.tokens_per_minute


def test_expected_output_of_a_tenant_without_a_past() -> None:
    assert OutputLengths(LimitsConfig()).expect(TenantId("new"), "m", 4000) == 256
    assert "without any, 256" in PAGE


def test_the_lease_of_eight_gateways() -> None:
    assert SHARED.shared.on_store_down == "local-share"
    leases = Leases(SHARED.shared)
    leases.num_gateways, leases.is_counted = 8, True
    (reported,) = re.findall(r"a lease is max\([^)]*\) = ([\d,]+) tokens", PAGE)
    assert leases.lease_max(60_000, 60_000) == pages.number(reported)
    (total,) = re.findall(r"8 × 1,875 = ([\d,]+) tokens", PAGE)
    assert 8 * pages.number(reported) == pages.number(total)
    leases.is_counted = False
    assert leases.lease_max(60_000, 60_000) == 1000, (
        "a second's worth, until all had the time to say that they are there"
    )
