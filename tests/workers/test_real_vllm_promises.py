"""Promises to tenants whose model a real vLLM computes, behind `penstock serve` with two gateway processes:
those that stand-ins are asked in tests/cli.
"""

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from doors import PROCESSES, TENANTS, doors_of
from free_port import free_port
from http_answers import Answer, begin, talk
from served import PATIENCE_S, Server

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]
ADMIN = "sk-the-operators-key-0003"
ROWS = 16
"""Of the vLLM, as far as the gateways go: half for each process."""
CHATS = "/v1/chat/completions"


@contextmanager
def served(place: Path, port: int, workers: int, *models: str) -> Iterator[Server]:
    """Two gateway processes which know so many workers, all ready."""
    file = place / "penstock.yaml"
    file.write_text(
        f"server: {{port: {port}, trust_local: true, processes: {PROCESSES}}}\n"
        f"auth: {{keys: [{', '.join(TENANTS)}], admin_keys: [{ADMIN}]}}\n"
        "admission: {ttft_target_ms: 0, tpot_target_ms: 0, targets: []}\n"
        f"ledger: {{directory: {place / 'ledger'}}}\n"
        "models:\n" + "".join(f"  - {each}\n" for each in models)
    )
    server = Server(place, "-c", str(file))
    try:
        server.wait_ready()
        for door in doors_of(server):
            server.until(lambda door=door: num_ready(door) == workers, "not all workers are ready")
            door.close()
        yield server
    finally:
        server.close()


def num_ready(door: Any) -> int:
    """Workers that are ready, as that process sees it."""
    reported = door.get("/admin/workers", {"authorization": f"Bearer {ADMIN}"})
    return sum(worker["state"] == "ready" for worker in json.loads(reported.body)["workers"])


def of_vllm(model: Path, url: str) -> str:
    """A model of which a vLLM computes everything."""
    worker = f"{{url: '{url}', engine: vllm, served_model: served, max_model_len: 2048, max_running: {ROWS}}}"
    return f"{{path: {model}, name: m, replicas: 0, workers: [{worker}]}}"


def chat(number: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "m", "messages": [{"role": "user", "content": f"Story number {number}, please."}],
        "max_tokens": max_tokens, "ignore_eos": True, **more,
    }  # fmt: skip


