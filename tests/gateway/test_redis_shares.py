"""What gateways tell each other of their tenants through a real Redis."""

import asyncio
from collections.abc import Iterable

import redis as client
from redis_process import RedisProcess

from penstock.gateway.shared import fair
from penstock.gateway.shared.fair import RedisShares
from penstock.policy.queueing.fair_counters import ServedUnits
from penstock.policy.terms import SharedTerms
from penstock.types import TenantId


def served(units: int) -> tuple[ServedUnits, ...]:
    return (("m", 0, TenantId("acme"), units),)


class Process:
    """One gateway process, and what it has heard."""

    def __init__(self, redis: RedisProcess, site: str) -> None:
        self.received: list[int] = []
        config = SharedTerms(url=redis.url, prefix="shares", timeout_s=10, retry_s=0.01)
        self.shares = RedisShares(config, site=site, heed=self._heed)
        self.shares.start()

    def _heed(self, reported: Iterable[ServedUnits]) -> None:
        self.received += [units for model, level, tenant, units in reported]


async def until_received(one: Process, other: Process, units: int) -> None:
    """Tell it as often as it takes: what is told before the other one listens is lost."""
    while units not in other.received:
        one.shares.tell(served(units))
        await asyncio.sleep(0.01)


def test_other_servers_hear_it_and_siblings_do_not(redis: RedisProcess) -> None:
    async def check() -> None:
        one, sibling, other = (Process(redis, site) for site in ("a", "a", "b"))
        await until_received(one, other, 1)
        await until_received(other, sibling, 2)
        await until_received(other, one, 3)
        assert 1 not in one.received + sibling.received
        with client.Redis.from_url(redis.url) as stranger:
            assert stranger.publish("shares:served", b"\xc1 nonsense") == 3
        await until_received(one, other, 4)
        many = tuple(("m", 0, TenantId(f"t{i}"), 1000 + i) for i in range(fair.UNITS_MAX + 1))
        one.shares.tell(many)
        while other.received[-1] != 1000 + fair.UNITS_MAX:
            await asyncio.sleep(0.01)
        for each in (one, sibling, other):
            await each.shares.close()

    asyncio.run(check())


def test_a_redis_that_dies_is_found_again_and_keeps_nothing_waiting(redis: RedisProcess) -> None:
    async def check() -> None:
        one, other = Process(redis, "a"), Process(redis, "b")
        await until_received(one, other, 1)
        redis.kill()
        for _ in range(10 * fair.UNSENT_MAX):
            one.shares.tell(served(2))  # Returns at once, and keeps no more than it may.
        redis.start()
        await until_received(one, other, 3)
        assert len(other.received) < 10 * fair.UNSENT_MAX
        for each in (one, other):
            await each.shares.close()

    asyncio.run(check())
