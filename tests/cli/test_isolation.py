"""Tenants on real processes: one has every row, or does not read what it asked for, or there are more of them
than rows; another one comes, and waits for none of their streams. Our engine takes a row back; of an engine
of others, rows are kept free.

Those streams are so long that none ends: how fast the machine is decides nothing. What they have said by the
time that the other one was answered is compared, and they are cut off. Of those that nobody reads the engine
says itself that they still run.
"""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest
from provider_process import ProviderProcess
from served import Server

pytestmark = pytest.mark.timeout(180)

BIG, SMALL = "sk-big-tenant-0000000001", "sk-small-tenant-00000002"
CROWD = [f"sk-one-of-a-crowd-{number:07}" for number in range(24)]
LONG, LONG_ELSEWHERE = 4000, 30_000
"""Tokens: nearly a context of the demo model; of an engine of others, ten minutes."""
ELSEWHERE_S = 0.02
PATIENCE_S = 60.0
"""Only bounds a test that fails: what is proven is that the streams run when an answer has come."""


def ours(rows: int) -> dict[str, object]:
    """What the configuration says of a worker that is launched."""
    engine = {"threads": 1, "kv_memory_bytes": 1 << 28}
    return {"engine": engine | {"max_running": rows} if rows else engine}


def of_others(provider: ProviderProcess, rows: int) -> dict[str, object]:
    """The same of an external one."""
    facts = {
        "engine": provider.engine,
        "served_model": "served",
        "max_model_len": 32_768,
        "max_running": rows,
    }
    return {"replicas": 0, "workers": [{"url": provider.url, **facts}]}


def config(worker: dict[str, object]) -> str:
    return json.dumps(
        {
            "server": {"trust_local": True},
            "models": [{"path": "penstock-demo-mini", "name": "tiny", **worker}],
            "auth": {"keys": [BIG, SMALL, *CROWD]},
            "admission": {"ttft_target_ms": 0, "tpot_target_ms": 0},
        }
    )


class Stream:
    """One streamed answer: `text` is what it has said by now."""

    def __init__(self, port: int, key: str, number: int, max_tokens: int, *, is_deaf: bool = False) -> None:
        """With `is_deaf` nobody reads beyond its first event."""
        self.text = ""
        self._is_deaf = is_deaf
        self._said = asyncio.Event()
        self.task = asyncio.create_task(self._run(port, key, number, max_tokens))
        self.task.add_done_callback(lambda _: self._said.set())

    async def until(self, length: int) -> None:
        """Returns when it has said more than `length` characters; fails if it ends before, as it did."""
        while len(self.text) <= length:
            if self.task.done():
                await self.task
                raise AssertionError(f"it has ended: {self.text!r}")
            self._said.clear()
            await self._said.wait()

    async def _run(self, port: int, key: str, number: int, max_tokens: int) -> None:
        body = json.dumps(
            {
                "model": "tiny", "prompt": f"Story number {number}:", "max_tokens": max_tokens,
                "temperature": 0, "seed": 3, "ignore_eos": True, "stream": True,
            }
        )  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", port))
        if self._is_deaf:  # Else the kernel would take all of it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        try:
            writer.write((head + body).encode())
            status = await reader.readline()
            assert b" 200 " in status, status + await reader.read(500)
            while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                assert line, "it broke off"
                assert b"error" not in line, line
                if line.startswith(b"data: {"):
                    self.text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                    self._said.set()
                    if self._is_deaf:
                        await asyncio.Event().wait()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running(streams: Sequence[Stream]) -> AsyncIterator[None]:
    """They are cut off at the end."""
    try:
        yield
    finally:
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def said_alone(port: int, number: int, length: int, tokens: int) -> str:
    """So many characters of an answer while no other tenant asks."""
    stream = Stream(port, SMALL, number, tokens)
    async with running([stream]):
        await stream.until(length - 1)
    return stream.text[:length]


async def small_is_served(port: int, streams: Sequence[Stream]) -> None:
    """Four requests of the small tenant are answered, and none of the streams has ended by then."""
    for number in range(4):
        async with asyncio.timeout(PATIENCE_S):
            await Stream(port, SMALL, number, 4).task
        assert not any(stream.task.done() for stream in streams), "it waited for a whole stream"


