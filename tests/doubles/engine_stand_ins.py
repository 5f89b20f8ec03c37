"""Servers that speak each engine's HTTP API to the letter, and can be told to misbehave.

Answers are endless and deterministic: token i of an answer with seed s is `token(s, i)`, a byte of
`byte_tokenizer`. The shapes are those of vLLM 0.32, SGLang 0.5, TGI 3, TensorRT-LLM 1.2, Triton 2.51 and
OpenAI's API.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

EOS = 256


def token(seed: int, i: int) -> int:
    """A letter, as its byte."""
    return 97 + (seed * 5 + i * i + 3 * i) % 26


def text_of(seed: int, num: int) -> str:
    return bytes(token(seed, i) for i in range(num)).decode()


class Faults:
    """How a stand-in misbehaves; nothing by default."""

    def __init__(self) -> None:
        self.status: tuple[int, dict[str, str], bytes] | None = None
        """Answer this instead of generating."""
        self.raw: bytes | None = None
        """Send these bytes instead of an answer, then close."""
        self.after: int | None = None
        """After so many tokens do what follows, instead of going on."""
        self.event: bytes | None = None
        """An event to send then."""
        self.hang = False
        self.delay_s = 0.0
        """Say nothing at all for so long."""
        self.drip = False
        """Send comments for ever instead of events."""
        self.close = False
        self.no_done = False
        self.no_usage = False
        self.usage: dict[str, Any] | None = None
        self.model = ""
        """Say that this is the model."""
        self.overrun = 0
        self.eos_after: int | None = None


class Request:
    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class StandIn:
    """One server. Subclasses speak an engine's API."""

    MODEL = "served"
    GENERATES: tuple[str, ...] = ()
    host = "127.0.0.1"

    def __init__(self, *, step_s: float = 0.0, rows: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """`rows`: answers at once; others wait for one of them to end, as in an engine whose batch is full.
        0: no limit.
        """
        self.step_s, self.faults, self._tls = step_s, Faults(), tls
        self._rows = asyncio.Semaphore(rows) if rows else contextlib.nullcontext()
        self.requests: list[Request] = []
        self.num_running = self.num_aborted = self.num_connections = 0
        self.metrics: str | None = None
        self.adapters: tuple[str, ...] = ()
        self.roots: dict[str, str] = {}
        """Where its adapters are from, where it tells."""
        self.healthy = True
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, self.host, self.port, ssl=self._tls, limit=2**24
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As a process that dies: nobody listens, every connection is reset."""
        if self._server is not None:
            self._server.close()
        self._server = None
        for _ in range(8):  # Also those that are just being accepted; and their last callbacks.
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = reader
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(Request(method, path, headers, body), writer)
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            self._writers.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            status, kind, body = self.get(request.path)
            await self.respond(writer, status, body, {"content-type": kind})
            return
        self.requests.append(request)
        await asyncio.sleep(self.faults.delay_s)
        if self.faults.raw is not None:
            writer.write(self.faults.raw)
            await writer.drain()
            writer.close()
            raise OSError
        if self.faults.status is not None:
            status, headers, body = self.faults.status
            await self.respond(writer, status, body, headers)
            return
        if request.path not in self.GENERATES:
            await self.respond(writer, 404, b'{"detail":"Not Found"}', {"content-type": "application/json"})
            return
        async with self._rows:
            self.num_running += 1
            finished = False
            try:
                await self._stream(request, writer)
                finished = True
            finally:
                self.num_running -= 1
                self.num_aborted += not finished

    async def respond(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def _stream(self, request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: "
            b"chunked\r\n\r\n"
        )

        async def send(data: bytes) -> None:
            if writer.transport.is_closing():
                raise OSError
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()

        faults, i = self.faults, 0
        async for event in self.events(request.json):
            if faults.after is not None and i >= faults.after:
                if faults.event is not None:
                    await send(faults.event)
                while faults.hang or faults.drip:
                    if faults.drip:
                        await send(b": still here\n\n")
                    elif self._writers[writer].at_eof() or writer.transport.is_closing():
                        raise OSError
                    await asyncio.sleep(0.01)
                if faults.close:
                    raise OSError
                break
            await send(b"data: %b\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode()))
            await asyncio.sleep(self.step_s)
            i += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    # --- what engines differ in ----------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, str, bytes]:
        if path == "/health":
            return (200 if self.healthy else 503), "text/plain", b""
        if path == "/v1/models":
            return 200, "application/json", json.dumps(self.models()).encode()
        if path in ("/metrics", "/prometheus/metrics") and self.metrics is not None:
            return 200, "text/plain; version=0.0.4", self.metrics.encode()
        return 404, "application/json", b'{"detail":"Not Found"}'

    def models(self) -> dict[str, Any]:
        cards = [{"id": self.MODEL, "object": "model", "parent": None, "max_model_len": 32768}]
        cards += [
            {"id": name, "object": "model", "parent": self.MODEL, "root": self.roots.get(name)}
            for name in self.adapters
        ]
        return {"object": "list", "data": cards}

    def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError

    def tokens(self, seed: int, max_tokens: int, prompt: Sequence[int] = ()) -> tuple[list[int], str]:
        """All tokens of an answer and why it ends; EOS is among them. A prompt that ends with the answer's
        first tokens is continued behind them."""
        known = [token(seed, i) for i in range(len(prompt))]
        first = next(n for n in range(len(prompt), -1, -1) if list(prompt[len(prompt) - n :]) == known[:n])
        end = self.faults.eos_after
        if end is not None and end < first + max_tokens:
            return [*(token(seed, i) for i in range(first, end)), EOS], "stop"
        return [token(seed, i) for i in range(first, first + max_tokens + self.faults.overrun)], "length"


def takes_salt(body: dict[str, Any]) -> bool:
    """As vLLM's `validate_cache_salt` does."""
    salt = body.get("cache_salt")
    return salt is None or (0 < len(salt) <= 128 and not {*"@/\\\0"} & {*salt})


class VllmStandIn(StandIn):
    GENERATES = ("/v1/completions",)
    SENDS_IDS = True
    LOADS_ADAPTERS = False
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING. A path that ends in "bad" is none that it can read."""

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        verb = request.path.removeprefix("/v1/").removesuffix("_lora_adapter")
        if self.SENDS_IDS and request.path in self.GENERATES and not takes_salt(request.json):
            body = {"error": {"message": "a bad salt", "type": "BadRequestError", "param": "cache_salt"}}
            await self.respond(writer, 400, json.dumps(body).encode(), {"content-type": "application/json"})
            return
        if not self.LOADS_ADAPTERS or verb not in ("load", "unload"):
            await super()._answer(request, writer)
            return
        self.requests.append(request)
        name, path = request.json["lora_name"], request.json.get("lora_path", "")
        if verb == "load" and (name in self.adapters or path.endswith("bad")):
            why = "has already been loaded" if name in self.adapters else f"No adapter found for {path}"
            body = {"error": {"message": f"The lora adapter '{name}': {why}", "code": 400}}
            await self.respond(writer, 400, json.dumps(body).encode(), {"content-type": "application/json"})
            return
        self.adapters = tuple(each for each in self.adapters if each != name)
        self.roots.pop(name, None)
        if verb == "load":
            self.adapters, self.roots[name] = (*self.adapters, name), path
        await self.respond(writer, 200, b"Success", {"content-type": "text/plain"})

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        seed, limit = body["seed"] or 0, body.get("logprobs")
        ids, why = self.tokens(seed, body["max_tokens"], body["prompt"] if self.SENDS_IDS else ())
        head = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": self.faults.model or body["model"],
        }
        echo = body.get("echo")
        for i, token_id in enumerate(ids):
            last = i == len(ids) - 1
            choice: dict[str, Any] = {
                "index": 0,
                "text": "" if token_id == EOS else chr(token_id),
                "logprobs": None,
                "finish_reason": why if last else None,
                "stop_reason": EOS if last and why == "stop" else None,
            }
            if self.SENDS_IDS and body.get("return_token_ids"):
                choice["token_ids"] = [token_id]
            if limit is not None:
                shown = [*(body["prompt"] if echo and i == 0 else []), token_id]
                choice["logprobs"] = self.logprobs(shown, limit, first_is_null=bool(echo) and i == 0)
            yield head | {"choices": [choice]}
        if not self.faults.no_usage:
            prompt = len(body["prompt"])
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + len(ids),
                "completion_tokens": len(ids),
            }
            usage["prompt_tokens_details"] = {"cached_tokens": 2}
            yield head | {"choices": [], "usage": self.faults.usage or usage}
        if not self.faults.no_done:
            yield b"[DONE]"

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def logprobs(self, ids: list[int], limit: int, *, first_is_null: bool) -> dict[str, Any]:
        tops = [
            {
                self.name(token_id): -0.5,
                **{self.name(97 + j): -1.0 - j for j in range(limit + 1) if 97 + j != token_id},
            }
            for token_id in ids
        ]
        tops = [dict(list(top.items())[: limit + 1]) for top in tops]
        values: list[float | None] = [-0.5] * len(ids)
        if first_is_null:
            values[0], tops[0] = None, None
        return {
            "text_offset": [0] * len(ids),
            "token_logprobs": values,
            "tokens": [self.name(token_id) for token_id in ids],
            "top_logprobs": tops,
        }


class TrtllmStandIn(VllmStandIn):
    KNOWN = frozenset(
        [
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "stream",
            "stream_options",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "detokenize",
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "priority",
        ]
    )

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        assert body.keys() <= self.KNOWN, body.keys() - self.KNOWN  # It forbids others.
        async for event in super().events(body | {"return_token_ids": not body["detokenize"]}):
            if isinstance(event, dict) and event["choices"]:
                event["choices"][0]["text"] = ""
                event["choices"][0].pop("stop_reason")
            yield event

    def name(self, token_id: int) -> str:
        return chr(token_id) if token_id != EOS else ""

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.MODEL, "object": "model", "owned_by": "tensorrt_llm"}]}


class OpenAIStandIn(VllmStandIn):
    """A provider: text only, and chats."""

    GENERATES = ("/v1/completions", "/v1/chat/completions")
    SENDS_IDS = False
    calls: list[dict[str, Any]] | None = None
    """Tool calls to answer chats with."""
    thoughts: dict[str, str] | None = None
    """What comes before a chat's text, and the name under which it does."""
    ends_with = "length"
    """The finish reason of a chat's text."""

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        if "messages" not in body:
            async for event in super().events(body):
                yield event
            return
        num = body.get("max_tokens") or body.get("max_completion_tokens") or 20
        head = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"] + "-0806",
        }

        def chunk(delta: dict[str, Any], why: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            return head | {
                "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": why}]
            }

        yield chunk({"role": "assistant", "content": "", "refusal": None})
        for name, thought in (self.thoughts or {}).items():
            yield chunk({name: thought})
        if self.calls is not None:
            for i, call in enumerate(self.calls):
                function = {"name": call["name"], "arguments": ""}
                yield chunk(
                    {
                        "tool_calls": [
                            {"index": i, "id": f"call_{i}", "type": "function", "function": function}
                        ]
                    }
                )
                for j in range(0, len(call["arguments"]), 4):
                    piece = {"arguments": call["arguments"][j : j + 4]}
                    yield chunk({"tool_calls": [{"index": i, "function": piece}]})
            why = "tool_calls"
        else:
            for i in range(num):
                logprobs = None
                if body.get("logprobs"):
                    entry = {"token": chr(token(0, i)), "logprob": -0.5, "bytes": [token(0, i)]}
                    logprobs = {"content": [entry | {"top_logprobs": [entry] * body.get("top_logprobs", 0)}]}
                yield chunk({"content": chr(token(0, i))}, None, logprobs)
            why = self.ends_with
        yield chunk({}, why)
        if not self.faults.no_usage:
            details = {"prompt_tokens_details": {"cached_tokens": 0}}
            yield head | {
                "choices": [],
                "usage": self.faults.usage or {"prompt_tokens": 77, "completion_tokens": num, **details},
            }
        if not self.faults.no_done:
            yield b"[DONE]"

    def name(self, token_id: int) -> str:
        return chr(token_id) if token_id != EOS else ""


