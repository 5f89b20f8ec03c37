"""Two gateways share a worker by one fair share, whichever of them a tenant's connections are in: processes
of one server, and machines that share a Redis.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from engine_stand_ins import StandIn
from fair_askers import SLOTS, at_machines, in_processes, port_of, shares, two_tenants
from raw_worker import RawWorker
from redis_process import RedisProcess
from stand_in_thread import Serve, shared_engine, stand_in_engine

pytestmark = pytest.mark.timeout(240)

WARM_UP, ANSWERS = 60, 400


def test_tenants_share_evenly_however_their_connections_are_spread(tmp_path: Path) -> None:
    async def main(gateway: Serve) -> float:
        with contextlib.ExitStack() as stack:
            askers = await in_processes(port_of(gateway), gateway.keys, stack)
            return (await shares(askers, 8, (WARM_UP, ANSWERS)))[0]

    with stand_in_engine(step_s=0.02) as engine:
        gateway = two_tenants(tmp_path / "gateway", engine, processes=2)
        try:
            gateway.server.wait_ready()
            assert asyncio.run(main(gateway)) == pytest.approx(0.5, abs=0.05)
        finally:
            gateway.kill()


def test_tenants_share_an_engine_of_ours_evenly_whichever_process_fills_it_first(tmp_path: Path) -> None:
    """`tests/sim/test_fair_processes.py` holds a tighter bound: here a busy machine delays processes by more
    than a request takes.
    """

    async def main(gateway: Serve) -> float:
        with contextlib.ExitStack() as stack:
            askers = await in_processes(port_of(gateway), gateway.keys, stack)
            return (await shares(askers, 24, (WARM_UP, ANSWERS)))[0]

    gateway = two_tenants(tmp_path / "gateway", None, processes=2)
    try:
        gateway.server.wait_ready()
        assert asyncio.run(main(gateway)) == pytest.approx(0.5, abs=0.05)
    finally:
        gateway.kill()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed")
    process = RedisProcess(tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.mark.parametrize(
    ("make_engine", "max_tokens"),
    [(lambda: shared_engine(SLOTS), 48), (lambda: stand_in_engine(step_s=0.02), 8)],
    ids=["ours", "another's"],
)
def test_machines_that_share_a_redis_share_as_one_and_go_on_when_it_freezes(
    tmp_path: Path,
    redis: RedisProcess,
    make_engine: Callable[[], AbstractContextManager[StandIn | RawWorker]],
    max_tokens: int,
) -> None:
    async def main(gateways: list[Serve]) -> float:
        with contextlib.ExitStack() as stack:
            askers = await at_machines(gateways, stack)
            (share,) = await shares(askers, max_tokens, (WARM_UP, ANSWERS))
            redis.freeze()
            await asyncio.gather(*(asker.ask(1) for _, asker in askers))
            return share

    with make_engine() as engine:
        shared = f"shared: {{url: '{redis.url}', prefix: fair, gateways: 2}}"
        gateways = [two_tenants(tmp_path / name, engine, shared) for name in ("one", "two")]
        try:
            for each in gateways:
                each.server.wait_ready()
            assert asyncio.run(main(gateways)) == pytest.approx(0.5, abs=0.05)
        finally:
            for each in gateways:
                each.kill()