async def are_at_the_engine(port: int, streams: int) -> None:
    """So many run there, or have yielded their rows: the engine waits for no reader, and what has ended has
    left it. Its figures come twice a second; after three changes each process has some that are younger than
    the last answer.
    """
    steps = set[float]()
    async with asyncio.timeout(PATIENCE_S):  # An engine with nothing to do makes no steps.
        while len(steps) < 4:
            figures = await asyncio.to_thread(engine_figures, port)
            steps.add(figures["steps_total"])
            await asyncio.sleep(0.1)
    assert figures["running"] + figures["waiting"] >= streams, "it waited for a whole stream"


def engine_figures(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        text = page.read().decode()
    found = re.findall(r'^penstock_engine_(\w+)\{model="tiny"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def beside_a_flood(port: int, streams: int, rows: int, tokens: int) -> None:
    """One tenant's streams have every row that a tenant can have, `rows`."""
    flood = [Stream(port, BIG, number, tokens) for number in range(streams)]
    async with running(flood):
        begun = [asyncio.ensure_future(stream.until(0)) for stream in flood]
        for _, first in zip(range(rows), asyncio.as_completed(begun), strict=False):
            await first
        await small_is_served(port, flood)
        going_on = [stream for stream in flood if stream.text]
        await asyncio.gather(*(stream.until(len(stream.text)) for stream in going_on))
    said = {number: stream.text for number, stream in enumerate(flood) if stream.text}
    asked = (said_alone(port, number, len(text), tokens) for number, text in said.items())
    alone = await asyncio.gather(*asked)
    assert [*said.values()] == alone, "what yields its row continues with the same tokens"


async def beside(port: int, keys: list[str], *, are_deaf: bool) -> None:
    """Long streams of others run, one for each of the keys, and a tenant asks."""
    others = [Stream(port, key, number, LONG, is_deaf=are_deaf) for number, key in enumerate(keys)]
    async with running(others):
        await asyncio.gather(*(stream.until(0) for stream in others))
        await small_is_served(port, others)
        if are_deaf:
            await are_at_the_engine(port, len(others))


async def beside_everything(port: int, rows: int) -> None:
    """As many streams as rows: none waits until one of them has ended, which nobody would read."""
    await beside_a_flood(port, rows, rows, LONG)
    await beside(port, [BIG] * rows, are_deaf=True)
    if rows < len(CROWD):
        await beside(port, CROWD, are_deaf=False)


Attack = Callable[[int], Coroutine[None, None, None]]


def attacked(place: Path, worker: dict[str, object], processes: int, attack: Attack) -> None:
    file = place / "config.json.yaml"
    file.write_text(config(worker))
    server = Server(place, "-c", str(file), "--port", "0", "--processes", str(processes))
    try:
        server.wait_ready()
        port = int(server.url.split(":")[2].split("/")[0])
        asyncio.run(attack(port))
    finally:
        server.close()


@pytest.mark.parametrize(("rows", "processes"), [(16, 2), (0, 1)])
def test_a_tenant_that_arrives_waits_for_no_stream_of_another(
    tmp_path: Path, rows: int, processes: int
) -> None:
    attacked(tmp_path, ours(rows), processes, lambda port: beside_everything(port, rows or 64))


@pytest.mark.parametrize(("engine", "processes"), [("openai", 1), ("vllm", 2)])
def test_nor_does_it_at_an_engine_of_others_which_takes_no_row_back(
    tmp_path: Path, engine: str, processes: int
) -> None:
    """Each process keeps a row free. Three times as many streams as rows: however they fall to the processes,
    each has as many as it may start.
    """
    with ProviderProcess(engine, rows=16) as provider:
        provider.behaves(step_s=ELSEWHERE_S)
        attacked(
            tmp_path,
            of_others(provider, 16),
            processes,
            lambda port: beside_a_flood(port, 48, 16 - processes, LONG_ELSEWHERE),
        )
