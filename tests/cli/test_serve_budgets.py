"""A budget that gateways share, over HTTP: `penstock serve` processes, each with a ledger of its own, in
front of a worker of ours and a real Redis; and the processes of one server.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from redis_process import RedisProcess
from stand_in_thread import MODEL, Serve, serve_with, shared_engine

pytestmark = pytest.mark.timeout(120)

PAID, PATIENCE = 60, 20
"""Requests that the budget is for, at a cent each."""
PRICES = f"prices: {{models: [{{model: {MODEL}, request: 0.01}}]}}"
PATIENT = serve_with({"penstock.gateway.shared.keeper.ASK_TIMEOUT_S": 10.0})
"""`penstock serve`, for which a busy machine is no late store."""
TENANTS = dict.fromkeys(("acme", "umbrella"), f"budget_per_month: {PAID / 100}")
"""A month's: a day's budget is a new one for a test that runs over midnight."""


class World:
    """Two machines, as far as their ledgers go, and what they share."""

    def __init__(self, path: Path, store: RedisProcess, engine) -> None:
        self.store = store
        shared = f"shared: {{url: '{store.url}', gateways: 2}}"
        self.one, self.two = (
            Serve(path / name, engine, TENANTS, shared, PRICES, command=PATIENT) for name in ("one", "two")
        )
        for gateway in (self.one, self.two):
            gateway.server.wait_ready()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed")
    path = tmp_path_factory.mktemp("world")
    store = RedisProcess(path)
    store.start()
    with shared_engine() as engine:
        made = World(path, store, engine)
        yield made
        made.one.kill()
        made.two.kill()
    store.kill()


async def ask(gateway: Serve, tenant: str, limit: int) -> int:
    """How many of so many requests, one after the other, the budget let through until it refused one."""
    client, bought = gateway.client(tenant, fresh=True), 0
    body = msgspec.json.encode({"model": MODEL, "prompt": "a", "max_tokens": 1})
    try:
        for _ in range(limit):
            for _ in range(PATIENCE):
                response = await client.post("/completions", body)
                if b"the store that knows does not answer now" not in response.body:
                    break
                await asyncio.sleep(0.1)  # The machine is busy.
            if response.status == 429:
                assert b"Your monthly budget of 0.60 is used up" in response.body
                break
            assert response.status == 200, response.body
            bought += 1
    finally:
        await client.close()
    return bought


def buy(tenant: str, *gateways: Serve, limit: int = PAID + 1) -> int:
    """How many requests all of them let through, each asked on its own until it refuses one."""

    async def main() -> int:
        return sum(await asyncio.gather(*(ask(each, tenant, limit) for each in gateways)))

    return asyncio.run(main())


def test_machines_hold_one_budget_together(world: World) -> None:
    """At the same time, from the first request on: no cent more than there is."""
    bought = buy("acme", world.one, world.two, world.one, world.two)
    assert PAID - 4 <= bought <= PAID  # A request that is refused is asked for by its client alone.
    assert bought + buy("acme", world.one) + buy("acme", world.two) <= PAID


def test_a_restart_of_gateway_or_redis_forgets_nothing(world: World) -> None:
    assert buy("umbrella", world.one, limit=20) == 20
    world.two.kill()
    world.two.start()
    world.two.server.wait_ready()
    assert buy("umbrella", world.two, limit=5) == 5
    world.store.freeze()
    assert buy("umbrella", world.two, limit=3) == 3, "its part of what was left"
    world.store.kill()
    assert buy("umbrella", world.two, limit=2) == 2
    for each in (world.one, world.two):
        each.server.wait_said("the shared store is away")
    world.store.start()  # With nothing in it.
    for each in (world.one, world.two):
        each.server.wait_said("the shared store is back")
    world.one.kill()
    world.one.start()
    world.one.server.wait_ready()
    assert 30 + buy("umbrella", world.one) + buy("umbrella", world.two) <= PAID


def test_processes_of_one_server_hold_one_budget_together(tmp_path: Path) -> None:
    gateway = Serve(tmp_path / "gateway", None, TENANTS, PRICES, processes=2, command=PATIENT)
    try:
        gateway.server.wait_ready()
        bought = buy("acme", *[gateway] * 4)
        assert PAID - 4 <= bought <= PAID
        assert bought + buy("acme", gateway) <= PAID
    finally:
        gateway.kill()
