"""Where responses are kept: whose they are, for how long, and how many; in memory and in a real Redis."""

import asyncio

import pytest
from redis_process import RedisProcess

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.flow import SharedConfig
from penstock.gateway.shared import responses
from penstock.gateway.shared.keeper import StoreError
from penstock.gateway.shared.responses import (
    KEPT_S,
    MemoryResponses,
    RedisResponses,
    StoredResponse,
    open_responses,
)
from penstock.types import TenantId

ONE, OTHER = TenantId("one"), TenantId("other")


def stored(num_bytes: int = 100) -> StoredResponse:
    return StoredResponse(body=b"x" * (num_bytes - 2), items=b"[]")


async def keeps_by_tenant(store) -> None:
    await store.save(ONE, "resp_1", stored())
    assert await store.load(ONE, "resp_1") == stored()
    assert await store.load(OTHER, "resp_1") is None
    assert await store.load(TenantId("one:response"), "resp_1") is None
    assert not await store.delete(OTHER, "resp_1")
    assert await store.delete(ONE, "resp_1")
    assert not await store.delete(ONE, "resp_1")
    assert await store.load(ONE, "resp_1") is None
    await store.close()


def test_in_memory() -> None:
    asyncio.run(keeps_by_tenant(MemoryResponses(ManualClock())))


def test_they_are_forgotten_in_time() -> None:
    async def check() -> None:
        clock = ManualClock()
        store = MemoryResponses(clock)
        await store.save(ONE, "resp_1", stored())
        clock.advance(KEPT_S * NS_PER_S - 1)
        await store.save(OTHER, "resp_2", stored())
        assert await store.load(ONE, "resp_1") is not None
        clock.advance(1)
        assert await store.load(ONE, "resp_1") is None
        assert await store.load(OTHER, "resp_2") is not None
        assert store.num_bytes == 100

    asyncio.run(check())


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "TENANT_BYTES_MAX", 300)
    monkeypatch.setattr(responses, "BYTES_MAX", 500)

    async def check() -> None:
        store = MemoryResponses(ManualClock())

        async def there(tenant: TenantId) -> list[int]:
            return [i for i in range(10) if await store.load(tenant, f"resp_{i}") is not None]

        for i in range(4):
            await store.save(ONE, f"resp_{i}", stored())
        assert await there(ONE) == [1, 2, 3]
        for i in range(4, 8):
            await store.save(OTHER, f"resp_{i}", stored())
        assert (await there(ONE), await there(OTHER), store.num_bytes) == ([2, 3], [5, 6, 7], 500)

    asyncio.run(check())


def test_in_redis(tmp_path) -> None:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    redis = RedisProcess(tmp_path)
    redis.start()
    config = SharedConfig(url=redis.url, prefix="here")
    try:
        asyncio.run(keeps_by_tenant(RedisResponses(config)))
        asyncio.run(are_seen_by_another_process(config))
        asyncio.run(may_be_asked_for_all_at_once(config))
    finally:
        redis.kill()
    with pytest.raises(StoreError):
        asyncio.run(RedisResponses(config).load(ONE, "resp_1"))


async def are_seen_by_another_process(config: SharedConfig) -> None:
    first, second = RedisResponses(config), RedisResponses(config)
    await first.save(ONE, "resp_1", stored())
    assert await second.load(ONE, "resp_1") == stored()
    await first.close()
    await second.close()


async def may_be_asked_for_all_at_once(config: SharedConfig) -> None:
    store, names = RedisResponses(config), [f"resp_{i}" for i in range(responses.REDIS_CONNECTIONS + 8)]
    await asyncio.gather(*(store.save(OTHER, name, stored()) for name in names))
    assert await asyncio.gather(*(store.load(OTHER, name) for name in names)) == [stored()] * len(names)
    await store.close()


def test_processes_that_share_no_store_keep_none() -> None:
    assert open_responses(SharedConfig(), ManualClock(), processes=2) is None
    assert isinstance(open_responses(SharedConfig(), ManualClock(), processes=1), MemoryResponses)
