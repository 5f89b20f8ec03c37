"""The gateway's cost of a relayed token inside a backend over HTTP, in microseconds of CPU, by engine.

Answers as each engine sends them go straight into a connection (no socket), so what is counted is: HTTP,
events, JSON, detokenizing, stop strings, the sink. The baseline, measured in the same run on the same bytes,
is decoding the JSON alone.

    python bench/http_backend_cost.py [MODEL_DIR]
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.backends.base import Delta, Finish, GenerateRequest
from penstock.backends.http.address import HttpAddress, HttpLimits
from penstock.backends.http.client import HttpClient, _Connection
from penstock.backends.http.dialects.base import Dialect
from penstock.backends.http.dialects.openai import OpenAIDialect
from penstock.backends.http.dialects.sglang import SglangDialect
from penstock.backends.http.dialects.tgi import TgiDialect
from penstock.backends.http.dialects.triton import TritonDialect
from penstock.backends.http.dialects.vllm import VllmDialect
from penstock.backends.http.stream import HttpStream, StreamContext
from penstock.clock import SystemClock
from penstock.text.detokenizer import PieceTokens
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId, SamplingParams

TOKENS = 400
"""Of one answer."""
EVENTS_A_READ = (1, 16)
"""A gateway that has much to do finds several when it comes to a connection."""
ANSWERS = 25
REPEATS = 5
TEXT = "The pipe and gate bring the water to the turbine, at just the rate that it can use. " * 40
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class NoTransport:
    """Takes what is written and forgets it."""

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


class CountingSink:
    """The least that a sink can do."""

    def __init__(self) -> None:
        self.characters, self.ended = 0, False

    def on_delta(self, delta: Delta) -> None:
        self.characters += len(delta.text)

    def on_finish(self, finish: Finish) -> None:
        assert finish.error is None, finish.error
        self.ended = True


class NoOwner:
    """A backend that looks away."""

    def leave(self, stream: HttpStream, finish: Finish) -> None:
        pass

    def noted(self, anomaly: str, detail: str) -> None:
        pass

    def lost(self, why: str, *, unreachable: bool) -> None:
        raise AssertionError(why)


def events(engine: str, ids: tuple[int, ...], texts: list[str]) -> Iterator[object]:
    """One answer's events, one for each token."""
    head = {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1763770000,
        "model": "served",
    }
    sent: list[int] = []
    for i, (token_id, text) in enumerate(zip(ids, texts, strict=True)):
        last = i == len(ids) - 1
        why = "length" if last else None
        if engine == "vllm":
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": why, "stop_reason": None}
            yield head | {"choices": [choice | {"prompt_token_ids": None, "token_ids": [token_id]}]}
        elif engine.startswith("sglang"):
            sent = [token_id] if engine == "sglang incr." else [*sent, token_id]
            meta = {
                "id": "r",
                "finish_reason": {"type": "length", "length": i} if last else None,
                "prompt_tokens": 3,
            }
            yield {
                "text": text,
                "output_ids": sent,
                "meta_info": meta | {"completion_tokens": i + 1, "cached_tokens": 0},
            }
        elif engine == "tgi":
            token = {"id": token_id, "text": text, "logprob": -0.5, "special": False}
            details = {"finish_reason": "length", "generated_tokens": i + 1, "seed": 1, "input_length": 3}
            yield {
                "index": i + 1,
                "token": token,
                "generated_text": None,
                "details": details if last else None,
            }
        elif engine == "triton":
            yield {"model_name": "served", "model_version": "1", "text_output": text}
        else:
            choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": why}
            yield head | {"object": "chat.completion.chunk", "choices": [choice]}
    if engine in ("vllm", "openai"):
        yield head | {
            "choices": [],
            "usage": {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3},
        }


def dialects(tokenizer: Tokenizer) -> dict[str, Dialect]:
    return {
        "vllm": VllmDialect("served", has_priorities=False),
        "sglang": SglangDialect("served", tokenizer, has_priorities=False),
        "sglang incr.": SglangDialect("served", tokenizer, has_priorities=False),
        "tgi": TgiDialect(tokenizer),
        "triton": TritonDialect("served", tokenizer),
        "openai": OpenAIDialect("served", tokenizer, max_model_len=4096),
    }


def request(engine: str, number: int) -> GenerateRequest:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return GenerateRequest(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=TOKENS),
        body=msgspec.json.encode(chat) if engine == "openai" else b"",
        is_chat=engine == "openai",
    )


def answer(
    client: HttpClient,
    dialect: Dialect,
    tokenizer: Tokenizer,
    engine: str,
    number: int,
    chunks: list[bytes],
    pieces: PieceTokens,
) -> None:
    sink, asked = CountingSink(), request(engine, number)
    stream = HttpStream(
        StreamContext(tokenizer, pieces, client.clock, NoOwner(), HttpLimits()),
        asked,
        sink,
        dialect.reader(asked),
        model=dialect.expects_model,
        trusts_prompt=False,
        may_move=asked.may_move,
    )
    connection = _Connection(client)
    connection.connection_made(NoTransport())
    client.put_back(connection)
    submission = dialect.submission(asked)
    stream.sent(client.start("POST", submission.path, stream, body=submission.body))
    for chunk in chunks:
        connection.data_received(chunk)
    assert sink.ended
    client.close()


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


async def measure(engine: str, dialect: Dialect, tokenizer: Tokenizer, together: int) -> None:
    client = HttpClient(HttpAddress.parse("http://127.0.0.1:1"), HttpLimits(), SystemClock())
    ids = tokenizer.encode(TEXT)[:TOKENS]
    datas = [
        json.dumps(each).encode()
        for each in events(engine, ids, [tokenizer.token_text(each) for each in ids])
    ]
    lines = [b"data: %b\n\n" % data for data in datas]
    parts = [b"%x\r\n%b\r\n" % (len(line), line) for line in lines]
    reads = [b"".join(parts[i : i + together]) for i in range(0, len(parts), together)]
    chunks = [HEAD, *reads, b"0\r\n\r\n"]
    pieces = PieceTokens(tokenizer)
    whole: list[float] = []
    alone: list[float] = []
    for _ in range(REPEATS):
        start = time.process_time_ns()
        for number in range(ANSWERS):
            answer(client, dialect, tokenizer, engine, number, chunks, pieces)
        middle = time.process_time_ns()
        for _ in range(ANSWERS):
            for data in datas:
                msgspec.json.decode(data)
        end = time.process_time_ns()
        whole.append((middle - start) / 1000 / TOKENS / ANSWERS)
        alone.append((end - middle) / 1000 / TOKENS / ANSWERS)
    ratio = statistics.median(whole) / statistics.median(alone)
    print(f"{engine:14s}  {together:6d}  {spread(whole):22s}  {spread(alone):22s}  {ratio:.1f}x")


def main() -> None:
    default = Path(__file__).parents[1] / "models" / "penstock-demo"
    tokenizer = Tokenizer.load(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    print(f"CPU us per token: median (least-most) of {REPEATS} runs of {ANSWERS} answers of {TOKENS} tokens")
    print(f"{'engine':14s}  {'a read':6s}  {'the backend':22s}  {'its JSON alone':22s}  ratio")
    for engine, dialect in dialects(tokenizer).items():
        for together in EVENTS_A_READ:
            asyncio.run(measure(engine, dialect, tokenizer, together))


if __name__ == "__main__":
    main()
