"""The simulator beside the real stack: the same requests through a real gateway process and a real worker
process, and simulated.

    python -m bench.sim.fidelity [--seconds 120] [--rate 3] [--seed 1] [--trace FILE [--speed X]] [--json
    FILE]
    python -m bench.sim.fidelity --seconds 600 --json docs/results/sim-fidelity.json
        the goal's ten minutes, on a quiet machine

The real worker computes nothing: its runner takes the time that the roofline says (modelled_runner.py);
scheduler, block pool, prefix cache, sockets, gateway, queue, tokenizer and HTTP are the product's own. The
simulated side has the same configuration and the same roofline. The load client runs in this process, so give
the machine a core for each of the three.

Compared: TTFT p50 and p95, output tokens per second (goal: within 10 %), and counters (requests, answered,
prompt and output tokens equal; cached tokens within 2 %: which of two requests at the same instant goes first
is not modelled).
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from bench.harness import command_line
from bench.process import Process, free_port
from bench.sim.modelled_runner import RUNNER, VOCAB_SIZE, Modelled, OnDevice, modelled_worker
from penstock import rng
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.bench.load import LoadTally, Stopwatch
from penstock.clock import NS_PER_MS, NS_PER_S, SystemClock, sleep
from penstock.config.engine_settings import EngineSettings
from penstock.planning.roofline import Placed, accelerator, model_shape
from penstock.protocol.address import WorkerLaunch
from penstock.sim.scenarios.scenario import pool
from penstock.sim.scenarios.setup import Knobs, Setup, play
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.traffic.traces import Trace
from penstock.sim.traffic.workload import (
    Callers,
    Conversations,
    LengthDistribution,
    Poisson,
    TrafficSource,
    even,
    merged,
)
from penstock.sim.world.run import WorldSpec

REPOSITORY = Path(__file__).parents[2]
MODEL, DEVICE, MAX_RUNNING, STEP_TOKENS = "7b", "a10g", 32, 512
MODEL_LEN = 16_384
FIRST_TOKEN = 400
GOAL = 0.10


def source(args: argparse.Namespace) -> TrafficSource:
    """The traffic: a trace, or conversations of one tenant."""
    callers = Callers(model="m", tenants=even(1))
    if args.trace is not None:
        return Trace(path=args.trace, callers=callers, speed=args.speed, prompt_max=MODEL_LEN - 1024)
    return Conversations(
        arrivals=Poisson(args.rate / 3), callers=callers, system_tokens=160, turns=3.0, think_s=5.0,
        message=LengthDistribution(200, 0.7, maximum=2048), output=LengthDistribution(50, 0.6, maximum=256),
        context_max=6000,
    )  # fmt: skip


def modelled() -> Modelled:
    placed = Placed(model=model_shape(MODEL), device=accelerator(DEVICE))
    speed = OnDevice(model=MODEL, device=DEVICE)
    return Modelled(speed=speed, num_blocks=placed.num_blocks, max_model_len=MODEL_LEN)


# --- the simulated side -------------------------------------------------------------------------------


def simulated(args: argparse.Namespace) -> dict[str, float]:
    main = pool(
        Knobs(max_running=MAX_RUNNING, step_tokens=STEP_TOKENS), workers=1, shape=MODEL, device=DEVICE
    )
    main = replace(main, model="m", worker=replace(main.worker, max_model_len=MODEL_LEN))
    played = play(
        Setup(world=WorldSpec(pools=(main,)), sources=(source(args),), seconds=args.seconds), args.seed
    )
    found, counters = played.figures, played.result.counters
    return {
        "requests": found.requests, "answered": found.outcomes.get("finished", 0),
        "prompt_tokens": counters.prompt_tokens, "cached_tokens": counters.cached_tokens,
        "output_tokens": counters.completion_tokens, "ttft_p50_ms": found.ttft_ms.p50,
        "ttft_p95_ms": found.ttft_ms.p95, "tpot_p50_ms": found.tpot_ms.p50,
        "tokens_per_s": found.throughput_tps,
    }  # fmt: skip


# --- the real side ------------------------------------------------------------------------------------


def tokens_of(segment: Segment) -> list[int]:
    """Made-up token ids of a content: the same at every call."""
    draw = rng.stream(segment.content, "content")
    return [FIRST_TOKEN + draw.getrandbits(13) for _ in range(segment.tokens)]


def body(request: SimRequest, *, has_answers: bool) -> bytes:
    """The HTTP body. `has_answers`: every second segment from the third on is an earlier answer.

    The modelled engine answers with one token only, so what was answered is not repeated exactly: the
    answer's segment is that token, as often as it was said.
    """
    prompt: list[int] = []
    for index, segment in enumerate(request.prompt):
        is_answer = has_answers and index > 1 and index % 2 == 0
        prompt += [300] * segment.tokens if is_answer else tokens_of(segment)
    assert max(prompt) < VOCAB_SIZE
    return msgspec.json.encode(
        {
            "model": "m", "prompt": prompt, "max_tokens": request.output_tokens, "stream": True,
            "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip


async def real_load(args: argparse.Namespace, url: str) -> dict[str, float]:
    clock, tally = SystemClock(), LoadTally(args.seed)
    client = Client(ApiAddress.parse(url), limits=ClientLimits(request_timeout_s=600))
    requests = [
        (each.at_ns, body(each, has_answers=args.trace is None))
        for each in merged([source(args)], args.seed, args.seconds)
    ]
    first_ns = clock.now_ns() + NS_PER_S

    async def one(due_ns: int, content: bytes) -> None:
        stopwatch = Stopwatch(tally, clock, due_ns)
        tally.send_delay.add(max(0, clock.now_ns() - due_ns))
        stopwatch.settle(await client.post("/completions", content, stopwatch))

    async with asyncio.TaskGroup() as group:
        for at_ns, content in requests:
            await sleep(max(0, first_ns + at_ns - clock.now_ns()) / NS_PER_S)
            group.create_task(one(first_ns + at_ns, content))
    seconds = (clock.now_ns() - first_ns - requests[0][0]) / NS_PER_S
    await client.close()
    ttft, tpot, late = tally.ttft.summary(), tally.tpot.summary(), tally.send_delay.summary()
    assert not tally.errors, tally.errors
    return {
        "requests": len(requests), "answered": tally.ok, "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens, "output_tokens": tally.output_tokens,
        "ttft_p50_ms": ttft.p50 / NS_PER_MS, "ttft_p95_ms": ttft.p95 / NS_PER_MS,
        "tpot_p50_ms": tpot.p50 / NS_PER_MS, "tokens_per_s": tally.output_tokens / seconds,
        "send_delay_p99_ms": late.p99 / NS_PER_MS,
    }  # fmt: skip


@contextlib.contextmanager
def real_stack(place: Path) -> Iterator[str]:
    """A worker process with the modelled runner, and a gateway process in front; yields the URL."""
    port, address = free_port(), f"unix:{place / 'worker.sock'}"
    launch = WorkerLaunch(
        model_path="modelled", model_name="m", address=address, hash_key=b"fidelity" * 4,
        engine=EngineSettings(max_running=MAX_RUNNING, step_tokens=STEP_TOKENS, overlap="off"),
        runner=RUNNER,
    )  # fmt: skip
    environ = modelled().environment(str(REPOSITORY))
    script, features = REPOSITORY / "bench/relay/gateway.py", "access,auth"
    command = (sys.executable, str(script), str(place / "worker.sock"), str(port), features)
    with modelled_worker(place, launch, environ):
        gateway = Process(*command, log=place / "gateway.log", **environ)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            gateway.end()


async def wait_ready(url: str, place: Path) -> None:
    client = Client(ApiAddress.parse(url))
    for _ in range(600):
        with contextlib.suppress(Exception):
            response = await client.post(
                "/completions", b'{"model": "m", "prompt": [400], "max_tokens": 1, "stream": false}'
            )
            if response.status == 200:
                await client.close()
                return
        await sleep(0.2)
    raise SystemExit((place / "worker.log").read_text() + (place / "gateway.log").read_text())


def real(args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name, real_stack(Path(name)) as url:

        async def run() -> dict[str, float]:
            await wait_ready(url, Path(name))
            return await real_load(args, url)

        return uvloop.run(run())


# --- side by side -------------------------------------------------------------------------------------


def verdicts(sim: dict[str, float], was: dict[str, float]) -> dict[str, tuple[float, bool]]:
    """Per figure the simulated over the real, and whether that is good enough."""
    found: dict[str, tuple[float, bool]] = {}
    for name, value in sim.items():
        ratio = value / was[name] if was[name] else float(value == 0)
        within = 0.02 if name == "cached_tokens" else GOAL if name.endswith(("_ms", "_per_s")) else 0.0
        found[name] = (ratio, abs(ratio - 1) <= within)
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of arrivals (the goal is stated for 600)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second of the made traffic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=1.0)
    args = parser.parse_args()
    sim = simulated(args)
    was = real(args)
    found = verdicts(sim, was)
    print(f"{'':16}{'real':>12}{'simulated':>12}{'ratio':>9}")
    for name, value in sim.items():
        ratio, good = found[name]
        print(f"{name:16}{was[name]:12.1f}{value:12.1f}{ratio:9.3f}  {'' if good else 'OFF'}")
    print(f"the load client sent up to {was['send_delay_p99_ms']:.1f} ms late (p99)")
    if args.json is not None:
        reported = {
            "seconds": args.seconds, "seed": args.seed, "rate": args.rate, "trace": str(args.trace or ""),
            "real": was, "simulated": sim,
            "ratios": {name: round(ratio, 4) for name, (ratio, _) in found.items()},
            "off": [name for name, (_, good) in found.items() if not good],
        }  # fmt: skip
        args.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 0 if all(good for _, good in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
