"""A scripted OpenAI endpoint: answers by the book, or misbehaves on purpose.

For the tests of `bench` and `chat`, and for measuring what the load generator itself costs
(`python tests/doubles/scripted_endpoint.py --port 9000`). It generates nothing; it plays a script.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from penstock.clock import sleep

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 16 * 1024 * 1024
END: dict[str, object] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@dataclass(slots=True, frozen=True, kw_only=True)
class Script:
    """How the endpoint behaves."""

    words: tuple[str, ...] = ("The", " pipe", " brings", " water", ".")
    """The answer, a word per token; repeated up to `max_tokens` if the request ignores EOS."""
    first_s: float = 0.0
    """Wait before the first token."""
    gap_s: float = 0.0
    """Wait between tokens."""
    key: str = ""
    """Refuse other keys with 401."""
    refuse_status: int = 0
    """Refuse every chat request with this status."""
    refuse_message: str = "refused by the script"
    refuse_first: int = 0
    """Refuse only so many of them; 0: all."""
    retry_after_s: int = 0
    """The time to come back that refusals name; 0: nothing."""
    cut_after: int | None = None
    """Close the connection after this many tokens."""
    error_after: int | None = None
    """Send an error event after this many tokens."""
    usage: bool = True
    models: tuple[str, ...] = ("scripted",)


@dataclass(slots=True)
class StandIn:
    """The server.

    `requests` are the chat requests that it has read, `hung_up` those whose client left early.
    """

    script: Script = field(default_factory=Script)
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    hung_up: int = 0
    connections: int = 0
    _open: dict["asyncio.Task[Any]", asyncio.StreamWriter] = field(
        default_factory=dict["asyncio.Task[Any]", asyncio.StreamWriter]
    )

    @contextlib.asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncGenerator[str]:
        """Serve on loopback inside the block; gives the base URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=HEAD_BYTES_MAX)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()
            for writer in self._open.values():
                writer.transport.abort()
            await asyncio.gather(*self._open)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = int(_header(head, "content-length") or "0")
                body = await reader.readexactly(min(length, BODY_BYTES_MAX))
                key = _header(head, "authorization").removeprefix("Bearer ")
                if not await self._answer(head.split(" ", 2)[1], key, body, writer):
                    break
        writer.close()
        del self._open[task]

    async def _answer(self, path: str, key: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False closes the connection."""
        script = self.script
        if script.key and key != script.key:
            _reply(writer, 401, _error("Incorrect API key provided."))
        elif path == "/v1/models":
            cards = [{"id": name, "object": "model"} for name in script.models]
            _reply(writer, 200, {"object": "list", "data": cards})
        elif path != "/v1/chat/completions":
            _reply(writer, 404, _error(f"there is no {path}"))
        else:
            self.requests.append(request := msgspec.json.decode(body))
            if script.refuse_status and len(self.requests) <= (script.refuse_first or len(self.requests)):
                headers = f"retry-after: {script.retry_after_s}\r\n" if script.retry_after_s else ""
                _reply(writer, script.refuse_status, _error(script.refuse_message), headers)
            elif request.get("stream"):
                try:
                    return await self._stream(request, writer)
                except ConnectionError:
                    self.hung_up += 1
                    return False
            else:
                tokens = self._tokens(request)
                choice = {
                    "message": {"role": "assistant", "content": "".join(tokens)},
                    "finish_reason": "stop",
                }
                _reply(writer, 200, {"choices": [choice], **self._usage(request, len(tokens))})
        await writer.drain()
        return True

    def _tokens(self, request: dict[str, Any]) -> list[str]:
        words, words_max = self.script.words, request.get("max_tokens")
        if request.get("ignore_eos"):
            return [words[place % len(words)] for place in range(words_max or len(words))]
        return list(words[:words_max])

    def _usage(self, request: dict[str, Any], num_tokens: int) -> dict[str, object]:
        if not self.script.usage:
            return {}
        prompt = sum(len(message["content"].split()) + 4 for message in request["messages"])
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": num_tokens}}

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        script, tokens = self.script, self._tokens(request)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place, token in enumerate(tokens):
            if place == script.cut_after:
                return False
            if place == script.error_after:
                _event(writer, _error("the script says so"))
                break
            await sleep(script.gap_s if place else script.first_s)
            _event(writer, {"choices": [{"delta": {"content": token}}]})
            await writer.drain()
        else:
            _event(writer, END)
            _event(writer, {"choices": [], **self._usage(request, len(tokens))})
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _header(head: str, name: str) -> str:
    """A header of our own client's, which writes them in lower case."""
    return head.partition(f"\r\n{name}: ")[2].partition("\r\n")[0]


def _error(message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "scripted_error", "code": None}}


def _reply(writer: asyncio.StreamWriter, status: int, answer: object, headers: str = "") -> None:
    body = msgspec.json.encode(answer)
    head = (
        f"HTTP/1.1 {status} Scripted\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{headers}\r\n"
    )
    writer.write(head.encode() + body)


def _event(writer: asyncio.StreamWriter, event: object) -> None:
    _chunk(writer, b"data: " + msgspec.json.encode(event) + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _main(port: int) -> None:
    async with StandIn().listening(port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python tests/doubles/scripted_endpoint.py")
    _parser.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_main(_parser.parse_args().port))
