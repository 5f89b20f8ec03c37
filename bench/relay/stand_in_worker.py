"""A worker that speaks our protocol and computes nothing: every running request gets a token per step.

python bench/relay/stand_in_worker.py SOCKET PERIOD_US     0: a step whenever the last one was taken.

Only the gateway in front of it is measured, so its own cost matters only in that it must keep up.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from penstock.protocol.worker import (
    Abort,
    Finish,
    FrameDecoder,
    ModelInfo,
    Output,
    Ready,
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
    model="m", architecture="StandIn", dtype="float32", num_parameters=0, vocab_size=4096, max_model_len=1 << 20,
    num_blocks=1 << 20, block_tokens=16, max_running=1 << 20,
)  # fmt: skip


class Worker(asyncio.Protocol):
    """One gateway's connection."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._running: dict[RequestId, list[int]] = {}
        self._decoder = FrameDecoder()
        self._step = 0
        self._armed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what there is."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._write(Ready(INFO))
        self._write(Stats(step=0, running=0, waiting=0, blocks_total=1 << 20, blocks_used=0, blocks_cached=0))

    def data_received(self, data: bytes) -> None:
        """Submissions and aborts."""
        for body in self._decoder.feed(data):
            message = decode_to_worker(body)
            if isinstance(message, Submit):
                self._running[message.request_id] = [message.sampling.max_tokens, len(message.prompt) // 4, 0]
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    if self._running.pop(request_id, None) is not None:
                        end = Output(request_id, (), finish=_finish(FinishReason.ABORT, 1, 0))
                        self._write(StepOutput(self._step, (end,)))
        self._arm()

    def _arm(self) -> None:
        if self._running and not self._armed:
            self._armed = True
            loop = asyncio.get_running_loop()
            if self._period_s:
                loop.call_later(self._period_s, self._on_step)
            else:
                loop.call_soon(self._on_step)

    def _on_step(self) -> None:
        self._armed = False
        loop = asyncio.get_running_loop()
        if self._transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            self._armed = True
            loop.call_later(0.001, self._on_step)
            return
        self._step += 1
        outputs, ended = [], []
        for request_id, state in self._running.items():
            state[0] -= 1
            state[2] += 1
            usage = Usage(prompt_tokens=state[1]) if state[2] == 1 else None
            if state[0]:
                outputs.append(Output(request_id, (TOKEN,), usage=usage))
            else:
                ended.append(request_id)
                finish = _finish(FinishReason.LENGTH, state[1], state[2])
                outputs.append(Output(request_id, (TOKEN,), finish=finish, usage=usage))
        for request_id in ended:
            del self._running[request_id]
        if outputs:
            self._write(StepOutput(self._step, tuple(outputs)))
        self._arm()

    def _write(self, message: Ready | Stats | StepOutput) -> None:
        self._transport.write(encode(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway left."""
        self._running.clear()


def _finish(reason: FinishReason, num_prompt: int, num_tokens: int) -> Finish:
    return Finish(reason=reason, usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens))


async def _main(path: str, period_us: int) -> None:
    loop = asyncio.get_running_loop()
    Path(path).unlink(missing_ok=True)
    server = await loop.create_unix_server(lambda: Worker(period_us / 1e6), path)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2])))
