"""The last words of a server that stops: what waits at its socket is answered before that closes."""

import asyncio
import json
import socket

from penstock.clock import SystemClock
from penstock.config.tree import ServerConfig
from penstock.gateway.http.server import refuse_the_rest

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}"


def answer(client: socket.socket) -> tuple[bytes, dict]:
    data = b""
    while piece := client.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return head, json.loads(body)


def test_who_waits_at_the_socket_is_answered_and_then_it_is_closed() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    address = listener.getsockname()
    clients = [socket.create_connection(address, timeout=20) for _ in range(40)]
    asked, late, silent = clients[:20], clients[20:39], clients[39]
    for client in asked:
        client.sendall(REQUEST)

    async def stop() -> None:
        stopping = asyncio.create_task(refuse_the_rest([listener], ServerConfig(), SystemClock()))
        await asyncio.sleep(0)
        for client in late:
            client.sendall(REQUEST[:20])
            await asyncio.sleep(0)
            client.sendall(REQUEST[20:])
        await stopping

    asyncio.run(stop())
    for client in (*asked, *late):
        head, body = answer(client)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in head.lower()
        assert body["error"]["code"] == "draining"
    assert silent.recv(1) == b"", "who said nothing is told nothing"
    with socket.socket() as probe:
        assert probe.connect_ex(address) != 0, "nobody listens any more"
    for client in clients:
        client.close()
