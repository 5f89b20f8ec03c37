"""How much eight gateways over one real Redis grant together: what the limit allows, and no more."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator

import pytest
from redis_process import RedisProcess

from penstock.clock import NS_PER_S, SystemClock
from penstock.config.flow import LimitsConfig
from penstock.config.tree import LogConfig
from penstock.gateway.shared import limits as shared_limits
from penstock.gateway.shared.limits import SharedLimits
from penstock.policy.limits.levels import LimitLevels
from penstock.policy.limits.rate_limit import LimitRefusal
from penstock.policy.tenant import PartLimits, Tenant
from penstock.policy.terms import SharedTerms
from penstock.telemetry.log import Log
from penstock.types import TenantId

COUNT = 8
CLOCK = SystemClock()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no late store."""
    monkeypatch.setattr(shared_limits, "ASK_TIMEOUT_S", 10.0)


class Gateway:
    """What one gateway has of the limits."""

    def __init__(self, shared: SharedTerms, name: str) -> None:
        log = Log(LogConfig(), CLOCK, stream=io.StringIO())
        self.shared = SharedLimits(LimitsConfig(burst_s=6), shared, gateway=name, clock=CLOCK, log=log)
        self.levels = LimitLevels(self.shared.limiter)

    async def ask(self, tenant: Tenant, tokens: int, user: str = "") -> bool:
        """Whether a request of so many tokens was let in."""
        await self.shared.ask(lambda: self.lacks(tenant, tokens, user))
        if tenant.has_levels:
            held = self.levels.reserve(CLOCK.now_ns(), tenant, tokens, 0, user=user)
        else:
            held = self.shared.limiter.reserve(CLOCK.now_ns(), tenant, tokens, 0)
        if isinstance(held, LimitRefusal):
            return False
        held.settle(CLOCK.now_ns(), tokens)
        return True

    def lacks(self, tenant: Tenant, tokens: int, user: str = "") -> bool:
        """Whether the store is asked first."""
        if tenant.has_levels:
            return self.levels.lacks(CLOCK.now_ns(), tenant, tokens, 0, key="", user=user)
        return self.shared.limiter.lacks(CLOCK.now_ns(), tenant, tokens)

    async def ask_until_refused(self, tenant: Tenant, tokens: int, in_a_row: int = 5) -> int:
        """Tokens that were let in before so many refusals in a row."""
        granted = refused = 0
        while refused < in_a_row:
            is_granted = await self.ask(tenant, tokens)
            granted, refused = granted + tokens * is_granted, 0 if is_granted else refused + 1
            await asyncio.sleep(0)
        return granted


@contextlib.asynccontextmanager
async def gateways(redis: RedisProcess, prefix: str, **changes: object) -> AsyncIterator[list[Gateway]]:
    shared = SharedTerms(url=redis.url, prefix=prefix, gateways=COUNT, timeout_s=10, **changes)
    made = [Gateway(shared, f"{prefix}-{number}") for number in range(COUNT)]
    await asyncio.gather(*(each.shared.start() for each in made))
    yield made
    await asyncio.gather(*(each.shared.close() for each in made))


@pytest.mark.parametrize("tokens", [20, 700], ids=["many small requests", "few large ones"])
def test_a_flood_at_all_gateways_gets_what_the_limit_allows(redis: RedisProcess, tokens: int) -> None:
    async def check() -> None:
        tenant = Tenant(id=TenantId("t"), tokens_per_minute=60_000)
        burst, per_s = 6000, 1000
        async with gateways(redis, f"flood {tokens}") as made:
            begun_ns = CLOCK.now_ns()
            granted = sum(await asyncio.gather(*(each.ask_until_refused(tenant, tokens) for each in made)))
            allowed = burst + per_s * (CLOCK.now_ns() - begun_ns) / NS_PER_S
        assert granted <= allowed + 1  # Well within max(1 %, one request) of the limit.
        assert granted >= burst - COUNT * tokens

    asyncio.run(check())


def test_a_small_limit_is_asked_for_by_each_request(redis: RedisProcess) -> None:
    """Ten are let through at once, and each gateway is sent ten."""

    async def check() -> None:
        tenant = Tenant(id=TenantId("t"), requests_per_minute=100)
        async with gateways(redis, "small") as made:
            begun_ns = CLOCK.now_ns()
            answers = await asyncio.gather(*(each.ask(tenant, 1) for each in made for _ in range(10)))
            refilled = 100 * (CLOCK.now_ns() - begun_ns) / NS_PER_S / 60
        assert 10 <= sum(answers) <= 10 + refilled

    asyncio.run(check())


def test_a_burst_at_one_gateway_gets_all_that_is_there(redis: RedisProcess) -> None:
    async def check() -> None:
        tenant = Tenant(id=TenantId("t"), requests_per_minute=160)
        async with gateways(redis, "burst") as made:
            assert all(await asyncio.gather(*(made[0].ask(tenant, 1) for _ in range(16))))

    asyncio.run(check())


def test_a_users_limit_holds_over_all_gateways(redis: RedisProcess) -> None:
    async def check() -> None:
        tenant = Tenant(
            id=TenantId("t"), tokens_per_minute=600_000, per_user=PartLimits(requests_per_minute=30)
        )
        async with gateways(redis, "user") as made:
            begun_ns = CLOCK.now_ns()
            of_one = await asyncio.gather(*(each.ask(tenant, 1, "one") for each in made for _ in range(3)))
            refilled = 30 * (CLOCK.now_ns() - begun_ns) / NS_PER_S / 60
            assert 3 <= sum(of_one) <= 3 + refilled
            assert await made[0].ask(tenant, 1, "other")

    asyncio.run(check())


def test_a_store_that_freezes_is_waited_for_once(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then requests go by what was on lease and on credit: one lease, or one request, of each gateway."""

    async def check() -> None:
        tenant = Tenant(id=TenantId("t"), requests_per_minute=100)
        async with gateways(redis, "frozen") as made:
            redis.freeze()
            begun_ns = CLOCK.now_ns()
            try:
                monkeypatch.setattr(shared_limits, "ASK_TIMEOUT_S", 0.01)
                assert all(await asyncio.gather(*(each.ask(tenant, 1) for each in made)))
                for each in made:
                    assert each.shared.leases is not None
                    assert each.shared.leases.is_late
                    assert not each.lacks(tenant, 1)
                    assert not await each.ask(tenant, 1)
            finally:
                redis.thaw()
            while any(each.shared.leases is None or each.shared.leases.is_late for each in made):
                await asyncio.sleep(0.01)
            monkeypatch.setattr(shared_limits, "ASK_TIMEOUT_S", 10.0)
            answers = await asyncio.gather(*(each.ask(tenant, 1) for each in made for _ in range(4)))
            refilled = 100 * (CLOCK.now_ns() - begun_ns) / NS_PER_S / 60
            assert sum(answers) <= 10 - COUNT + refilled  # What was on credit is charged.

    asyncio.run(check())