class SglangStandIn(StandIn):
    GENERATES = ("/generate",)
    incremental = False

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        params, prompt = body["sampling_params"], body["input_ids"]
        ids, why = self.tokens(params.get("sampling_seed", 0), params["max_new_tokens"], body["input_ids"])
        wants, limit = body.get("return_logprob"), body.get("top_logprobs_num", 0)
        for i in range(len(ids)):
            last = i == len(ids) - 1
            sent = ids[i : i + 1] if self.incremental else ids[: i + 1]
            meta: dict[str, Any] = {
                "id": body["rid"],
                "finish_reason": None,
                "prompt_tokens": len(prompt),
                "completion_tokens": i + 1,
                "cached_tokens": 2,
            }
            if last:
                stop = {"type": "stop", "matched": EOS}
                meta["finish_reason"] = stop if why == "stop" else {"type": "length", "length": len(ids)}
                meta |= self.faults.usage or {}
            if wants:
                meta["output_token_logprobs"] = [[-0.5, each, None] for each in sent]
                meta["output_top_logprobs"] = [[[-1.0 - j, 97 + j, None] for j in range(limit)] for _ in sent]
                if body["logprob_start_len"] == 0:
                    meta["input_token_logprobs"] = [
                        [None if j == 0 else -0.7, each, None] for j, each in enumerate(prompt)
                    ]
                    tops = [
                        [[-1.0 - k, 97 + k, None] for k in range(limit)] if j else None
                        for j in range(len(prompt))
                    ]
                    meta["input_top_logprobs"] = tops
            text = bytes(each for each in sent if each < EOS).decode()
            yield {"text": text, "output_ids": sent, "meta_info": meta}
            if i % 32 == 31:
                await asyncio.sleep(0)
        if not self.faults.no_done:
            yield b"[DONE]"


