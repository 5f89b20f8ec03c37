"""A worker that speaks our protocol and computes nothing: every running request gets a token per step.

python bench/relay/stand_in_worker.py SOCKET PERIOD_US [WORKERS [STEPS CUT]]

PERIOD_US 0: a step whenever the last one was taken.

With WORKERS its requests are in so many batches of the same size, whose steps are spread evenly over the
period, as those of as many workers are; else all step together. Only the gateway in front of it is measured,
so its own cost matters only in that it must keep up.

STEPS is a file that the load client maps too: one entry of 16 bytes per step, used in turns: two letters, the
id of the token that they are, and when a step with that token was sent last (CLOCK_MONOTONIC, microseconds).
The first CUT answers end at a random place, so that streams which began together do not all end together.
"""

import asyncio
import mmap
import random
import struct
import sys
import time
from pathlib import Path
from typing import cast

import uvloop

from penstock.protocol.worker import (
    AbortRequest,
    FrameDecoder,
    ModelInfo,
    Output,
    Ping,
    Pong,
    Ready,
    RequestFinished,
    Stats,
    StepOutput,
    Submit,
    decode_to_worker,
    encode,
)
from penstock.types import FinishReason, RequestId, Usage

TOKEN = 1000
HIGH_WATER_BYTES = 1 << 20
INFO = ModelInfo(
    model="m", architecture="StandIn", dtype="float32", num_parameters=0, vocab_size=4096,
    max_model_len=1 << 20, num_blocks=1 << 20, block_tokens=16, max_running=1 << 20,
)  # fmt: skip


class Steps:
    """Which token the next step tells, and where it is noted when that was sent."""

    ENTRY = struct.Struct("4sId")

    def __init__(self, path: Path, num_cut: int) -> None:
        self._num_cut, self._random = num_cut, random.Random(1)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._tokens = [token for _, token, _ in self.ENTRY.iter_unpack(self._map[:])]
        self._next = 0

    def take(self) -> int:
        """The token of a step that is sent now."""
        at, self._next = self._next, (self._next + 1) % len(self._tokens)
        struct.pack_into("d", self._map, at * self.ENTRY.size + 8, time.monotonic_ns() / 1000)
        return self._tokens[at]

    def length(self, max_tokens: int) -> int:
        """Of the next answer."""
        self._num_cut -= 1
        return max_tokens if self._num_cut < 0 else self._random.randint(1, max_tokens)


class Batch:
    """Requests that step together."""

    def __init__(self) -> None:
        self.running: dict[RequestId, list[int]] = {}
        """Tokens left, prompt tokens, tokens told."""
        self.is_armed = False
        self.period = -1
        """Number of the period that it stepped in last."""


class Worker(asyncio.Protocol):
    """One gateway's connection."""

    def __init__(self, period_s: float, num_batches: int, steps: Steps | None) -> None:
        self._period_s, self._steps = period_s, steps
        self._batches = [Batch() for _ in range(num_batches)]
        self._decoder = FrameDecoder()
        self._step = 0
        self._began_s = asyncio.get_running_loop().time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what there is."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._write(Ready(INFO))
        self._write(Stats(step=0, running=0, waiting=0, blocks_total=1 << 20, blocks_used=0, blocks_cached=0))

    def data_received(self, data: bytes) -> None:
        """Submissions and aborts."""
        for body in self._decoder.feed(data):
            message = decode_to_worker(body)
            if isinstance(message, Submit):
                batch = min(self._batches, key=lambda batch: len(batch.running))
                wanted = message.sampling.max_tokens
                num_tokens = wanted if self._steps is None else self._steps.length(wanted)
                batch.running[message.request_id] = [num_tokens, len(message.prompt) // 4, 0]
                self._arm(batch)
            elif isinstance(message, Ping):
                self._write(Pong())
            elif isinstance(message, AbortRequest):
                for request_id in message.request_ids:
                    self._abort(request_id)

    def _abort(self, request_id: RequestId) -> None:
        for batch in self._batches:
            if batch.running.pop(request_id, None) is not None:
                end = Output(request_id, (), finish=_finish(FinishReason.ABORT, 1, 0))
                self._write(StepOutput(self._step, (end,)))

    def _arm(self, batch: Batch) -> None:
        if batch.running and not batch.is_armed:
            batch.is_armed = True
            loop = asyncio.get_running_loop()
            if self._period_s:
                loop.call_at(self._due_s(batch, loop.time()), self._on_step, batch)
            else:
                loop.call_soon(self._on_step, batch)

    def _due_s(self, batch: Batch, now_s: float) -> float:
        """The next time of this batch: a fixed place in every period, so that no lateness adds up."""
        place_s = self._batches.index(batch) / len(self._batches) * self._period_s
        passed = int((now_s - self._began_s - place_s) // self._period_s)
        # The loop's clock counts milliseconds: it may stand just before the step that was taken now.
        batch.period = max(passed, batch.period) + 1
        return self._began_s + place_s + batch.period * self._period_s

    def _on_step(self, batch: Batch) -> None:
        batch.is_armed = False
        if self._transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            batch.is_armed = True
            asyncio.get_running_loop().call_later(0.001, self._on_step, batch)
            return
        self._step += 1
        token = TOKEN if self._steps is None else self._steps.take()
        outputs, ended = [], []
        for request_id, state in batch.running.items():
            state[0] -= 1
            state[2] += 1
            usage = Usage(prompt_tokens=state[1]) if state[2] == 1 else None
            if state[0]:
                outputs.append(Output(request_id, (token,), usage=usage))
            else:
                ended.append(request_id)
                finish = _finish(FinishReason.LENGTH, state[1], state[2])
                outputs.append(Output(request_id, (token,), finish=finish, usage=usage))
        for request_id in ended:
            del batch.running[request_id]
        if outputs:
            self._write(StepOutput(self._step, tuple(outputs)))
        self._arm(batch)

    def _write(self, message: Ready | Stats | StepOutput | Pong) -> None:
        self._transport.write(encode(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway left."""
        for batch in self._batches:
            batch.running.clear()


def _finish(reason: FinishReason, num_prompt: int, num_tokens: int) -> RequestFinished:
    return RequestFinished(reason=reason, usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens))


async def _main(path: str, period_us: int, num_batches: int = 1, steps: Steps | None = None) -> None:
    loop = asyncio.get_running_loop()
    Path(path).unlink(missing_ok=True)
    server = await loop.create_unix_server(lambda: Worker(period_us / 1e6, num_batches, steps), path)
    await server.serve_forever()


if __name__ == "__main__":
    _more = sys.argv[3:]
    _steps = Steps(Path(_more[1]), int(_more[2])) if len(_more) > 1 else None
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(_more[0]) if _more else 1, _steps))
