"""A budget that machines share, over HTTP: real `penstock serve` processes, each with a ledger of its own,
and a real Redis.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis
from redis_process import RedisProcess
from stand_in_thread import MODEL, Serve, serve_with, stand_in_engine

pytestmark = pytest.mark.timeout(120)

PAID = 60
"""Requests that the budget is for, at a cent each."""
CENT = 10_000
REFRESH_S = 0.1
HEARD_S = 20 * REFRESH_S
OFTEN = serve_with({"penstock.gateway.shared.spending.REFRESH_S": REFRESH_S})
"""`penstock serve`, of which the machines hear of each other every tenth of a second."""
TENANTS = dict.fromkeys(("acme", "umbrella"), f"budget_per_day: {PAID / 100}")


class World:
    """Two machines, as far as their ledgers go, and what they share."""

    def __init__(self, path: Path, store: RedisProcess, engine) -> None:
        self.store = store
        sections = (
            f"shared: {{url: '{store.url}'}}",
            f"prices: {{models: [{{model: {MODEL}, request: 0.01}}]}}",
        )
        self.one, self.two = (
            Serve(path / name, engine, TENANTS, *sections, command=OFTEN) for name in ("one", "two")
        )
        for gateway in (self.one, self.two):
            gateway.server.wait_ready()

    def told(self, tenant: str) -> list[int]:
        """What Redis knows of the tenant's day, in cents, by ledger."""
        with redis.Redis.from_url(self.store.url) as client:
            keys = client.keys(f"penstock:spent:day:*:{tenant}")
            return sorted(int(value) // CENT for key in keys for value in client.hvals(key))

    def wait_reported(self, tenant: str, *cents: int) -> None:
        """Until both machines must have heard this."""
        self.one.server.until(lambda: self.told(tenant) == sorted(cents), f"{tenant}: {self.told(tenant)}")
        time.sleep(HEARD_S)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed")
    path = tmp_path_factory.mktemp("world")
    store = RedisProcess(path)
    store.start()
    with stand_in_engine() as engine:
        made = World(path, store, engine)
        yield made
        made.one.kill()
        made.two.kill()
    store.kill()


def buy(gateway: Serve, tenant: str, most: int = PAID + 1) -> int:
    """How many of so many requests, one after the other, the budget let through until it refused one."""

    async def main() -> int:
        client, bought = gateway.client(tenant), 0
        body = msgspec.json.encode({"model": MODEL, "prompt": "a", "max_tokens": 1})
        try:
            for _ in range(most):
                response = await client.post("/completions", body)
                if response.status == 429:
                    assert b"Your daily budget of 0.60 is used up" in response.body
                    break
                assert response.status == 200, response.body
                bought += 1
        finally:
            await client.close()
        return bought

    return asyncio.run(main())


def test_machines_hold_one_budget_together(world: World) -> None:
    assert buy(world.one, "acme", 40) == 40
    world.wait_reported("acme", 40)
    assert buy(world.two, "acme", 1) == 1
    world.wait_reported("acme", 1, 40)
    assert buy(world.two, "acme") == PAID - 41
    world.wait_reported("acme", 20, 40)
    assert buy(world.one, "acme") == 0


def test_a_restart_of_gateway_or_redis_forgets_nothing(world: World) -> None:
    assert buy(world.one, "umbrella", 30) == 30
    world.wait_reported("umbrella", 30)
    world.two.kill()
    world.two.start()
    world.two.server.wait_ready()
    assert buy(world.two, "umbrella", 1) == 1
    world.wait_reported("umbrella", 1, 30)
    world.store.kill()
    assert buy(world.two, "umbrella", 9) == 9, "what was heard last still counts"
    world.one.server.wait_said("budgets do not hear of other machines")
    world.store.start()  # With nothing in it.
    world.wait_reported("umbrella", 10, 30)
    assert buy(world.one, "umbrella") == PAID - 40
    world.wait_reported("umbrella", 10, 50)
    assert buy(world.two, "umbrella") == 0
    world.one.kill()
    world.one.start()
    world.one.server.wait_ready()
    assert buy(world.one, "umbrella") == 0, "its own ledger and what the other has told"
