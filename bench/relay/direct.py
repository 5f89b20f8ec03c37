"""A worker's own time for one request at a time, asked without a gateway: python bench/relay/direct.py SOCKET
REQUESTS TOKENS.

Prints JSON: the median from the submission to the finish in microseconds. The gateway's addition is measured
against it.
"""

import asyncio
import json
import statistics
import sys
import time
from typing import cast

import uvloop

from penstock.protocol.worker import FrameDecoder, StepOutput, Submit, decode_from_worker, encode
from penstock.types import RequestId, SamplingParams

PROMPT = bytes(4 * 24)


class Caller(asyncio.Protocol):
    """Submits the next request when the last one has finished."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._left, self._tokens = requests, tokens
        self._decoder = FrameDecoder()
        self._took_us: list[float] = []
        self._started = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._submit()

    def data_received(self, data: bytes) -> None:
        """Outputs; a finish starts the next."""
        for body in self._decoder.feed(data):
            message = decode_from_worker(body)
            if isinstance(message, StepOutput) and message.outputs[0].finish is not None:
                self._took_us.append((time.perf_counter() - self._started) * 1e6)
                self._left -= 1
                if self._left:
                    self._submit()
                else:
                    self.done.set_result(self._took_us)

    def _submit(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(
            encode(
                Submit(
                    request_id=RequestId(f"r{self._left}"),
                    prompt=PROMPT,
                    sampling=SamplingParams(max_tokens=self._tokens),
                )
            )
        )


async def _main(path: str, requests: int, tokens: int) -> None:
    _, caller = await asyncio.get_running_loop().create_unix_connection(
        lambda: Caller(requests, tokens), path
    )
    print(json.dumps({"total_p50_us": statistics.median(await caller.done)}))


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
