"""The worth of placing adapters on demand, in real processes: 200 adapters (Zipf) on four workers with room
for 20 each.

    python -m bench.engine.lora_zipf [--load-s 0.25] [--rate 24] [--seconds 60] [--rounds 1] [--json FILE]

`penstock serve` with four engine processes of the small demo model, clients over HTTP, and the same requests
for both policies: `placed`, as it is, and `loaded`, the least busy of the workers that have the adapter in
memory, else of all (`RouteToLoaded` of `lora_placement.py`, which is the simulator's run of the same).
A wait is what a request waited for its adapter at its worker; `wait_in_loads`, in units of a load, and counts
of loads say more on a busy machine. `adapters_beyond`: of the requests that counted, those for none of the 80
most wanted adapters; they wait with any policy that loads what is asked for. First the places fill, for
`--warm-s` at `--warm-rate`, while loads take what they take: as many requests as the simulator's run has
before it counts would take four minutes else. Then reading an adapter again takes `--load-s`, and after ten
seconds of that waits count.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from free_port import free_port

from bench.engine.lora_loading import make_adapter
from bench.engine.lora_placement import ADAPTERS, POLICIES, SLOTS, WORKERS, RouteToLoaded
from bench.engine.lora_zipf_worker import SLOW
from bench.harness import REPOSITORY, command_line, write_result
from penstock.engine.adapters.compute import adapter_reader
from penstock.engine.native import NativeLibrary
from penstock.models.registry import read_spec
from penstock.rng import stream

MODEL = REPOSITORY / "models" / "penstock-demo-mini"
DIRECTORIES, RANK = 4, 8
START_S = 180.0
SETTLING_S = 10.0
"""Between the first slow load and the first request that counts."""


def serve(policy: str, config: str) -> None:
    """In a process of its own: `penstock serve`, with our worker and this policy."""
    from penstock.protocol import address

    address.REAL_RUNNER = "bench.engine.lora_zipf_worker:build_runner"
    from penstock.cli.main import main as penstock
    from penstock.gateway.dispatch.assemble import Placements

    if policy == "loaded":
        Placements.of = lambda self, route: RouteToLoaded()
    sys.exit(penstock(["serve", "-c", config, "--no-auth"]))


def written(place: Path, port: int) -> Path:
    """The configuration."""
    spec, _ = read_spec(MODEL)
    made = [make_adapter(place / f"lora{i}", spec, RANK) for i in range(DIRECTORIES)]
    reader = adapter_reader(spec, torch.bfloat16, 64, NativeLibrary(), bytes_max=1 << 30)
    size = reader.read(made[0])[1].num_bytes  # In memory: padded, so more than in its file.
    config = {
        "server": {"port": port, "lameduck_s": 0},
        "admission": {"ttft_target_ms": 0},  # Nobody is turned away.
        "models": [
            {
                "path": str(MODEL),
                "replicas": WORKERS,
                "adapters": {f"lora-{i}": str(made[i % DIRECTORIES]) for i in range(ADAPTERS)},
                "engine": {
                    "threads": 1, "max_running": 32, "kv_memory_bytes": 64 << 20, "adapter_slots": SLOTS,
                    "adapter_memory_bytes": size * SLOTS,
                },
            }
        ],
    }  # fmt: skip
    path = place / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML.
    return path


async def first_token_s(port: int, adapter: int, number: int) -> float:
    """The seconds to a request's first token; read to its end."""
    message = {"role": "user", "content": f"Say the number {number}."}
    body = json.dumps(
        {"model": f"lora-{adapter}", "messages": [message], "max_tokens": 8, "stream": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    begun, first_s = time.monotonic(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
    assert b" 200 " in await reader.readline(), "refused"
    while line := await reader.readline():
        if not first_s and b'"content":"' in line.replace(b'"content":""', b""):
            first_s = time.monotonic() - begun
    writer.close()
    return first_s or time.monotonic() - begun


async def ask_all(
    port: int, args: argparse.Namespace, seed: int, slow: Path
) -> tuple[float, list[float], list[int]]:
    """When requests began to count; of those that did, the seconds to the first token, and the adapters."""
    random, weights = stream(seed, "lora zipf"), [1 / (i + 1) for i in range(ADAPTERS)]
    counted, ttfts = time.time() + args.warm_s + SETTLING_S, list[float]()
    asked: list[int] = []

    async def one(adapter: int, number: int) -> None:
        counts = time.time() >= counted
        took_s = await first_token_s(port, adapter, number)
        if counts:
            ttfts.append(took_s)
            asked.append(adapter)

    async with asyncio.TaskGroup() as group:
        begun, due, number = time.monotonic(), 0.0, 0
        while (
            due := due + random.expovariate(args.rate if due > args.warm_s else args.warm_rate)
        ) < args.warm_s + args.seconds:
            await asyncio.sleep(max(0.0, begun + due - time.monotonic()))
            if due > args.warm_s:
                slow.touch()
            [adapter] = random.choices(range(ADAPTERS), weights)
            group.create_task(one(adapter, number))
            number += 1
    return counted, ttfts, asked


def wait_ready(log: Path, port: int, child: "subprocess.Popen[bytes]") -> None:
    """Until requests are taken, and each worker has read each adapter once."""
    until = time.monotonic() + START_S
    while log.read_bytes().count(b" is loaded: ") < WORKERS * ADAPTERS:
        assert child.poll() is None, "the server ended"
        assert time.monotonic() < until, "the workers have not read all adapters"
        time.sleep(0.2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
        pass


def run(policy: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run's figures, in seconds."""
    with tempfile.TemporaryDirectory() as made:
        place, port = Path(made), free_port()
        paths = os.pathsep.join([str(REPOSITORY)])
        environment = {
            **os.environ,
            "BENCH_LOAD_S": str(args.load_s),
            "BENCH_PLACE": made,
            "PYTHONPATH": paths,
            "PENSTOCK_STATE_DIR": made,
        }
        with (place / "log").open("wb") as log:
            child = subprocess.Popen(
                (sys.executable, "-m", __spec__.name, "--serve", policy, str(written(place, port))),
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait_ready(place / "log", port, child)
            counted, ttfts, asked = asyncio.run(ask_all(port, args, seed, place / SLOW))
        except BaseException:
            print((place / "log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            child.terminate()
            child.wait(30)
        lines = [line.split() for file in place.glob("noted-*") for line in file.read_text().splitlines()]
    noted = [
        (kind, int(took_ns) / 1e9, awaited == "1")
        for when, kind, took_ns, awaited in lines
        if float(when) >= counted
    ]
    return figures(noted) | {
        "adapters_beyond": round(statistics.mean(each >= WORKERS * SLOTS for each in asked), 4),
        "ttft_mean": round(statistics.mean(ttfts), 4),
    }


def figures(noted: list[tuple[str, float, bool]]) -> dict[str, float]:
    """Of the workers' notes that count."""
    waits = [took_s for kind, took_s, _ in noted if kind == "request"]
    loads = [took_s for kind, took_s, _ in noted if kind == "load"]
    wait_s, load_s = statistics.mean(waits), statistics.mean(loads)
    return {
        "requests": len(waits),
        "wait_mean": round(wait_s, 4),
        "wait_in_loads": round(wait_s / load_s, 4),
        "waited": round(sum(waited for kind, _, waited in noted if kind == "request") / len(waits), 4),
        "loads": len(loads),
        "awaited_loads": sum(waited for kind, _, waited in noted if kind == "load"),
        "load_mean": round(load_s, 4),
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    parser = command_line(__doc__, rounds=1)
    parser.add_argument("--load-s", type=float, default=0.25, help="one load takes")
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-s", type=float, default=40.0)
    parser.add_argument("--warm-rate", type=float, default=72.0)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for seed in range(args.rounds):
        for policy in POLICIES:
            found[policy].append(run(policy, args, seed))
            print(policy, found[policy][-1], flush=True)
    pairs = list(zip(found["placed"], found["loaded"], strict=True))
    ratios = {
        name: [round(new[name] / old[name], 3) for new, old in pairs]
        for name in ("wait_mean", "wait_in_loads", "waited", "ttft_mean")
    }
    print(ratios)
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    write_result(args.json, {"settings": settings, "runs": found, "ratios": ratios})


if __name__ == "__main__":
    main()