def stream(number: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    return chat(number, max_tokens, stream=True, stream_options={"include_usage": True}, **more)


def ledger(place: Path, columns: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(place / "ledger" / "usage.sqlite")) as database:
        return database.execute(f"SELECT {columns} FROM usage").fetchall()


def test_a_tenant_that_arrives_waits_for_no_stream_of_another(
    tmp_path: Path, vllm_url: str, model_28m: Path
) -> None:
    with served(tmp_path, port := free_port(), 1, of_vllm(model_28m, vllm_url)):
        flood = [Answer() for _ in range(2 * ROWS)]
        with ThreadPoolExecutor(len(flood)) as pool:
            for number, answer in enumerate(flood):
                pool.submit(talk, port, CHATS, stream(number, 600), TENANTS[0], answer)
            deadline = time.monotonic() + PATIENCE_S
            while sum(answer.begun.is_set() for answer in flood) < ROWS - 2 * PROCESSES:
                assert time.monotonic() < deadline, "its streams do not begin"
                time.sleep(0.01)
            for number in range(4):
                answer = talk(port, CHATS, stream(number, 4), TENANTS[1])
                assert answer.usage["completion_tokens"] == 4
                assert not any(each.ended.is_set() for each in flood), "it waited for a whole stream"
        assert [answer.usage["completion_tokens"] for answer in flood] == [600] * len(flood)


def test_a_worker_of_ours_continues_the_streams_of_a_vllm_that_is_killed(
    tmp_path: Path, model_28m: Path, start_vllm: Any
) -> None:
    with start_vllm() as (url, vllm):
        vllm_worker = f"{{url: '{url}', engine: vllm, served_model: served, max_model_len: 2048}}"
        both = f"{{path: {model_28m}, name: m, engine: {{threads: 1}}, workers: [{vllm_worker}]}}"
        with served(tmp_path, port := free_port(), 2, both) as server:
            exact, num_sent = Answer(), 0
            while "x-penstock-migration" not in exact.headers:  # Until the router has chosen the vLLM.
                exact = Answer(asked={"x-penstock-migration": "exact"})
                begin(port, CHATS, stream(num_sent, 1900), TENANTS[0], exact)
                num_sent += 1
            found = list[Answer]()
            while len(found) < 2:
                one = begin(port, CHATS, stream(num_sent, 1900), TENANTS[num_sent % 2])
                num_sent += 1
                if one.headers.get("x-penstock-migration") == "approximate":
                    found.append(one)
            assert exact.headers["x-penstock-migration"] == "none"
            assert not any(each.ended.is_set() for each in [*found, exact])
            os.killpg(vllm.pid, signal.SIGKILL)
            vllm.wait()
            for each in [*found, exact]:
                assert each.ended.wait(PATIENCE_S)
            for each in found:
                assert (each.last, each.usage["completion_tokens"]) == ("[DONE]", 1900)
                assert each.facts["migrated"] == "approximate"
            assert json.loads(exact.last)["error"]["code"] == "stream_broken"
            server.process.send_signal(signal.SIGINT)
            assert server.wait_ended() == 0
    rows = ledger(tmp_path, "attempts, outcome, completion_tokens")
    assert len(rows) == num_sent, "each counts once"
    moved = [row[1:] for row in rows if row[0] > 1]  # Some that a busy vLLM began too slowly are among them.
    assert moved.count(("finished", 1900)) >= len(found)


def test_a_second_sigterm_settles_what_clients_got(tmp_path: Path, vllm_url: str, model_28m: Path) -> None:
    with served(tmp_path, port := free_port(), 1, of_vllm(model_28m, vllm_url)) as server:
        keys = [*TENANTS] * 3
        streams = [begin(port, CHATS, stream(i, 1900, logprobs=True), key) for i, key in enumerate(keys)]
        server.until(lambda: all(each.tokens > 40 for each in streams), "no tokens")
        server.process.send_signal(signal.SIGTERM)
        server.wait_said("requests are served for 10 s more")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 130
        for each in streams:
            assert each.ended.wait(PATIENCE_S)
            assert json.loads(each.last)["error"]["code"] == "draining"
    rows = ledger(tmp_path, "outcome, error, completion_tokens")
    assert {row[:2] for row in rows} == {("failed", "Draining")}
    assert sorted(row[2] for row in rows) == sorted(each.tokens for each in streams)


def test_tenants_share_it_evenly_however_their_connections_are_spread(
    tmp_path: Path, vllm_url: str, model_28m: Path
) -> None:
    """One of them has all of its connections at one process."""
    with served(tmp_path, port := free_port(), 1, of_vllm(model_28m, vllm_url)) as server:
        share = asyncio.run(share_of(server, port))
    assert share == pytest.approx(0.5, abs=0.05)


async def share_of(server: Server, port: int) -> float:
    """Of the second tenant."""
    doors = doors_of(server)
    names = [door.process for door in doors]
    for door in doors:
        door.close()
    wanted = {TENANTS[0]: dict.fromkeys(names, 16), TENANTS[1]: {names[0]: 16, names[1]: 2}}
    connections: list[tuple[str, asyncio.StreamReader, asyncio.StreamWriter]] = []
    for key, missing in wanted.items():
        while any(missing.values()):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            process = (await ask(reader, writer, key, 1))["id"].partition("-")[2][:16]
            name = next(each for each in names if each.endswith(process))
            if missing[name]:
                missing[name] -= 1
                connections.append((key, reader, writer))
            else:
                writer.close()
    counted, is_over = dict.fromkeys(TENANTS, 0), asyncio.Event()

    async def keep_asking(key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not is_over.is_set():
            await ask(reader, writer, key, 16)
            counted[key] += not is_over.is_set()
            if sum(counted.values()) >= 500:
                is_over.set()

    tasks = [asyncio.create_task(keep_asking(*each)) for each in connections]
    while sum(counted.values()) < 120:
        await asyncio.sleep(0.01)
    before = dict(counted)
    await asyncio.gather(*tasks)
    for _, _, writer in connections:
        writer.close()
    grown = {key: counted[key] - before[key] for key in TENANTS}
    return grown[TENANTS[1]] / sum(grown.values())


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, max_tokens: int
) -> dict[str, Any]:
    """One answer on a connection that stays."""
    body = json.dumps(chat(0, max_tokens))
    head = f"POST {CHATS} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
    length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
    return json.loads(await reader.readexactly(length))
