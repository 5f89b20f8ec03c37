"""How many requests a second the simulator runs through on one core, and where the time goes.

    python bench/sim_speed.py [--requests 5000] [--profile] [--fleet 1000 --fleet-requests 1000000]

Prompts have about 1,000 tokens, a fifth of them a prefix that the tenant's requests share; answers have about 200. Both vary by
a factor of two either way. The step time is that of a middling accelerator; tokens may take 50 ms. Workers are loaded to
70%. Beside the rate stands its ratio to a bare heap: one push and pop for every event that the simulation had.
"""

import argparse
import cProfile
import pstats
import resource
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from penstock import rng
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.tree import EngineConfig
from penstock.sim.request import RequestRecord, Segment, SimRequest
from penstock.sim.result import SimResult
from penstock.sim.spec import PoolSpec, WorldSpec
from penstock.sim.step_time import LinearStepTime
from penstock.sim.worker import WorkerSpec
from penstock.sim.world import World

CLOCK = SystemClock()
ROWS = 64
STEP = LinearStepTime(fixed_ns=10_000_000, row_ns=60_000, prefill_ns=40_000, kv_ps=500)
PROMPT, OUTPUT, LOAD = 1000, 200, 0.7


def load(requests: int, workers: int) -> Iterator[SimRequest]:
    """Poisson arrivals of 100 tenants."""
    random = rng.stream(1, "speed")
    # A request takes its prompt's time, and its share of the steps it decodes in.
    each_s = 1.082 * (PROMPT * 40_000 * 0.85 + OUTPUT * 15_000_000 / 32) / NS_PER_S
    per_s, at_s = LOAD * workers / each_s, 0.0
    for number in range(requests):
        at_s += random.expovariate(per_s)
        tenant = random.randrange(100)
        prompt, output = (max(1, int(mean * 2 ** random.uniform(-1, 1))) for mean in (PROMPT * 0.8, OUTPUT))
        yield SimRequest(
            id=f"r{number}",
            at_ns=int(at_s * NS_PER_S),
            tenant=f"t{tenant}",
            prompt=(Segment(1 + tenant, PROMPT // 5), Segment(1000 + number, prompt)),
            output_tokens=output,
        )


def simulate(requests: int, workers: int, *, leaps: bool = True) -> tuple[SimResult, float]:
    """The run, and its seconds of wall time. Records are counted and dropped."""
    engine = EngineConfig(step_tokens=2048, max_running=ROWS, itl_target_ms=50)
    worker = WorkerSpec(step_time=STEP, engine=engine, num_blocks=16_384, leaps=leaps)
    spec = WorldSpec(pools=(PoolSpec(worker=worker, count=workers),))
    world = World(spec, load(requests, workers), on_record=drop)
    began_ns = CLOCK.now_ns()
    result = world.run()
    return result, (CLOCK.now_ns() - began_ns) / NS_PER_S


def drop(_: RequestRecord) -> None:
    """Keep nothing."""


def bare_s(num_events: int) -> float:
    """Seconds that a heap takes for so many events and nothing else."""
    heap: list[tuple[int, int]] = []
    began_ns = CLOCK.now_ns()
    for number in range(num_events):
        heappush(heap, (number * 7919 % 100_003, number))
        if len(heap) > 1000:
            heappop(heap)
    return (CLOCK.now_ns() - began_ns) / NS_PER_S


def say(name: str, result: SimResult, spent_s: float) -> None:
    counters = result.counters
    rate, tokens = counters.arrived / spent_s, counters.completion_tokens / max(1, counters.steps)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(
        f"{name}: {counters.arrived} requests in {spent_s:.1f} s = {rate:,.0f}/s; {result.num_events / counters.arrived:.1f} events "
        f"and {counters.steps / counters.arrived:.1f} steps of {tokens:.1f} rows each; {result.virtual_ns / NS_PER_S / spent_s:.1f} "
        f"times as fast as time; {spent_s / bare_s(result.num_events):.0f} times a bare heap; {memory:.2f} GiB at most"
    )


def profile(requests: int, workers: int) -> None:
    """Which part of the code the time is spent in. The profiler makes calls dearer than they are: read it as shares."""
    profiler = cProfile.Profile()
    profiler.enable()
    simulate(requests, workers)
    profiler.disable()
    parts: dict[str, float] = defaultdict(float)
    stats = pstats.Stats(profiler)
    table: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = vars(stats)["stats"]
    for (path, _, _), (_, _, own_s, _, _) in table.items():
        _, _, inside = path.partition("penstock/")
        package = inside.rpartition("penstock/")[2] if inside else "built-in"
        parts[package] += own_s
    total = sum(parts.values())
    for name, spent_s in sorted(parts.items(), key=lambda part: -part[1])[:18]:
        print(f"  {spent_s / total:6.1%}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--fleet", type=int, default=0, help="workers of a second, large run")
    parser.add_argument("--fleet-requests", type=int, default=1_000_000)
    args = parser.parse_args()
    result, spent_s = simulate(args.requests, args.workers)
    say(f"{args.workers} workers", result, spent_s)
    stepped, stepped_s = simulate(args.requests // 10, args.workers, leaps=False)
    leapt, leapt_s = simulate(args.requests // 10, args.workers)
    assert stepped.digest == leapt.digest
    print(f"without leaps: {stepped_s / leapt_s:.1f} times as long, the same digest")
    if args.profile:
        profile(args.requests // 4, args.workers)
    if args.fleet:
        say(f"{args.fleet} workers", *simulate(args.fleet_requests, args.fleet))


if __name__ == "__main__":
    main()
