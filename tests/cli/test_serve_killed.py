"""Kill -9 of a real gateway under load: every answer that a client saw begin has its one record, and what was
spent stays spent.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from free_port import free_port
from stand_in_thread import MODEL, Serve, stand_in_engine

from penstock import rng
from penstock.bench.client import CannotConnect, EndpointError
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import decode_chat_event
from penstock.protocol.stream import EventReader

pytestmark = pytest.mark.timeout(240)

NUM_REQUESTS, KILLS, CLIENTS = 120, 2, 8
TENANT = "acme"
MICROS = 10
"""What a token costs, in millionths: 10 a million."""


@dataclass(slots=True)
class Seen:
    """What a client saw of one request."""

    started: bool = False
    ended: bool = False
    usage: UsageBody | None = None
    reader: EventReader = field(default_factory=EventReader)

    def on_bytes(self, data: bytes) -> None:
        for event in self.reader.feed(data):
            if event == b"[DONE]":
                self.ended = True
                continue
            self.started = True
            self.usage = decode_chat_event(event).usage or self.usage


def body_of(name: str, max_tokens: int) -> bytes:
    options = {"include_usage": True}
    fields = {
        "prompt": "hello",
        "user": name,
        "stream": True,
        "stream_options": options,
        "max_tokens": max_tokens,
    }
    return msgspec.json.encode({"model": MODEL, **fields})


async def client_of(gateway: Serve, numbers: Iterator[int], seen: dict[str, Seen], random) -> None:
    """Ask one request after the other, each once, whatever becomes of it."""
    client = gateway.client(TENANT, fresh=True)
    for number in numbers:
        name = f"r{number:03}"
        one, body = Seen(), body_of(name, random.randint(1, 60))
        while True:
            try:
                await client.post("/completions", body, one)
            except CannotConnect:
                await asyncio.sleep(0.02)  # Nobody is there, so nothing was sent.
                continue
            except EndpointError:
                pass  # It was killed meanwhile.
            break
        seen[name] = one
    await client.close()


async def run(gateway: Serve, seed: int) -> dict[str, Seen]:
    """All requests, with kills between them."""
    seen: dict[str, Seen] = {}
    random, numbers = rng.stream(seed, "requests"), iter(range(NUM_REQUESTS))
    asking = [asyncio.create_task(client_of(gateway, numbers, seen, random)) for _ in range(CLIENTS)]
    for goal in sorted(rng.stream(seed, "kills").sample(range(10, NUM_REQUESTS - 30), KILLS)):
        while len(seen) < goal:
            await asyncio.sleep(0.002)
        await asyncio.to_thread(gateway.kill)
        gateway.start()
    await asyncio.gather(*asking)
    return seen


def records(directory: Path) -> list[tuple]:
    connection = sqlite3.connect(directory / "usage.sqlite")
    columns = "user, outcome, recovered, prompt_tokens, completion_tokens, cost_micros"
    rows = connection.execute(f"SELECT {columns} FROM usage").fetchall()
    connection.close()
    return rows


def compare(seen: dict[str, Seen], rows: list[tuple]) -> None:
    """What clients saw is what the records say."""
    found = {row[0]: row[1:] for row in rows}
    assert len(found) == len(rows), "a request has two records"
    assert found.keys() <= seen.keys()
    assert {name for name, one in seen.items() if one.started} <= found.keys()
    assert sum(one.ended for one in seen.values()) > NUM_REQUESTS // 2
    for name, (outcome, recovered, prompt, completion, cost) in found.items():
        one = seen[name]
        assert cost == MICROS * (prompt + completion)
        if one.ended:
            assert one.usage is not None
            reported = one.usage.prompt_tokens, one.usage.completion_tokens
            assert (outcome, recovered, prompt, completion) == ("finished", 0, *reported), name
    assert any(recovered for _, recovered, *_ in found.values()), "nobody was cut off"


async def begun(gateway: Serve, names: list[str], *, then: Callable[[], None]) -> None:
    """Open these streams at once, and call `then` when all of them have begun."""
    seen = [Seen() for _ in names]
    clients = [gateway.client(TENANT, fresh=True) for _ in names]
    asking = [
        asyncio.create_task(client.post("/completions", body_of(name, 2_000), one))
        for client, name, one in zip(clients, names, seen, strict=True)
    ]
    while not all(one.started for one in seen):
        assert not any(task.done() for task in asking)
        await asyncio.sleep(0.01)
    await asyncio.to_thread(then)
    await asyncio.gather(*asking, return_exceptions=True)
    for client in clients:
        await client.close()


def spoil(ledger: Path, name: str) -> None:
    """Flip a bit of the journal in the record that was written when this user's request was accepted."""
    (path,) = ledger.glob("journal/*/00000001.seg")
    data = bytearray(path.read_bytes())
    data[data.index(name.encode())] ^= 1
    path.write_bytes(data)


def test_one_flipped_bit_in_the_journal_costs_one_record(tmp_path: Path) -> None:
    """Four open requests, kill -9, and the record of the second is damaged: the other three are recovered."""
    ledger, names = tmp_path / "ledger", [f"open{i}" for i in range(4)]
    with stand_in_engine(step_s=0.02) as engine, contextlib.ExitStack() as stack:
        gateway = Serve(
            tmp_path / "gateway", engine, {TENANT: "tier: ''"}, f"ledger: {{directory: {ledger}}}"
        )
        stack.callback(gateway.kill)
        gateway.server.wait_ready()
        asyncio.run(begun(gateway, names, then=gateway.kill))
        spoil(ledger, names[1])
        gateway.start()
        gateway.server.wait_ready()
        rows = records(ledger)
        said = gateway.server.err.read_text()
    assert sorted(row[0] for row in rows) == [names[0], *names[2:]]
    assert all((outcome, recovered) == ("failed", 1) for _, outcome, recovered, *_ in rows)
    assert len(list(ledger.glob("damaged/*-00000001.seg"))) == 1
    assert "part of the ledger's journal is unreadable" in said


async def is_let_in(gateway: Serve) -> bool:
    """One more request; False: its budget does not allow it."""
    client = gateway.client(TENANT, fresh=True)
    response = await client.post("/completions", body_of("after", 1))
    await client.close()
    assert response.status == 200 or (response.status == 429 and b"insufficient_quota" in response.body), (
        response
    )
    return response.status == 200


def test_every_request_that_began_has_one_record_and_the_budget_knows_of_it(tmp_path: Path) -> None:
    port, ledger = free_port(), tmp_path / "ledger"
    prices = (
        f"prices: {{models: [{{model: '*', input: {MICROS}, cached_input: {MICROS}, output: {MICROS}}}]}}"
    )
    with stand_in_engine(step_s=0.002) as engine, contextlib.ExitStack() as stack:
        free_of_charge = {TENANT: "budget_per_month: 1000"}
        sections = (prices, f"ledger: {{directory: {ledger}}}")
        gateway = Serve(tmp_path / "gateway", engine, free_of_charge, *sections, port=port)
        stack.callback(gateway.kill)
        gateway.server.wait_ready()
        seen = asyncio.run(run(gateway, seed=1))
        gateway.kill()
        gateway.start()  # It recovers what those before it left.
        gateway.server.wait_ready()
        rows = records(ledger)
        compare(seen, rows)
        # The budget of the one that runs now is what the ledger has: a little more lets one request through,
        # no more does not.
        spent = sum(row[-1] for row in rows)
        for allowed, expected in ((spent, False), (spent + 1000, True)):
            gateway.reload({TENANT: f"budget_per_month: {allowed / 1e6:.6f}"})
            assert asyncio.run(is_let_in(gateway)) is expected
