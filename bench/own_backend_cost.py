"""The gateway's cost of a relayed token inside `EngineBackend`, in microseconds of CPU.

Frames as a worker sends them go straight into the link (no socket), so what is counted is: cut frames,
decode, route to the stream, detokenize, watch for stop strings, call the sink. The baseline, measured
in the same run, is decoding the messages alone.

    python bench/own_backend_cost.py [MODEL_DIR]
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock.backends.base import Delta, Finish, GenerateRequest
from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerLink
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import SystemClock
from penstock.protocol.worker import (
    ModelInfo,
    Output,
    Ready,
    StepOutput,
    decode_from_worker,
    encode,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId, SamplingParams

TOKENS = 40_000
REPEATS = 7
TEXT = "The pipe and gate bring the water to the turbine, at just the rate that it can use. " * 40
INFO = ModelInfo(
    model="m",
    architecture="A",
    dtype="float32",
    num_parameters=0,
    vocab_size=1,
    max_model_len=1,
    num_blocks=1,
    block_tokens=16,
    max_running=1,
)


class NoTransport:
    """Takes what is written and forgets it."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class CountingSink:
    """The least that a sink can do."""

    def __init__(self) -> None:
        self.characters = 0

    def on_delta(self, delta: Delta) -> None:
        self.characters += len(delta.text)

    def on_finish(self, finish: Finish) -> None:
        raise AssertionError("no stream ends here")


@dataclass(frozen=True)
class Case:
    """How many streams one step serves, and what they watch for."""

    streams: int
    stop: tuple[str, ...] = ()
    name: str = "plain"


def frames(case: Case, ids: list[RequestId], tokens: tuple[int, ...]) -> list[bytes]:
    made = []
    for step in range(TOKENS // case.streams):
        outputs = (Output(each, (tokens[(step + i) % len(tokens)],)) for i, each in enumerate(ids))
        made.append(encode(StepOutput(step + 1, tuple(outputs))))
    return made


def connect(tokenizer: Tokenizer) -> tuple[EngineBackend, WorkerLink]:
    backend = EngineBackend(tokenizer, SystemClock())
    link = WorkerLink(backend, HeartbeatTerms())
    link.connection_made(cast(asyncio.Transport, NoTransport()))
    link.data_received(encode(Ready(INFO)))
    return backend, link


def cpu_us_per_token(work: list[bytes], feed: Callable[[bytes], object]) -> list[float]:
    found = []
    for _ in range(REPEATS):
        start = time.process_time_ns()
        for frame in work:
            feed(frame)
        found.append((time.process_time_ns() - start) / 1000 / TOKENS)
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


async def measure(tokenizer: Tokenizer, case: Case) -> None:
    backend, link = connect(tokenizer)
    ids = [RequestId(f"chatcmpl-0123456789abcdef{i:08x}") for i in range(case.streams)]
    for each in ids:
        request = GenerateRequest(
            request_id=each, prompt_token_ids=(1,), sampling=SamplingParams(), stop=case.stop
        )
        backend.generate(request, CountingSink())
    work = frames(case, ids, tokenizer.encode(TEXT))
    whole = cpu_us_per_token(work, link.data_received)
    baseline = cpu_us_per_token(work, lambda frame: decode_from_worker(frame[4:]))
    ratio = statistics.median(whole) / statistics.median(baseline)
    print(f"{case.streams:8d}  {case.name:12s}  {spread(whole):20s}  {spread(baseline):20s}  {ratio:.1f}x")


def main() -> None:
    default = Path(__file__).parents[1] / "models" / "penstock-demo"
    tokenizer = Tokenizer.load(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    print(f"CPU us per token and stream: median (least-most) of {REPEATS} runs of {TOKENS} tokens")
    print(f"{'streams':>8s}  {'case':12s}  {'EngineBackend':20s}  {'decoding alone':20s}  ratio")
    for streams in (1, 32, 256):
        asyncio.run(measure(tokenizer, Case(streams)))
    asyncio.run(measure(tokenizer, Case(32, ("\nUser:", "Zebra"), "stop strings")))


if __name__ == "__main__":
    main()
