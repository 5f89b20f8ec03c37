"""The effect of one tenant's flood on another tenant, over sockets: a real gateway and the real engine with a
demo model, 16 rows unless said otherwise.

    python -m bench.sockets.isolation [--neighbours streams waves deaf crowd] [--rounds 3] [--seconds 10]
                                      [--rows 16] [--processes 1] [--engine penstock] [--tree DIR ...]
                                      [--json FILE]

The polite tenant sends one short request after the other and records the time to each first token: alone, and
beside a neighbour that keeps

    streams   as many streams as there are rows, of 2,000 tokens each
    waves     40 streams of 300 tokens each, so that some always wait
    deaf      24 streams of 2,000 tokens that it never reads
    crowd     as many streams as there are rows and eight more, each of another tenant

With `--engine vllm` (or `openai`, `sglang`) the worker is an external one: an HTTP server in a process of its
own that speaks that engine's API from a script. It sends one token of each of its rows every 10 ms, and what
comes beyond its rows waits until one of its answers ends.

With several `--tree`, source trees of this project are served in turns within each round, so that a build is
held against the one before on the same machine in the same minutes. Tokens are those of both tenants that
came within the window; the client counts them on the same cores.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from provider_process import ProviderProcess

from bench.harness import REPOSITORY, command_line, write_result
from bench.process import Served
from penstock.bench.load import percentile

NOISY, POLITE = "sk-noisy-neighbour-0001", "sk-polite-tenant-0002"
CROWD = [f"sk-one-of-a-crowd-{number:04}" for number in range(64)]
STREAM_TOKENS, WAVE_TOKENS, POLITE_TOKENS = 2000, 300, 8
WAVES, DEAF = 40, 24
PAUSE_S, RETRY_S = 0.05, 0.25
STEP_S = 0.01
"""Of an external worker: the time per token, which its number of streams does not change."""


@dataclass
class Window:
    """The measurements while one neighbour was there."""

    ttft_ms: list[float] = field(default_factory=list[float])
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        found = sorted(self.ttft_ms) or [float("nan")]
        return {
            "requests": len(self.ttft_ms), "failed": self.failed, "tokens_per_s": self.tokens / self.seconds,
            "ttft_p50_ms": percentile(found, 0.5), "ttft_p95_ms": percentile(found, 0.95),
            "ttft_max_ms": found[-1],
        }  # fmt: skip


@contextlib.contextmanager
def served(tree: Path, place: Path, args: argparse.Namespace) -> Iterator[int]:
    """A `penstock serve` of one source tree, and its worker: the port."""
    with contextlib.ExitStack() as stack:
        if args.engine == "penstock":
            engine = {"max_running": args.rows, "threads": 1, "kv_memory_bytes": 1 << 28}
            worker: dict[str, object] = {"engine": engine}
        else:
            provider = stack.enter_context(ProviderProcess(args.engine, rows=args.rows))
            provider.behaves(step_s=STEP_S)
            facts = {"engine": args.engine, "served_model": "served", "max_model_len": 4096}
            address = {"url": provider.url, "max_running": args.rows}
            worker = {"replicas": 0, "workers": [address | facts]}
        config = {
            "models": [{"path": args.model, "name": "m", **worker}],
            "server": {"processes": args.processes},
            "auth": {"keys": [NOISY, POLITE, *CROWD]},
            "log": {"access": False},
        }
        yield stack.enter_context(Served(place, config, tree=tree)).port


def request(key: str, tokens: int, number: int) -> bytes:
    body = json.dumps(
        {
            "model": "m", "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
            "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0,
        }
    ).encode()  # fmt: skip
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def stream(port: int, key: str, tokens: int, number: int, window: Window) -> None:
    """One answer, read to its end; its tokens are counted as they come."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(request(key, tokens, number))
        first, is_ok = True, False
        while line := await reader.readline():
            if line.startswith(b"HTTP/") and b" 200 " not in line:
                break
            is_ok = is_ok or line.startswith(b"data: [DONE]")
            if not line.startswith(b"data: {") or b'"content":""' in line:
                continue
            window.tokens += 1
            if first and key == POLITE:
                window.ttft_ms.append(1e3 * (time.monotonic() - began))
            first = False
        window.failed += not is_ok
    finally:
        writer.close()


