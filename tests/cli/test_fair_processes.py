"""Two gateways share a worker by one fair share, whichever of them a tenant's connections are in: processes
of one server, and machines that share a Redis.
"""

import asyncio
import contextlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_stand_ins import StandIn
from raw_worker import RawWorker
from redis_process import RedisProcess
from stand_in_thread import MODEL, Serve, shared_engine, stand_in_engine

pytestmark = pytest.mark.timeout(120)

SLOTS = 8
"""Of the worker, in each process."""
WANTED = {"even": (16, 16), "uneven": (16, 2)}
"""Connections of a tenant in each place. In the second one, the uneven tenant has less than its half to
ask."""
ANSWERS, WARM_UP = 260, 60


@dataclass(slots=True)
class Asker:
    """One connection, which stays in the process that accepted it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: str

    @classmethod
    async def connect(cls, port: int, key: str, stack: contextlib.ExitStack) -> "Asker":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        return cls(reader, writer, key)

    async def ask(self, max_tokens: int) -> str:
        """The answer's id, which begins with its process."""
        body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
        length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
        return json.loads(await self.reader.readexactly(length))["id"][: len("cmpl-") + 16]


@dataclass(slots=True)
class Flood:
    """Answers of each tenant while all of them ask as fast as they are answered."""

    num_answers: Counter[str] = field(default_factory=Counter)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, tenant: str, asker: Asker, max_tokens: int) -> None:
        """Until it is over: what runs then is by numbers of connections, and does not count."""
        while not self.is_over.is_set():
            await asker.ask(max_tokens)
            if not self.is_over.is_set():
                self.num_answers[tenant] += 1
            if self.num_answers.total() >= ANSWERS:
                self.is_over.set()


Askers = list[tuple[str, Asker]]


async def in_processes(port: int, keys: dict[str, str], stack: contextlib.ExitStack) -> Askers:
    """As many connections as wanted in each of two processes, which share a port."""
    processes: dict[str, int] = {}
    askers = Askers()
    for tenant, wanted in WANTED.items():
        missing = list(wanted)
        while any(missing):
            asker = await Asker.connect(port, keys[tenant], stack)
            place = processes.setdefault(await asker.ask(1), len(processes))
            if missing[place]:
                missing[place] -= 1
                askers.append((tenant, asker))
    return askers


async def at_machines(gateways: list[Serve], stack: contextlib.ExitStack) -> Askers:
    """The same at two servers."""
    return [
        (tenant, await Asker.connect(port_of(gateway), gateway.keys[tenant], stack))
        for tenant, wanted in WANTED.items()
        for gateway, number in zip(gateways, wanted, strict=True)
        for _ in range(number)
    ]


async def share_of(askers: Askers, max_tokens: int = 8) -> float:
    """The share of the tenant whose connections are mostly in one place: the middle one of three, as a busy
    machine may let one of the processes stand still for a while.
    """
    return statistics.median([await share_once(askers, max_tokens) for _ in range(3)])


async def share_once(askers: Askers, max_tokens: int) -> float:
    flood = Flood()
    tasks = [asyncio.create_task(flood.ask(*each, max_tokens)) for each in askers]
    while flood.num_answers.total() < WARM_UP:
        await asyncio.sleep(0.01)
    before = flood.num_answers.copy()
    await asyncio.gather(*tasks)
    counted = flood.num_answers - before
    return counted["uneven"] / counted.total()


def port_of(gateway: Serve) -> int:
    return int(gateway.server.url.rpartition(":")[2].split("/")[0])


def served(place: Path, engine: StandIn | RawWorker | None, *sections: str, processes: int = 1) -> Serve:
    """An engine of ours runs `SLOTS` streams in all, and processes take them as they come free."""
    rows = SLOTS * processes if isinstance(engine, StandIn) else SLOTS
    return Serve(
        place, engine, dict.fromkeys(WANTED, "weight: 1"),
        "admission: {ttft_target_ms: 0, tpot_target_ms: 0}", *sections,
        processes=processes, worker="" if isinstance(engine, RawWorker) else f"max_running: {rows}",
    )  # fmt: skip


def test_tenants_share_evenly_however_their_connections_are_spread(tmp_path: Path) -> None:
    async def main(gateway: Serve) -> float:
        with contextlib.ExitStack() as stack:
            return await share_of(await in_processes(port_of(gateway), gateway.keys, stack))

    with stand_in_engine(step_s=0.02) as engine:
        gateway = served(tmp_path / "gateway", engine, processes=2)
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
            return await share_of(await in_processes(port_of(gateway), gateway.keys, stack), max_tokens=24)

    gateway = served(tmp_path / "gateway", None, processes=2)
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
            share = await share_of(askers, max_tokens)
            redis.freeze()
            await asyncio.gather(*(asker.ask(1) for _, asker in askers))
            return share

    with make_engine() as engine:
        shared = f"shared: {{url: '{redis.url}', prefix: fair, gateways: 2}}"
        gateways = [served(tmp_path / name, engine, shared) for name in ("one", "two")]
        try:
            for each in gateways:
                each.server.wait_ready()
            assert asyncio.run(main(gateways)) == pytest.approx(0.5, abs=0.05)
        finally:
            for each in gateways:
                each.kill()
