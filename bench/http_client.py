"""CPU of our HTTP client beside aiohttp's, in front of the same endpoint: microseconds for each answer.

    python bench/http_client.py [--requests 600] [--rounds 9] [--peers VENV] [--json FILE]

Both run on uvloop in this process and do the same for each answer: post a chat over a kept-alive connection,
read the body as it comes, cut it into events, count them. `whole` answers are one JSON body, `chunks` are 64
events as fast as they are taken; 32 at once. What a stream of ours does beside that (reading events, counting
tokens, limits) is not in it. VENV is that of bench/relay/install_peers.sh, which has an aiohttp.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from harness import command_line, in_turns, ratio, spread, table, write_result
from relay_process import Process, build, free_port

from penstock.backends.http.address import HttpAddress, HttpLimits
from penstock.backends.http.client import HttpClient, HttpExchange
from penstock.backends.http.handler import HttpFailure
from penstock.clock import SystemClock
from penstock.protocol.stream import EventReader

AT_ONCE = 32
CHUNKS = 64
PATH = "/chat/completions"


def body_of(chunks: int) -> bytes:
    """A chat; 0: not streamed."""
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "What is a turbine?"}]}
    return json.dumps(asked | ({"stream": True, "max_tokens": chunks} if chunks else {})).encode()


class Answer:
    """One answer through our client."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.exchange: HttpExchange | None = None
        self.reader, self.num_events, self.num_bytes = EventReader(), 0, 0

    def on_response(self, status: int, headers: object) -> None:
        assert status == 200, status

    def on_body(self, data: bytes) -> None:
        assert self.exchange is not None
        self.exchange.touch()
        self.num_bytes += len(data)
        self.num_events += len(self.reader.feed(data))

    def on_end(self) -> None:
        self.done.set_result(None)

    def on_failure(self, failure: HttpFailure) -> None:
        self.done.set_exception(RuntimeError(failure.message))


async def callers(num: int, one: Callable[[], Any]) -> None:
    """`one` so many times, `AT_ONCE` at once."""
    left = iter(range(num))

    async def caller() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))


async def through_ours(port: int, num: int, chunks: int) -> float:
    """CPU seconds."""
    client = HttpClient(HttpAddress("http", "127.0.0.1", port, "/v1"), HttpLimits(), SystemClock())
    body = body_of(chunks)

    async def one() -> None:
        answer = Answer()
        answer.exchange = client.start("POST", PATH, answer, body=body)
        await answer.done
        assert answer.num_events == (chunks + 1 if chunks else 0), answer.num_events

    await callers(AT_ONCE, one)  # Connections are made.
    begun = time.process_time()
    await callers(num, one)
    spent = time.process_time() - begun
    client.close()
    return spent


async def through_aiohttp(port: int, num: int, chunks: int) -> float:
    """CPU seconds."""
    import aiohttp  # pyright: ignore[reportMissingImports]

    url, body = f"http://127.0.0.1:{port}/v1{PATH}", body_of(chunks)
    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:

        async def one() -> None:
            reader, num_events = EventReader(), 0
            async with session.post(url, data=body) as answer:
                assert answer.status == 200, answer.status
                async for data in answer.content.iter_any():
                    num_events += len(reader.feed(data))
            assert num_events == (chunks + 1 if chunks else 0), num_events

        await callers(AT_ONCE, one)
        begun = time.process_time()
        await callers(num, one)
        return time.process_time() - begun


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--peers", type=Path, default=Path("bench/out/relay-peers"))
    args = parser.parse_args()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path.append(str(args.peers / "lib" / version / "site-packages"))  # Behind all that is installed here.
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="client-bench-") as name:
        place, port = Path(name), free_port()
        build(place)
        upstream = Process(str(place / "upstream"), str(port), str(CHUNKS), "0", log=place / "log")
        time.sleep(0.3)
        try:
            for shape, chunks in (("whole", 0), ("chunks", CHUNKS)):
                num = args.requests

                def us(through: Callable[..., Any], chunks: int = chunks, num: int = num) -> float:
                    return uvloop.run(through(port, num, chunks)) / num * 1e6

                sides = {"ours": lambda: us(through_ours), "aiohttp": lambda: us(through_aiohttp)}
                found[shape] = in_turns(args.rounds, sides)
        finally:
            upstream.end()
    rows = [
        (shape, spread(each["ours"]), spread(each["aiohttp"]), ratio(each["ours"], each["aiohttp"]))
        for shape, each in found.items()
    ]
    print("\n".join([table(("us of CPU for each answer", "ours", "aiohttp", "ours / aiohttp"), rows)]))
    if args.json:
        import aiohttp  # pyright: ignore[reportMissingImports]

        write_result(args.json, {"us_per_answer": found}, {"aiohttp": aiohttp.__version__})


if __name__ == "__main__":
    main()