class TgiStandIn(StandIn):
    GENERATES = ("/generate_stream",)

    def get(self, path: str) -> tuple[int, str, bytes]:
        if path == "/info":
            info = {
                "model_id": "org/checkpoint",
                "max_total_tokens": 32768,
                "max_input_tokens": 32000,
                "router": "x",
            }
            return 200, "application/json", json.dumps(info).encode()
        return super().get(path)

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        parameters = body["parameters"]
        ids, why = self.tokens(parameters.get("seed", 0), parameters["max_new_tokens"])
        for i, token_id in enumerate(ids):
            shown = {"id": token_id, "text": "" if token_id == EOS else chr(token_id), "logprob": -0.5}
            event: dict[str, Any] = {
                "index": i + 1,
                "token": shown | {"special": token_id == EOS},
                "generated_text": None,
                "details": None,
            }
            if parameters.get("top_n_tokens"):
                event["top_tokens"] = [
                    {"id": 97 + j, "text": chr(97 + j), "logprob": -1.0 - j, "special": False}
                    for j in range(parameters["top_n_tokens"])
                ]
            if i == len(ids) - 1:
                event["generated_text"] = "whole"
                event["details"] = {
                    "finish_reason": "eos_token" if why == "stop" else "length",
                    "generated_tokens": len(ids),
                    "seed": 1,
                    "input_length": len(body["inputs"].encode()),
                } | (self.faults.usage or {})
            yield event


class TritonStandIn(StandIn):
    GENERATES = ("/v2/models/served/generate_stream",)

    def get(self, path: str) -> tuple[int, str, bytes]:
        if path == "/v2/models/served/ready":
            return (200 if self.healthy else 400), "", b""
        if path == "/v2/models/served":
            metadata = {
                "name": self.MODEL,
                "versions": ["1"],
                "platform": "python",
                "inputs": [],
                "outputs": [],
            }
            return 200, "application/json", json.dumps(metadata).encode()
        return super().get(path)

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        parameters = body["parameters"]
        ids, _ = self.tokens(parameters.get("seed", 0), parameters["max_tokens"])
        for token_id in ids:
            if token_id != EOS:
                yield {
                    "model_name": self.faults.model or self.MODEL,
                    "model_version": "1",
                    "text_output": chr(token_id),
                }


@contextlib.asynccontextmanager
async def serving(made: StandIn) -> AsyncIterator[StandIn]:
    await made.start()
    try:
        yield made
    finally:
        await made.kill()


async def until(check: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.002)
