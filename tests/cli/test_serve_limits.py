"""Limits that gateways share, over HTTP: `penstock serve` processes in front of a worker of ours, a real
Redis, and kill -9 of either.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from redis_process import RedisProcess
from stand_in_thread import MODEL, Serve, serve_with, shared_engine

from penstock.bench.client import Client

pytestmark = pytest.mark.timeout(240)

REQUESTS, TOKENS = 240, 60_000
"""Per minute, and in a full bucket."""
PROMPT_TOKENS = 1999
LEASE_S, TTL_S = 0.25, 1.5
_TIMES = {"LEASE_S": LEASE_S, "GATEWAY_TTL_S": TTL_S, "TIMEOUT_S": 0.2, "RETRY_S": 0.1}
COMMAND = serve_with({f"penstock.policy.terms.{name}": value for name, value in _TIMES.items()})
IN_A_ROW = 12
"""So many refusals in a row of each client, and the bucket is taken for empty."""
TENANTS = dict.fromkeys(
    ("requests", "killed", "closed", "local-share", "open"), f"requests_per_minute: {REQUESTS}"
)
TENANTS["tokens"] = f"tokens_per_minute: {TOKENS}"


def lease(per_minute: int) -> int:
    """The largest lease of one of two gateways: a second's worth, or its part of a quarter of the burst
    (docs/limits.md).
    """
    return max(1, int(per_minute / 60 * LEASE_S), per_minute // 4 // 2)


@dataclass(slots=True)
class Spent:
    """What clients got while they asked as fast as they were answered."""

    started_s: float = field(default_factory=time.monotonic)
    requests: int = 0
    tokens: int = 0
    refused: int = 0

    def refilled(self, per_minute: int) -> float:
        """Since the start, rounded up."""
        return (time.monotonic() - self.started_s) * per_minute / 60 + 1


async def ask(client: Client, spent: Spent, prompt: object = "a") -> bool:
    """One answer of one token; False: refused, for its limit."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    response = await client.post("/completions", msgspec.json.encode(body))
    if response.status == 429:
        assert b"Rate limit reached" in response.body
        spent.refused += 1
        return False
    assert response.status == 200, response.body
    spent.requests += 1
    spent.tokens += msgspec.json.decode(response.body)["usage"]["total_tokens"]
    return True


async def exhaust(client: Client, spent: Spent, prompt: object = "a") -> None:
    """Ask until nothing has been let through for a while."""
    in_a_row = 0
    while in_a_row < IN_A_ROW:
        in_a_row = 0 if await ask(client, spent, prompt) else in_a_row + 1
        await asyncio.sleep(0.01 * bool(in_a_row))


def spend(
    tenant: str,
    *gateways: Serve,
    prompt: object = "a",
    clients: int = 3,
    fresh: bool = False,
    spent: Spent | None = None,
) -> Spent:
    """Several clients at each of the gateways, until the limit is used up; `fresh`: each request on a new
    connection.
    """
    spent = spent or Spent()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            asking = []
            for gateway in gateways:
                client = gateway.client(tenant, fresh=fresh)
                stack.push_async_callback(client.close)
                asking += [exhaust(client, spent, prompt) for _ in range(clients)]
            await asyncio.gather(*asking)

    asyncio.run(main())
    return spent


class World:
    """Two gateways that are closed without their store, one that shares, one that is open; and the store."""

    def __init__(self, path: Path, redis: RedisProcess, engine) -> None:
        self.redis = redis

        def serve(name: str, policy: str) -> Serve:
            shared = f"shared: {{url: '{redis.url}', prefix: {policy}, on_store_down: {policy}, gateways: 2}}"
            return Serve(path / name, engine, TENANTS, shared, command=COMMAND)

        self.one, self.two = serve("one", "closed"), serve("two", "closed")
        self.share, self.open = serve("share", "local-share"), serve("open", "open")
        self.all = (self.one, self.two, self.share, self.open)
        for one in self.all:
            one.server.wait_ready()

    @property
    def policies(self) -> list[tuple[str, Serve]]:
        """What they do without their store, and one gateway of each."""
        return [("closed", self.one), ("local-share", self.share), ("open", self.open)]

    def wait_metric(self, gateway: Serve, name: str, value: float) -> None:
        gateway.server.until(lambda: gateway.metric(name) == value, f"{name} is never {value}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed")
    path = tmp_path_factory.mktemp("world")
    redis = RedisProcess(path)
    redis.start()
    with shared_engine() as engine:
        made = World(path, redis, engine)
        yield made
        for one in made.all:
            one.kill()
    redis.kill()


