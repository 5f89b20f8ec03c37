"""CPU of a relaying gateway per 1,000 requests, ours beside others', in one run.

    python -m bench.relay.peers [--rounds 3] [--only penstock,smg] [--shapes whole,paced] [--peers VENV]
        [--quick] [--json FILE]
    python -m bench.relay.peers --show FILE                               the tables of a run again

A load client and an upstream in C (bench/relay/*.c, built here) cost next to nothing; between them stands one
gateway process, whose CPU time (/proc/PID/stat, children included) and memory are read. Shapes: `whole`
answers at 64 connections; `chunks`: 64 chunks as fast as they are taken, 64 connections; `each`: the same
with a stop string, with which our gateway may not tell several steps in one event (no proxy does that, so
only ours is measured); `open`: whole answers that are asked for at random, 500 a second over 64 connections,
below what any of these gateways saturates at, whether or not others have ended, so that the slowest say how
long one waits; `paced`: 256 chunks, one per 20 ms, 256 connections. `alone` is one connection at a
time: what its latency exceeds the upstream's own by is what the gateway adds (ours: a worker's that gives one
token per step, asked without a gateway). Ours talks to a stand-in worker in our own
protocol, and does all that a proxy does not: tokenizing, detokenizing, encoding events; `penstock.http` is
`penstock serve` in front of the upstream, as the others are.
bench/relay/install_peers.sh makes VENV.

Rounds go through the gateways in turns, each time from another one on. LiteLLM is measured once, on a tenth
of the requests and at most 64 connections.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness import command_line, short, write_result
from bench.process import Process, build, free_port
from bench.relay.gateways import HERE, Place, command_of, versions_of
from bench.relay.tables import Results, peer_table, ratio_table
from penstock.protocol.worker import FrameDecoder, StepOutput, Submit, decode_from_worker, encode
from penstock.types import RequestId, SamplingParams

KEY = "sk-benchbenchbe_0123456789abcdef0123456789abcdef0123456789a"
"""As in bench/relay/gateway.py."""
START_S = 90.0
PACE_US = 20_000
WARM_CHUNKS = 16
SLOW = ("litellm",)
"""Gateways that take so long that one round on a tenth of the requests has to do."""
SLOW_CONNECTIONS = 64
OWN_SHAPES = ("each",)
PEERS = "upstream,penstock,smg,vllm-router,envoy,nginx,litellm"


@dataclass(frozen=True)
class Shape:
    """One kind of traffic."""

    name: str
    connections: int
    requests: int
    chunks: int
    """0: not streamed."""
    period_us: int = 0
    stop: str = ""
    mean_us: int = 0
    """Between two requests, whether others have ended or not; 0: each connection sends its next at once."""


SHAPES = (
    Shape("alone", 1, 1000, 0),
    Shape("whole", 64, 4000, 0),
    Shape("open", 64, 10_000, 0, mean_us=2000),
    Shape("chunks", 64, 2000, 64),
    Shape("each", 64, 2000, 64, stop="\u0001"),
    Shape("paced", 256, 512, 256, PACE_US),
)
ROUNDS = 3


def request_bytes(port: int, shape: Shape) -> bytes:
    """The request that the load client sends again and again."""
    body: dict[str, object] = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "How does water from a mountain lake become electric light?"}
        ],
        "max_tokens": shape.chunks or 12,
    }
    if shape.chunks:
        body["stream"] = True
    if shape.stop:
        body["stop"] = shape.stop
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def load(place: Path, port: int, shape: Shape, requests: int) -> dict[str, float]:
    """Send requests; what the client saw."""
    file = place / "request"
    file.write_bytes(request_bytes(port, shape))
    words = [place / "load", port, shape.connections, requests, file]
    words += [shape.mean_us] if shape.mean_us else []
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    seen = json.loads(done.stdout)
    if seen["errors"]:
        raise RuntimeError(f"{seen['errors']} errors: {done.stderr[:500]}")
    return seen


def wait_answers(place: Path, port: int, process: Process, patience_s: float = START_S) -> None:
    """Until one whole answer comes back."""

    def answers() -> bool:
        try:
            return bool(load(place, port, Shape("probe", 1, 1, 0), 1))
        except RuntimeError:
            return False

    process.wait(answers, patience_s)


def measure(gateway: str, shape: Shape, place: Path, venv: Path, scale: float) -> dict[str, float]:
    """One gateway under one shape."""
    port, upstream_port, worker = free_port(), free_port(), str(place / "worker.sock")
    if gateway in SLOW:
        shape = replace(shape, connections=min(shape.connections, SLOW_CONNECTIONS))
    requests = max(shape.connections, int(shape.requests * scale))
    log, is_ours = place / f"{gateway.replace('/', '_')}.log", gateway == "penstock"
    if is_ours:
        script = str(HERE / "stand_in_worker.py")
        behind = Process(sys.executable, script, worker, str(shape.period_us), log=log)
    else:
        chunks = str(shape.chunks or 1)
        behind = Process(str(place / "upstream"), str(upstream_port), chunks, str(shape.period_us), log=log)
    time.sleep(0.3)
    process = None
    try:
        if gateway == "upstream":
            port, process = upstream_port, behind
        else:
            ports = {"port": port, "upstream": upstream_port}
            where = Place(**ports, worker=worker, venv=venv, directory=place, key=KEY)
            state = str(place / f"state-{port}")  # Of its own: the one before has filled its ledger.
            process = Process(*command_of(gateway, where), log=log, PENSTOCK_STATE_DIR=state)
        wait_answers(place, port, process)
        warm = replace(shape, chunks=min(shape.chunks, WARM_CHUNKS))
        load(place, port, warm, max(shape.connections, requests // 10))
        before, started = process.cpu_s(), time.monotonic()
        seen = load(place, port, shape, requests)
        cpu_s, wall_s = process.cpu_s() - before, time.monotonic() - started
        if shape.name == "alone" and is_ours:
            seen["direct_p50_us"] = direct_us(worker, requests)
        costs = {"cpu_s_per_1000": cpu_s / requests * 1000, "rss_mb": process.rss_mb(), "wall_s": wall_s}
        return {**costs, "events_per_request": seen["events"] / requests, **seen}
    finally:
        for each in (process, behind):
            if each is not None:
                each.end()


def direct_us(worker: str, requests: int) -> float:
    """The worker's own time for the same answers, one at a time: what ours adds is what goes beyond it."""
    decoder, took_s = FrameDecoder(), list[float]()
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(worker)
        for number in range(requests):
            how = SamplingParams(max_tokens=12)
            asked = encode(Submit(request_id=RequestId(f"r{number}"), prompt=bytes(4 * 24), sampling=how))
            began_s, is_over = time.perf_counter(), False
            link.sendall(asked)
            while not is_over:
                if not (data := link.recv(1 << 16)):
                    raise ConnectionError("the worker has gone")
                messages = [decode_from_worker(body) for body in decoder.feed(data)]
                is_over = any(isinstance(each, StepOutput) and each.outputs[0].finish for each in messages)
            took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s) * 1e6


