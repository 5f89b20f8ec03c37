"""Is the simulator true? The same requests through a real gateway and a real worker process, and simulated.

    python -m bench.sim.fidelity [--seconds 600] [--rate 3] [--seed 1] [--json FILE]

The real worker computes nothing: its runner takes the time that the roofline says (modelled_runner.py of
tests/doubles); all else is the product's own. Compared: TTFT p50 and p95, TPOT, output tokens per second
(goal: within 10 %), and counters (equal; cached tokens within 2 %: which of two requests at one instant goes
first is not modelled).
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop
from modelled_runner import RUNNER, Modelled, OnDevice, modelled_worker

from bench.harness import REPOSITORY, command_line, table, write_result
from bench.process import Process, free_port
from penstock import rng
from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.bench.load import LoadTally, Stopwatch
from penstock.clock import NS_PER_MS, NS_PER_S, SystemClock, sleep
from penstock.config.engine_settings import EngineSettings
from penstock.planning.roofline import Placed, accelerator, model_shape
from penstock.protocol.address import WorkerLaunch
from penstock.sim.scenarios.scenario import pool
from penstock.sim.scenarios.setup import Knobs, Setup, play
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.traffic.workload import Callers, Conversations, LengthDistribution, Poisson, even, merged
from penstock.sim.world.run import WorldSpec

MODEL, DEVICE, MAX_RUNNING, STEP_TOKENS, MODEL_LEN = "7b", "a10g", 32, 512, 16_384
FIRST_TOKEN, ANSWER_TOKEN = 400, 300
GOAL = 0.10


def source(rate: float) -> Conversations:
    """Conversations of one tenant."""
    return Conversations(
        arrivals=Poisson(rate / 3), callers=Callers(model="m", tenants=even(1)), system_tokens=160, turns=3.0,
        think_s=5.0, message=LengthDistribution(200, 0.7, maximum=2048),
        output=LengthDistribution(50, 0.6, maximum=256), context_max=6000,
    )  # fmt: skip


def simulated(args: argparse.Namespace) -> dict[str, float]:
    knobs = Knobs(max_running=MAX_RUNNING, step_tokens=STEP_TOKENS)
    main = pool(knobs, workers=1, shape=MODEL, device=DEVICE)
    main = replace(main, model="m", worker=replace(main.worker, max_model_len=MODEL_LEN))
    setup = Setup(world=WorldSpec(pools=(main,)), sources=(source(args.rate),), seconds=args.seconds)
    played = play(setup, args.seed)
    found, counters = played.figures, played.result.counters
    return {
        "requests": found.requests, "answered": found.outcomes.get("finished", 0),
        "prompt_tokens": counters.prompt_tokens, "cached_tokens": counters.cached_tokens,
        "output_tokens": counters.completion_tokens, "ttft_p50_ms": found.ttft_ms.p50,
        "ttft_p95_ms": found.ttft_ms.p95, "tpot_p50_ms": found.tpot_ms.p50,
        "tokens_per_s": found.throughput_tps,
    }  # fmt: skip


def body(request: SimRequest) -> bytes:
    """As HTTP has it. Every second segment from the third on is an earlier answer, of the one token that the
    modelled engine says.
    """
    prompt: list[int] = []
    for index, segment in enumerate(request.prompt):
        draw = rng.stream(segment.content, "content")
        is_answer = index > 1 and index % 2 == 0
        prompt += [
            ANSWER_TOKEN if is_answer else FIRST_TOKEN + draw.getrandbits(13) for _ in range(segment.tokens)
        ]
    fields = {
        "model": "m", "prompt": prompt, "max_tokens": request.output_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return msgspec.json.encode(fields)


async def real_load(args: argparse.Namespace, url: str) -> dict[str, float]:
    clock, tally = SystemClock(), LoadTally(args.seed)
    client = Client(ApiAddress.parse(url), limits=ClientLimits(request_timeout_s=600))
    requests = [(each.at_ns, body(each)) for each in merged([source(args.rate)], args.seed, args.seconds)]
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
    assert not tally.errors, tally.errors
    ttft = tally.ttft.summary()
    return {
        "requests": len(requests), "answered": tally.ok, "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens, "output_tokens": tally.output_tokens,
        "ttft_p50_ms": ttft.p50 / NS_PER_MS, "ttft_p95_ms": ttft.p95 / NS_PER_MS,
        "tpot_p50_ms": tally.tpot.summary().p50 / NS_PER_MS, "tokens_per_s": tally.output_tokens / seconds,
        "send_delay_p99_ms": tally.send_delay.summary().p99 / NS_PER_MS,
    }  # fmt: skip


async def wait_ready(url: str, place: Path) -> None:
    client, asked = Client(ApiAddress.parse(url)), b'{"model": "m", "prompt": [400], "max_tokens": 1}'
    for _ in range(600):
        with contextlib.suppress(Exception):
            if (await client.post("/completions", asked)).status == 200:
                return await client.close()
        await sleep(0.2)
    raise SystemExit((place / "worker.log").read_text() + (place / "gateway.log").read_text())


def real(args: argparse.Namespace) -> dict[str, float]:
    """A worker process with the modelled runner, and a gateway process in front."""
    placed = Placed(model=model_shape(MODEL), device=accelerator(DEVICE))
    speed = OnDevice(model=MODEL, device=DEVICE)
    modelled = Modelled(speed=speed, num_blocks=placed.num_blocks, max_model_len=MODEL_LEN)
    engine = EngineSettings(max_running=MAX_RUNNING, step_tokens=STEP_TOKENS, overlap="off")
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        place, port = Path(name), free_port()
        launch = WorkerLaunch(
            model_path="modelled", model_name="m", address=f"unix:{name}/worker.sock",
            hash_key=b"fidelity" * 4, engine=engine, runner=RUNNER,
        )  # fmt: skip
        script = (
            sys.executable,
            str(REPOSITORY / "bench/relay/gateway.py"),
            f"{name}/worker.sock",
            str(port),
        )
        with modelled_worker(place, launch, modelled.environment()):
            gateway = Process(*script, "access,auth", log=place / "gateway.log", PYTHONPATH=str(REPOSITORY))

            async def run() -> dict[str, float]:
                url = f"http://127.0.0.1:{port}/v1"
                await wait_ready(url, place)
                return await real_load(args, url)

            try:
                return uvloop.run(run())
            finally:
                gateway.end()


def is_good(name: str, ratio: float) -> bool:
    """Whether the simulated figure over the real one is near enough to 1."""
    within = 0.02 if name == "cached_tokens" else GOAL if name.endswith(("_ms", "_per_s")) else 0.0
    return abs(ratio - 1) <= within


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of arrivals (the goal is of 600)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    sim, was = simulated(args), real(args)
    ratios = {name: value / was[name] if was[name] else float(value == 0) for name, value in sim.items()}
    off = [name for name, ratio in ratios.items() if not is_good(name, ratio)]
    rows = [
        (name, f"{was[name]:.1f}", f"{value:.1f}", f"{ratios[name]:.3f}{' OFF' if name in off else ''}")
        for name, value in sim.items()
    ]
    print(table(("", "real", "simulated", "ratio"), rows))
    print(f"the load client sent up to {was['send_delay_p99_ms']:.1f} ms late (p99)")
    write_result(args.json, {"real": was, "simulated": sim, "ratios": ratios, "off": off})
    return min(1, len(off))


if __name__ == "__main__":
    sys.exit(main())
