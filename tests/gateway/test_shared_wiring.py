import asyncio
import io
from pathlib import Path

from penstock.clock import SystemClock
from penstock.config.flow import LimitsConfig, SharedConfig
from penstock.config.tree import LogConfig
from penstock.gateway.shared.keeper import LeaseServer
from penstock.gateway.shared.limits import SharedLimits
from penstock.policy.limits.rate_limit import LimitRefusal, LimitReservation
from penstock.policy.tenant import Tenant
from penstock.policy.terms import SharedTerms
from penstock.telemetry.log import Log
from penstock.types import TenantId

CLOCK = SystemClock()
WHO = Tenant(id=TenantId("t"), tokens_per_minute=60)  # One a second: the test is over before much refills.


def limits(shared: SharedConfig, name: str, parent: str = "") -> SharedLimits:
    log = Log(LogConfig(), CLOCK, stream=io.StringIO())
    return SharedLimits(LimitsConfig(), shared, gateway=name, clock=CLOCK, log=log, parent=parent)


def test_alone_it_is_a_limiter_and_nothing_else() -> None:
    async def check() -> None:
        alone = limits(SharedConfig(), "a")
        await alone.start()
        assert isinstance(alone.limiter.reserve(CLOCK.now_ns(), WHO, 60, 0), LimitReservation)
        assert isinstance(alone.limiter.reserve(CLOCK.now_ns(), WHO, 60, 0), LimitRefusal)
        await alone.close()

    asyncio.run(check())


def test_what_one_gateway_used_the_other_does_not_have(tmp_path: Path) -> None:
    async def check() -> None:
        shared, path = SharedTerms(timeout_s=10, gateway_ttl_s=30), tmp_path / "leases"
        server = LeaseServer(shared, path, CLOCK)
        await server.start()
        one, other = limits(shared, "one", str(path)), limits(shared, "other", str(path))
        await one.start()
        await other.start()
        assert isinstance(one.limiter.reserve(CLOCK.now_ns(), WHO, 50, 0), LimitReservation)
        while (level := server.table.level(CLOCK.now_ns(), "tokens:t")) is None or level > 20:
            await asyncio.sleep(0.005)
        other.limiter.reserve(CLOCK.now_ns(), WHO, 1, 0)
        while int(dict(other.limiter.headers(CLOCK.now_ns(), WHO))[b"x-ratelimit-remaining-tokens"]) > 20:
            await asyncio.sleep(0.005)
        assert isinstance(other.limiter.reserve(CLOCK.now_ns(), WHO, 40, 0), LimitRefusal)
        assert one.leases is not None
        assert (one.leases.num_gateways, one.leases.num_failures) == (2, 0)
        await server.close()
        one.limiter.reserve(CLOCK.now_ns(), WHO, 1, 0)
        while one.leases.down_ns is None:
            await asyncio.sleep(0.005)
        assert one.leases.num_failures > 0
        await one.close()
        await other.close()

    asyncio.run(check())
