"""Two tenants on real processes: one has every row, the other comes, and waits for none of its streams."""

import asyncio
import json
from pathlib import Path

import pytest
from served import Server

BIG, SMALL = "sk-big-tenant-0000000001", "sk-small-tenant-00000002"


def config(rows: int) -> str:
    engine = {"threads": 1, "kv_memory_bytes": 1 << 28}
    engine |= {"max_running": rows} if rows else {}
    return json.dumps(
        {
            "models": [{"path": "penstock-demo-mini", "name": "tiny", "engine": engine}],
            "auth": {"keys": [BIG, SMALL]},
            "admission": {"ttft_target_ms": 0, "tpot_target_ms": 0},
        }
    )


async def answer(port: int, key: str, number: int, max_tokens: int, reads: bool = True) -> str:
    """The text of one streamed answer; empty if nobody reads it."""
    body = json.dumps(
        {
            "model": "tiny", "prompt": f"Story number {number}:", "max_tokens": max_tokens, "stream": True,
            "temperature": 0, "ignore_eos": True,
        }
    )  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        if not reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(3600)
        data = await reader.read()
    finally:
        writer.close()
    assert b" 200 " in data.split(b"\r\n", 1)[0], data[:500]
    assert b"[DONE]" in data
    lines = (line[6:] for line in data.split(b"\n") if line.startswith(b"data: {"))
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


async def beside_a_flood(port: int, streams: int, tokens: int) -> None:
    alone = [await answer(port, BIG, number, tokens) for number in range(2)]
    flood = [asyncio.create_task(answer(port, BIG, number, tokens)) for number in range(streams)]
    await asyncio.sleep(0.3)
    for number in range(4):
        await answer(port, SMALL, number, 4)
        assert not any(task.done() for task in flood), "it waited for a whole stream"
    texts = await asyncio.gather(*flood)
    assert texts[:2] == alone, "what yields its row continues with the same tokens"


@pytest.mark.parametrize(("rows", "processes", "tokens"), [(16, 1, 600), (16, 2, 600), (0, 1, 250)])
def test_a_tenant_that_arrives_waits_for_no_stream_of_another(
    tmp_path: Path, rows: int, processes: int, tokens: int
) -> None:
    file = tmp_path / "config.json.yaml"
    file.write_text(config(rows))
    server = Server(tmp_path, "-c", str(file), "--port", "0", "--processes", str(processes))
    try:
        server.wait_ready()
        port = int(server.url.split(":")[2].split("/")[0])
        asyncio.run(beside_a_flood(port, rows or 64, tokens))
    finally:
        server.close()
