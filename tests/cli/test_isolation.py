"""Tenants on real processes: one has every row, or does not read what it asked for, or there are more of them
than rows; another one comes, and waits for none of their streams. Our engine takes a row back; of an engine
of others, rows are kept free.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from provider_process import ProviderProcess
from served import Server

pytestmark = pytest.mark.timeout(180)

BIG, SMALL = "sk-big-tenant-0000000001", "sk-small-tenant-00000002"
CROWD = [f"sk-one-of-a-crowd-{number:07}" for number in range(24)]
DEAF, LONG = 24, 2000
ANSWER_S_MAX = 10.0


def ours(rows: int) -> dict[str, object]:
    """What the configuration says of a worker that is launched."""
    engine = {"threads": 1, "kv_memory_bytes": 1 << 28}
    return {"engine": engine | {"max_running": rows} if rows else engine}


def of_others(provider: ProviderProcess, rows: int) -> dict[str, object]:
    """The same of an external one."""
    facts = {"engine": provider.engine, "served_model": "served", "max_model_len": 2048, "max_running": rows}
    return {"replicas": 0, "workers": [{"url": provider.url, **facts}]}


def config(worker: dict[str, object]) -> str:
    return json.dumps(
        {
            "models": [{"path": "penstock-demo-mini", "name": "tiny", **worker}],
            "auth": {"keys": [BIG, SMALL, *CROWD]},
            "admission": {"ttft_target_ms": 0, "tpot_target_ms": 0},
        }
    )


async def answer(
    port: int,
    key: str,
    number: int,
    max_tokens: int,
    begun: asyncio.Event | None = None,
    *,
    is_deaf: bool = False,
) -> str:
    """The text of one streamed answer; `begun` is set at its first event. With `is_deaf` nobody reads on."""
    body = json.dumps(
        {
            "model": "tiny", "prompt": f"Story number {number}:", "max_tokens": max_tokens, "stream": True,
            "temperature": 0, "seed": 3, "ignore_eos": True,
        }
    )  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    if is_deaf:  # Else the kernel would take all of it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    try:
        writer.write((head + body).encode())
        data = await reader.readuntil(b"data: ")
        if begun is not None:
            begun.set()
        if is_deaf:
            await asyncio.Event().wait()
        data += await reader.read()
    finally:
        writer.close()
    assert b" 200 " in data.split(b"\r\n", 1)[0], data[:500]
    assert b"[DONE]" in data
    lines = (line[6:] for line in data.split(b"\n") if line.startswith(b"data: {"))
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


async def beside_a_flood(port: int, streams: int, tokens: int) -> None:
    alone = await asyncio.gather(*(answer(port, BIG, number, tokens) for number in range(2)))
    flood = [asyncio.create_task(answer(port, BIG, number, tokens)) for number in range(streams)]
    await asyncio.sleep(0.3)
    for number in range(4):
        await answer(port, SMALL, number, 4)
        assert not any(task.done() for task in flood), "it waited for a whole stream"
    texts = await asyncio.gather(*flood)
    assert texts[:2] == alone, "what yields its row continues with the same tokens"


async def beside(port: int, keys: list[str], *, are_deaf: bool) -> None:
    """Long streams of others run, one for each of the keys, and a tenant asks."""
    begun = [asyncio.Event() for _ in keys]
    tasks = [
        asyncio.create_task(answer(port, key, i, LONG, begun[i], is_deaf=are_deaf))
        for i, key in enumerate(keys)
    ]
    try:
        await asyncio.gather(*(each.wait() for each in begun))
        for number in range(4):
            async with asyncio.timeout(ANSWER_S_MAX):  # Deaf streams have no end that could be waited for.
                await answer(port, SMALL, number, 4)
            assert not any(task.done() for task in tasks), "it waited for a whole stream"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def beside_everything(port: int, streams: int, tokens: int) -> None:
    await beside_a_flood(port, streams, tokens)
    await beside(port, [BIG] * DEAF, are_deaf=True)
    if streams < len(CROWD):
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


@pytest.mark.parametrize(("rows", "processes", "tokens"), [(16, 2, 400), (0, 1, 250)])
def test_a_tenant_that_arrives_waits_for_no_stream_of_another(
    tmp_path: Path, rows: int, processes: int, tokens: int
) -> None:
    attacked(tmp_path, ours(rows), processes, lambda port: beside_everything(port, rows or 64, tokens))


@pytest.mark.parametrize(("engine", "processes"), [("openai", 1), ("vllm", 2)])
def test_nor_does_it_at_an_engine_of_others_which_takes_no_row_back(
    tmp_path: Path, engine: str, processes: int
) -> None:
    with ProviderProcess(engine, rows=16) as provider:
        provider.behaves(step_s=0.004)
        attacked(tmp_path, of_others(provider, 16), processes, lambda port: beside_a_flood(port, 16, 250))
