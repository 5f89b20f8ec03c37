"""A real gateway process without free file descriptors: newcomers get an answer, and what runs goes on."""

import asyncio
import contextlib
import json
import os
import resource
import socket
from pathlib import Path

import msgspec
import pytest
from stand_in_thread import MODEL, Serve, stand_in_engine

from penstock.bench.client import ApiAddress
from penstock.protocol.server_answers import decode_chat_event
from penstock.protocol.stream import EventReader

pytestmark = pytest.mark.timeout(120)
TENANT = "acme"
FILES = 160


class Stream:
    """What a client saw of an answer."""

    def __init__(self) -> None:
        self.tokens, self.ended, self.reader = 0, False, EventReader()
        self.began = asyncio.Event()

    def on_bytes(self, data: bytes) -> None:
        for event in self.reader.feed(data):
            self.began.set()
            self.ended = self.ended or event == b"[DONE]"
            if event != b"[DONE]" and (usage := decode_chat_event(event).usage) is not None:
                self.tokens = usage.completion_tokens or 0


def body_of(max_tokens: int) -> bytes:
    options = {"include_usage": True}
    fields = {"prompt": "a", "stream": True, "stream_options": options, "max_tokens": max_tokens}
    return msgspec.json.encode({"model": MODEL, **fields})


def answer_of(at: ApiAddress) -> tuple[int, bytes, dict]:
    """Status, head and body of a request on a connection of its own."""
    with socket.create_connection((at.host, at.port), timeout=20) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        data = b""
        while piece := wire.recv(65536):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)


def test_without_free_files_newcomers_get_503_and_streams_go_on(tmp_path: Path) -> None:
    with stand_in_engine(step_s=0.01) as engine, contextlib.ExitStack() as stack:
        gateway = Serve(tmp_path, engine, {TENANT: "tier: ''"}, "ledger: {enabled: false}")
        stack.callback(gateway.kill)
        gateway.server.wait_ready()
        at, pid = ApiAddress.parse(gateway.server.url), gateway.server.process.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))

        def crowd() -> None:
            """More connections than there are files; each is held or answered, none is dropped in silence."""
            waiting = [
                stack.enter_context(socket.create_connection((at.host, at.port), timeout=20))
                for _ in range(2 * FILES)
            ]
            refused = waiting[-1].recv(65536)
            assert refused.startswith(b"HTTP/1.1 503 "), refused
            for _ in range(3):
                status, head, body = answer_of(at)
                assert status == 503
                assert b"\r\nretry-after: 1" in head
                assert body["error"]["code"] == "overloaded"
            assert len(os.listdir(f"/proc/{pid}/fd")) <= FILES
            for wire in waiting:
                wire.close()

        async def main() -> Stream:
            client, stream = gateway.client(TENANT), Stream()
            asking = asyncio.create_task(client.post("/completions", body_of(500), stream))
            await stream.began.wait()
            await asyncio.to_thread(crowd)
            await asking
            await client.close()
            return stream

        stream = asyncio.run(main())
        assert (stream.ended, stream.tokens) == (True, 500)
        while answer_of(at)[0] != 200:  # Until the closed connections are gone.
            pass
