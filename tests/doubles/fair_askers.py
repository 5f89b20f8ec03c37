"""Connections of two tenants at two gateways, as many as wanted at each, that ask as fast as they are
answered, and the share of the tenant whose connections are mostly at one of them.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_stand_ins import StandIn
from raw_worker import RawWorker
from stand_in_thread import MODEL, Serve

SLOTS = 8
"""Of the worker, in each process."""
WANTED = {"even": (16, 16), "uneven": (16, 2)}
"""Connections of a tenant in each place. In the second one, the uneven tenant has less than its half to
ask."""


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


@dataclass(slots=True)
class Flood:
    """Answers of each tenant while all of them ask as fast as they are answered."""

    num_answers: Counter[str] = field(default_factory=Counter)
    _is_over: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, tenant: str, asker: Asker, max_tokens: int) -> None:
        """Until it is over: what runs then is by numbers of connections, and does not count."""
        while not self._is_over:
            await asker.ask(max_tokens)
            self.num_answers[tenant] += 1
            self._changed.set()

    async def window(self, answers: int, seconds: float) -> float:
        """The uneven tenant's share from now on, of so many answers and of so much time at least."""
        before, clock = self.num_answers.copy(), asyncio.get_running_loop().time
        until = clock() + seconds
        while (self.num_answers - before).total() < answers or clock() < until:
            self._changed.clear()
            await self._changed.wait()
        counted = self.num_answers - before
        return counted["uneven"] / counted.total()

    def end(self) -> None:
        """Each asks no more than it has."""
        self._is_over = True


async def shares(
    askers: Askers, max_tokens: int, windows: Sequence[int], *, seconds: float = 0.0
) -> list[float]:
    """The uneven tenant's share in windows of so many answers each, of so many seconds at least, one after
    the other; the first one counts not, for who came first has all rows.
    """
    flood = Flood()
    tasks = [asyncio.create_task(flood.ask(*each, max_tokens)) for each in askers]
    try:
        return [await flood.window(answers, seconds) for answers in windows][1:]
    finally:
        flood.end()
        await asyncio.gather(*tasks)


def port_of(gateway: Serve) -> int:
    return int(gateway.server.url.rpartition(":")[2].split("/")[0])


def two_tenants(place: Path, engine: StandIn | RawWorker | None, *sections: str, processes: int = 1) -> Serve:
    """An engine of ours runs `SLOTS` streams in all, and processes take them as they come free."""
    rows = SLOTS * processes if isinstance(engine, StandIn) else SLOTS
    return Serve(
        place, engine, dict.fromkeys(WANTED, "weight: 1"),
        "admission: {ttft_target_ms: 0, tpot_target_ms: 0}", *sections,
        processes=processes, worker="" if isinstance(engine, RawWorker) else f"max_running: {rows}",
    )  # fmt: skip
