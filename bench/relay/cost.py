"""The cost of the relay: CPU of the gateway process per chunk that it sends, beside a plain baseline.

    python -m bench.relay.cost [--streams 400] [--rate 10] [--seconds 4] [--rounds 3] [--out FILE]

Three servers in turn, each in a process of its own with the client in another: the gateway; the
server that one writes first (`asyncio` streams, a queue per stream, `json.dumps` per token, about 20 lines);
and the same on uvloop. In each, the same pusher hands every stream one token per tick. The pusher's own share
is measured too, with sinks that do nothing. Prints one JSON object; the ratios are within this run.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from bench.harness import command_line, write_result
from penstock.backends.base import BackendStatus, Delta, Finish, GenerateRequest, Phase, Sink, nothing
from penstock.clock import SystemClock
from penstock.config.ledger import LedgerConfig
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import AuthConfig, Config, LogConfig, ServerConfig
from penstock.fleet.registry import Registry
from penstock.gateway.app import Gateway
from penstock.gateway.dispatch.assemble import GatewayTools
from penstock.gateway.models.served import ServedModel
from penstock.gc_tuning import freeze_gc
from penstock.protocol.worker import ModelInfo
from penstock.rng import IdSource
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, ModelName, Usage, WorkerId

WORDS = (
    " water",
    " runs",
    " down",
    " the",
    " pipe",
    " to",
    " a",
    " turbine",
    ",",
    " and",
    " light",
    " comes",
)


@dataclass(frozen=True)
class Load:
    """How much is pushed."""

    streams: int
    rate: float
    seconds: float

    @property
    def ticks(self) -> int:
        """Tokens of each stream."""
        return max(1, int(self.rate * self.seconds))


class Pusher:
    """Waits for all streams, then gives each a token per tick, as an engine's step does, and measures the
    CPU.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self._sinks: list[Sink] = []
        self.done = asyncio.Event()
        self.result: dict[str, float] = {}
        self._cpu_at_start = time.process_time()

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)
        if len(self._sinks) == self._load.streams:
            asyncio.get_running_loop().call_later(0.3, self._begin)

    def _begin(self) -> None:
        self._setup_s = time.process_time() - self._cpu_at_start
        self._cpu_at_start = time.process_time()
        self._tick(0)

    def _tick(self, tick: int) -> None:
        if tick == self._load.ticks:
            asyncio.get_running_loop().call_later(0.1, self._end)
            return
        asyncio.get_running_loop().call_later(1 / self._load.rate, self._tick, tick + 1)
        push(self._sinks, tick)

    def _end(self) -> None:
        used_s = time.process_time() - self._cpu_at_start
        chunks = self._load.streams * self._load.ticks
        self.result = {
            "us_per_chunk": used_s / chunks * 1e6,
            "setup_us_per_stream": self._setup_s / self._load.streams * 1e6,
        }
        for sink in self._sinks:
            sink.on_finish(Finish(reason=FinishReason.STOP, usage=Usage()))
        self.done.set()


def push(sinks: list[Sink], tick: int) -> None:
    for i, sink in enumerate(sinks):
        sink.on_delta(Delta(WORDS[(tick + i) % len(WORDS)], (tick,)))


# --- the gateway -----------------------------------------------------------------------------------


class _Pushed:
    usage = None

    def abort(self) -> None:
        pass


class PushBackend:
    """A backend whose output is the pusher's."""

    def __init__(self, pusher: Pusher) -> None:
        info = ModelInfo(
            model="bench", architecture="None", dtype="none", num_parameters=0, vocab_size=1 << 20,
            max_model_len=1 << 20, num_blocks=1 << 20, block_tokens=16, max_running=1 << 20,
        )  # fmt: skip
        self.status = BackendStatus(phase=Phase.READY, info=info, stage="ready")
        self.on_change, self.num_streams = nothing, 0
        self._pusher = pusher

    def generate(self, request: GenerateRequest, sink: Sink) -> _Pushed:
        self._pusher.add(sink)
        return _Pushed()

    async def drain(self, timeout_s: float) -> None:
        pass


async def serve_gateway(load: Load, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="relay-cost-") as ledger:
        await serve_gateway_with(LedgerConfig(directory=ledger), load, pipe)


async def serve_gateway_with(ledger: LedgerConfig, load: Load, pipe: Connection) -> None:
    pusher, clock, name = Pusher(load), SystemClock(), ModelName("bench")
    log = Log(LogConfig(level="error", access=False), clock)
    registry = Registry(clock, log, workers_max=1)
    registry.add(registry.new(WorkerId("bench-0"), name, PushBackend(pusher)))
    model = ServedModel(
        name=name,
        workers=registry.of(name),
        tokenizer=byte_tokenizer(),
        template=ChatTemplate(
            {"default": "{% for m in messages %}{{ m.content }}{% endfor %}"},
            special_tokens={},
            wall_ns=clock.wall_ns,
        ),
        created_s=0,
    )
    config = Config(
        server=ServerConfig(port=0),
        auth=AuthConfig(disabled=True),
        admission=AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=()),
        ledger=ledger,
    )
    gateway = Gateway(
        config,
        {name: model},
        registry,
        GatewayTools(metrics=Metrics([name], version="bench"), clock=clock, ids=IdSource(), log=log),
    )
    _, port = await gateway.start()
    freeze_gc()  # As `penstock serve` does.
    pipe.send(port)
    await pusher.done.wait()
    await gateway.stop()
    pipe.send(pusher.result)