def test_two_gateways_let_through_one_limit_and_at_most_a_lease_each(world: World) -> None:
    spent = spend("requests", world.one, world.two)
    assert spent.requests >= REQUESTS * 0.95
    assert spent.requests <= REQUESTS + spent.refilled(REQUESTS) + 2 * lease(REQUESTS)
    spent = spend("tokens", world.one, world.two, prompt=[7] * PROMPT_TOKENS)
    assert spent.tokens >= TOKENS * 0.9
    assert spent.tokens <= TOKENS + spent.refilled(TOKENS) + 2 * lease(TOKENS)


def test_a_killed_gateway_takes_at_most_its_lease_along(world: World) -> None:
    spent = Spent()
    world.wait_metric(world.one, "penstock_shared_gateways", 2)

    async def begin() -> None:
        client = world.two.client("killed")
        for _ in range(10):
            await ask(client, spent)
        await client.close()

    asyncio.run(begin())
    world.two.kill()
    spend("killed", world.one, spent=spent)
    assert REQUESTS - 2 * lease(REQUESTS) <= spent.requests
    assert spent.requests <= REQUESTS + spent.refilled(REQUESTS) + 2 * lease(REQUESTS)
    world.wait_metric(world.one, "penstock_shared_gateways", 1)
    world.two.start()
    world.two.server.wait_ready()
    world.wait_metric(world.one, "penstock_shared_gateways", 2)
    again = spend("killed", world.two)
    assert again.requests <= spent.refilled(REQUESTS) + 2 * lease(REQUESTS), (
        "the new one does not begin with a full bucket"
    )


async def notice(gateway: Serve) -> None:
    """Ask something, so that the gateway asks its store."""
    client = gateway.client("requests")
    await ask(client, Spent())
    await client.close()


async def one_passes(gateway: Serve) -> bool:
    client = gateway.client("closed")
    try:
        return await ask(client, Spent())
    finally:
        await client.close()


def test_without_the_store_each_gateway_does_as_it_was_told(world: World) -> None:
    before = {policy: spend(policy, gateway).requests for policy, gateway in world.policies}
    assert all(requests >= REQUESTS * 0.95 for requests in before.values())
    world.redis.kill()
    for _, gateway in world.policies:
        asyncio.run(notice(gateway))
        world.wait_metric(gateway, "penstock_shared_store_away", 1)
    # Closed: what was on lease, then nothing however long one waits.
    spend("closed", world.one)
    assert spend("closed", world.one).requests == 0
    # Local share: half of the rate, since two gateways are counted.
    began = Spent()
    shared = spend("local-share", world.share, spent=began)
    time.sleep(0.5)
    spend("local-share", world.share, spent=shared)
    assert 1 <= shared.requests <= began.refilled(REQUESTS) / 2 + 2 * lease(REQUESTS)
    # Open: no limit.
    opened = Spent()

    async def many() -> None:
        client = world.open.client("open")
        assert all([await ask(client, opened) for _ in range(2 * lease(REQUESTS) + 20)])
        await client.close()

    asyncio.run(many())
    world.redis.start()
    for policy, gateway in world.policies:
        world.wait_metric(gateway, "penstock_shared_store_away", 0)
        spent = spend(policy, gateway)
        assert spent.requests <= REQUESTS, "limited again"
    gateway = world.one.server
    gateway.until(lambda: asyncio.run(one_passes(world.one)), "nothing passes any more")


def test_the_processes_of_one_serve_let_through_one_limit(tmp_path: Path) -> None:
    gateway = Serve(tmp_path / "serve", None, TENANTS, processes=2)
    try:
        gateway.server.wait_ready()
        # A new connection for each request: both processes have about as many, and each would let all of
        # them through.
        spent = spend("requests", gateway, clients=4, fresh=True)
    finally:
        gateway.server.process.terminate()
        gateway.server.wait_ended()
    assert spent.requests >= REQUESTS * 0.95
    assert spent.requests <= REQUESTS + spent.refilled(REQUESTS) + 2 * max(REQUESTS // 60, lease(REQUESTS))