async def keep_streaming(port: int, tokens: int, number: int, window: Window, key: str = NOISY) -> None:
    while True:
        failed = window.failed
        await stream(port, key, tokens, number, window)
        await asyncio.sleep(RETRY_S if window.failed > failed else 0)


async def never_read(port: int, number: int) -> None:
    """One answer after the other that nobody reads, with the least receive buffer."""
    while True:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, request(NOISY, STREAM_TOKENS, number))
            await asyncio.sleep(60)
        finally:
            sock.close()


async def polite(port: int, seconds: float, window: Window) -> None:
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        await stream(port, POLITE, POLITE_TOKENS, number % 7, window)
        number += 1
        await asyncio.sleep(PAUSE_S)


async def measure(port: int, neighbour: str, args: argparse.Namespace) -> Window:
    """The polite tenant beside one neighbour; "" is alone."""
    window, tasks = Window(), list[asyncio.Task[None]]()
    streams = {"streams": (args.rows, STREAM_TOKENS), "waves": (WAVES, WAVE_TOKENS)}.get(neighbour)
    if streams is not None:
        tasks = [asyncio.create_task(keep_streaming(port, streams[1], i, window)) for i in range(streams[0])]
    elif neighbour == "crowd":
        keys = CROWD[: args.rows + 8]
        tasks = [
            asyncio.create_task(keep_streaming(port, STREAM_TOKENS, i, window, key))
            for i, key in enumerate(keys)
        ]
    elif neighbour == "deaf":
        tasks = [asyncio.create_task(never_read(port, i)) for i in range(DEAF)]
    await asyncio.sleep(1.0 if tasks else 0)
    window.tokens = window.failed = 0
    began = time.monotonic()
    await polite(port, args.seconds, window)
    window.seconds = time.monotonic() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1.0 if tasks else 0)
    return window


def run_round(tree: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="isolation-", ignore_cleanup_errors=True) as name,
        served(tree, Path(name), args) as port,
    ):
        asyncio.run(measure(port, "", argparse.Namespace(**{**vars(args), "seconds": 1.0})))
        for neighbour in ("", *args.neighbours):
            window = asyncio.run(measure(port, neighbour, args))
            found[neighbour or "alone"] = window.summary()
    return found


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--neighbours", nargs="*", default=["streams", "waves", "deaf", "crowd"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--engine", choices=["penstock", "vllm", "openai", "sglang"], default="penstock")
    parser.add_argument("--model", default="penstock-demo-mini")
    parser.add_argument("--tree", nargs="*", type=Path, default=[REPOSITORY], help="served in turns")
    args = parser.parse_args()
    rounds: list[dict[str, object]] = []
    for number in range(args.rounds):
        for index, tree in enumerate(args.tree):
            found = run_round(tree, args)
            rounds.append({"round": number, "tree": index, "seen": found})
            for name, seen in found.items():
                print(
                    f"round {number} tree {index} {name:8} TTFT p50 {seen['ttft_p50_ms']:8.1f} p95 "
                    f"{seen['ttft_p95_ms']:8.1f} max {seen['ttft_max_ms']:8.1f} ms, "
                    f"{seen['tokens_per_s']:7.0f} tokens/s, {seen['requests']} requests, "
                    f"{seen['failed']} failed", flush=True,
                )  # fmt: skip
    write_result(
        args.json, {"settings": {**vars(args), "tree": len(args.tree), "json": ""}, "rounds": rounds}
    )


if __name__ == "__main__":
    main()
