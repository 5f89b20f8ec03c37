"""Two gateway processes share a worker by one fair share, whichever process a tenant's connections are in."""

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from stand_in_thread import MODEL, Serve, stand_in_engine

pytestmark = pytest.mark.timeout(120)

SLOTS = 8
"""Of the worker, in each process: its rows, and the credit."""
EVEN, UNEVEN = (12, 12), (12, 3)
"""Connections of a tenant in each process. In the second one, the uneven tenant has less than its half to
ask."""
ANSWERS, WARM_UP = 400, 120


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

    async def ask(self, tenant: str, asker: Asker) -> None:
        while not self.is_over.is_set():
            await asker.ask(8)
            self.num_answers[tenant] += 1
            if self.num_answers.total() >= ANSWERS:
                self.is_over.set()


async def share_of(port: int, keys: dict[str, str], stack: contextlib.ExitStack) -> float:
    """The share of the tenant whose connections are mostly in one process."""
    processes: dict[str, int] = {}
    askers = list[tuple[str, Asker]]()
    for tenant, wanted in (("even", EVEN), ("uneven", UNEVEN)):
        missing = list(wanted)
        while any(missing):
            asker = await Asker.connect(port, keys[tenant], stack)
            place = processes.setdefault(await asker.ask(1), len(processes))
            if missing[place]:
                missing[place] -= 1
                askers.append((tenant, asker))
    flood = Flood()
    tasks = [asyncio.create_task(flood.ask(*each)) for each in askers]
    while flood.num_answers.total() < WARM_UP:
        await asyncio.sleep(0.01)
    before = flood.num_answers.copy()
    await asyncio.gather(*tasks)
    counted = flood.num_answers - before
    return counted["uneven"] / counted.total()


async def shares(port: int, keys: dict[str, str]) -> float:
    with contextlib.ExitStack() as stack:
        return await share_of(port, keys, stack)


def test_tenants_share_evenly_however_their_connections_are_spread(tmp_path: Path) -> None:
    with stand_in_engine(step_s=0.01) as engine:
        gateway = Serve(
            tmp_path / "gateway", engine,
            {"even": "weight: 1", "uneven": "weight: 1"},
            "admission: {ttft_target_ms: 0, tpot_target_ms: 0}",
            processes=2, worker=f"max_running: {SLOTS // 2}",
        )  # fmt: skip
        try:
            gateway.server.wait_ready()
            port = int(gateway.server.url.rpartition(":")[2].split("/")[0])
            assert asyncio.run(shares(port, gateway.keys)) == pytest.approx(0.5, abs=0.05)
        finally:
            gateway.kill()