def is_measured(gateway: str, shape: str, number: int) -> bool:
    """Whether this round has this pair."""
    if gateway == "upstream":
        return shape in ("alone", "open")
    if gateway in SLOW and number:
        return False
    return gateway.startswith("penstock") or shape not in OWN_SHAPES


def run(gateways: list[str], shapes: list[Shape], args: argparse.Namespace) -> Results:
    """All rounds. A gateway that fails under a shape lacks it; the others go on."""
    results: Results = {name: {} for name in gateways}
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as name:
        place = Path(name)
        build(place)
        for number in range(args.rounds or (1 if args.quick else ROUNDS)):
            first = number % len(gateways)
            for shape in shapes:
                for gateway in gateways[first:] + gateways[:first]:
                    if not is_measured(gateway, shape.name, number):
                        continue
                    scale = (0.2 if args.quick else 1.0) * (0.1 if gateway in SLOW else 1.0)
                    try:
                        found = measure(gateway, shape, place, args.peers.absolute(), scale)
                    except (RuntimeError, OSError) as error:
                        print(f"{gateway} {shape.name}: {str(error)[-1000:]}", file=sys.stderr)
                        continue
                    results[gateway].setdefault(shape.name, []).append(found)
                    shown = ("cpu_s_per_1000", "events_per_request", "rss_mb", "total_p50_us", "wall_s")
                    brief = ", ".join(f"{key} {short(found[key])}" for key in shown)
                    print(f"round {number + 1} {shape.name:7}{gateway:20}{brief}", flush=True)
    return results


def show(results: Results) -> None:
    """The tables, in Markdown."""
    print(f"\n{peer_table(results)}\n\n{ratio_table(results)}")


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--only", default=PEERS, help="gateways")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--peers", type=Path, default=Path("bench/out/relay-peers"))
    parser.add_argument("--show", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.show.read_text())["results"])
        return
    gateways = [name for name in args.only.split(",") if name]
    shapes = [shape for shape in SHAPES if shape.name in args.shapes.split(",")]
    results = run(gateways, shapes, args)
    show(results)
    versions = versions_of(gateways, args.peers.absolute())
    write_result(args.json, {"shapes": [vars(s) for s in shapes], "results": results}, versions)


if __name__ == "__main__":
    main()