def byte_tokenizer() -> Tokenizer:
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(library, decoding=None)


# --- the baseline: what one writes first -----------------------------------------------------------


class QueueSink:
    """Between the pusher and a stream's task."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()

    def on_delta(self, delta: Delta) -> None:
        self.queue.put_nowait(delta.text)

    def on_finish(self, finish: Finish) -> None:
        self.queue.put_nowait(None)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pusher: Pusher) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    request = json.loads(await reader.readexactly(length))
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    sink = QueueSink()
    pusher.add(sink)
    while (text := await sink.queue.get()) is not None:
        chunk = {
            "id": "chatcmpl-0123456789abcdef00000001", "object": "chat.completion.chunk",
            "created": 1_700_000_000, "model": request["model"], "system_fingerprint": "fp_0123456789",
            "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
        }  # fmt: skip
        data = f"data: {json.dumps(chunk)}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    writer.close()


async def serve_baseline(load: Load, pipe: Connection) -> None:
    pusher = Pusher(load)
    server = await asyncio.start_server(lambda r, w: answer(r, w, pusher), "127.0.0.1", 0, backlog=2048)
    pipe.send(server.sockets[0].getsockname()[1])
    await pusher.done.wait()
    await asyncio.sleep(0.2)
    server.close()
    pipe.send(pusher.result)


SERVERS: dict[str, Callable[[Load, Connection], None]] = {
    "gateway": lambda load, pipe: uvloop.run(serve_gateway(load, pipe)),
    "baseline": lambda load, pipe: asyncio.run(serve_baseline(load, pipe)),
    "baseline_uvloop": lambda load, pipe: uvloop.run(serve_baseline(load, pipe)),
}


def run_server(name: str, load: Load, pipe: Connection) -> None:
    SERVERS[name](load, pipe)


# --- the client ------------------------------------------------------------------------------------


class Reader(asyncio.Protocol):
    """Sends one request and counts the events that come back."""

    def __init__(self, closed: Callable[[int], None]) -> None:
        self._closed, self._events = closed, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = json.dumps(
            {"model": "bench", "stream": True, "messages": [{"role": "user", "content": "How does it work?"}]}
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: "
            f"close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._events += data.count(b'"content":')

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed(self._events)


async def read_all(port: int, load: Load) -> int:
    loop, total, left = asyncio.get_running_loop(), 0, load.streams
    done = loop.create_future()

    def closed(events: int) -> None:
        nonlocal total, left
        total, left = total + events, left - 1
        if not left:
            done.set_result(None)

    for _ in range(load.streams):
        await loop.create_connection(lambda: Reader(closed), "127.0.0.1", port)
    await done
    return total


def run_client(port: int, load: Load, pipe: Connection) -> None:
    pipe.send(uvloop.run(read_all(port, load)))


# --- the run ---------------------------------------------------------------------------------------


def measure(name: str, load: Load) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(name, load, theirs))
    server.start()
    port = ours.recv()
    near, far = context.Pipe()
    client = context.Process(target=run_client, args=(port, load, far))
    client.start()
    result, events = ours.recv(), near.recv()
    server.join()
    client.join()
    assert events >= load.streams * load.ticks, f"{name}: {events} events arrived"
    return result


def pusher_share(load: Load) -> float:
    """Microseconds per chunk of pushing into sinks that do nothing."""

    class Nothing:
        def on_delta(self, delta: Delta) -> None:
            pass

        def on_finish(self, finish: Finish) -> None:
            pass

    sinks: list[Sink] = [Nothing() for _ in range(load.streams)]
    before = time.process_time()
    for tick in range(load.ticks):
        push(sinks, tick)
    return (time.process_time() - before) / (load.streams * load.ticks) * 1e6


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--rate", type=float, default=10.0, help="chunks per second of each stream")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    load = Load(options.streams, options.rate, options.seconds)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    for _ in range(options.rounds):
        for name in SERVERS:  # In turn, so that a busy moment hits all of them.
            found[name].append(measure(name, load))
            print(f"{name}: {found[name][-1]['us_per_chunk']:.1f} us per chunk", file=sys.stderr)
    report: dict[str, object] = {
        "what": "CPU microseconds of the server process per relayed chunk",
        "streams": load.streams,
        "chunks_per_second": load.rate * load.streams,
        "chunks": load.streams * load.ticks,
        "rounds": options.rounds,
        "cpus": os.cpu_count(),
        "pusher_us_per_chunk": round(pusher_share(load), 2),
    }
    for name, rounds in found.items():
        report[name] = {key: summary([r[key] for r in rounds]) for key in rounds[0]}
    for name in ("baseline", "baseline_uvloop"):
        ratios = [
            g["us_per_chunk"] / b["us_per_chunk"] for g, b in zip(found["gateway"], found[name], strict=True)
        ]
        report[f"gateway_to_{name}"] = summary(ratios)
    print(json.dumps(report, indent=2))
    if options.out:
        write_result(options.out, report)


if __name__ == "__main__":
    main()
