"""What CPU, memory and time does a gateway cost, ours beside others? Tables of both, and ratios by round.

    python -m bench.relay.peers [--rounds 3] [--only penstock,smg] [--shapes whole,paced] [--peers VENV]
        [--quick] [--json FILE]
    python -m bench.relay.peers --show FILE                               the tables of a run again

CPU is per 1,000 requests. A load client and an upstream in C (bench/relay/*.c, built here) cost next to
nothing; between them stands one gateway, whose CPU time (/proc/PID/stat, children included) and memory are
read. Shapes: `whole` answers at 64 connections; `chunks`: 64 chunks as fast as they are taken, 64
connections; `each`: the same with a stop string, with which our gateway may not tell several steps in one
event (no proxy does that, so only ours is measured); `open`: whole answers that are asked for at random, 500
a second over 64 connections, below what any of these gateways saturates at, whether or not others have ended,
so that the slowest say how long one waits; `paced`: 256 chunks, one per 20 ms, 256 connections. `alone` is
one connection at a time: what its latency exceeds the upstream's own by is what the gateway adds (ours: a
worker's that gives one token per step, asked without a gateway). Ours talks to a stand-in worker in our own
protocol, and does all that a proxy does not: tokenizing, detokenizing, encoding events; `penstock.http` is in
front of the upstream, as the others are, and NAME@PYTHON runs one of ours with another Python.
bench/relay/install_peers.sh makes VENV.

Rounds go through the gateways in turns, each time from another one on. LiteLLM is measured once, on a tenth
of the requests and at most 64 connections.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.harness import command_line, short, shown, table, write_result
from bench.process import build
from bench.relay.gateways import SHAPES, VENV, WORKER, Gateway, Shape, load, serving, versions_of
from penstock.protocol.worker import FrameDecoder, StepOutput, Submit, decode_from_worker, encode
from penstock.types import RequestId, SamplingParams

WARM_CHUNKS = 16
SLOW = ("litellm",)
"""Gateways that take so long that one round on a tenth of the requests has to do."""
SLOW_CONNECTIONS = 64
OWN_SHAPES = ("each",)
PEERS = "upstream,penstock,smg,vllm-router,envoy,nginx,litellm"
ROUNDS = 3
Round = dict[str, float]
Results = dict[str, dict[str, list[Round]]]
"""Gateway -> shape -> its rounds, in order."""
STREAMED = ("chunks", "each", "paced")


def measure(gateway: str, shape: Shape, directory: Path, venv: Path, scale: float) -> Round:
    """One gateway under one shape."""
    if gateway in SLOW:
        shape = replace(shape, connections=min(shape.connections, SLOW_CONNECTIONS))
    requests = max(shape.connections, int(shape.requests * scale))
    with serving(Gateway.named(gateway), shape, directory, venv=venv) as (port, process):
        warm = replace(shape, chunks=min(shape.chunks, WARM_CHUNKS))
        load(directory, port, warm, max(shape.connections, requests // 10))
        before, started = process.cpu_s(), time.monotonic()
        seen = load(directory, port, shape, requests)
        cpu_s, wall_s = process.cpu_s() - before, time.monotonic() - started
        if shape.name == "alone" and gateway == "penstock":
            seen["direct_p50_us"] = direct_us(str(directory / WORKER), requests)
        costs = {"cpu_s_per_1000": cpu_s / requests * 1000, "rss_mb": process.rss_mb(), "wall_s": wall_s}
        return {**costs, "events_per_request": seen["events"] / requests, **seen}


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


def figures(results: Results, gateway: str, shape: str, key: str = "cpu_s_per_1000") -> list[float]:
    """One figure of every round; empty if there is none."""
    return [round_[key] for round_ in results.get(gateway, {}).get(shape, []) if key in round_]


def added_us(results: Results, gateway: str, shape: str = "alone", at: str = "p50") -> list[float]:
    """The time that the gateway adds to a request, at the median or the 99th percentile of a round."""
    key = f"total_{at}_us"
    bare = figures(results, "upstream", shape, key)
    rounds = results.get(gateway, {}).get(shape, [])
    if not all("direct_p50_us" in round_ for round_ in rounds) and not bare:
        return []
    return [
        r[key] - (r["direct_p50_us"] if "direct_p50_us" in r else statistics.median(bare)) for r in rounds
    ]


def peer_table(results: Results) -> str:
    """Every gateway: CPU-seconds per 1,000 requests by shape, events per request, memory, latency added."""
    rows: list[list[object]] = []
    for gateway, shapes in results.items():
        if gateway == "upstream":
            continue
        cells: list[object] = [gateway, shown(figures(results, gateway, "whole"))]
        for shape in STREAMED:
            events = figures(results, gateway, shape, "events_per_request")
            cells.append(shown(figures(results, gateway, shape)))
            cells.append(f"{statistics.median(events):.0f}" if events else "")
        memory = max((r["rss_mb"] for rounds in shapes.values() for r in rounds), default=0.0)
        waits = added_us(results, gateway, "open", "p99")
        rows.append([*cells, f"{memory:.0f}", shown(added_us(results, gateway)), shown(waits)])
    streams = [name for shape in STREAMED for name in (shape, "events")]
    return table(("CPU-s per 1,000", "whole", *streams, "MB", "added p50, us", "p99, us"), rows)


def ratio_table(results: Results) -> str:
    """Ours over each peer's, round by round; of other numbers of rounds, each of ours to their median."""
    rows: list[list[object]] = []
    for ours in (name for name in results if name.startswith("penstock")):
        for peer in (name for name in results if not name.startswith(("penstock", "upstream"))):
            cells: list[object] = []
            for shape in ("whole", "chunks", "paced"):
                mine, others = figures(results, ours, shape), figures(results, peer, shape)
                if others and len(mine) != len(others):
                    others = [statistics.median(others)] * len(mine)
                pairs = zip(mine, others, strict=True) if others else ()
                cells.append(shown([a / b for a, b in pairs if b]))
            if any(cells):
                rows.append([f"{ours} / {peer}", *cells])
    return table(("CPU", "whole", "chunks", "paced"), rows)


def show(results: Results) -> None:
    """The tables, in Markdown."""
    print(f"\n{peer_table(results)}\n\n{ratio_table(results)}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--only", default=PEERS, help="gateways")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--peers", type=Path, default=VENV, metavar="VENV")
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
