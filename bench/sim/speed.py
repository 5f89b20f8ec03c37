"""How many requests a second does one core simulate, and in how much memory? A table of both.

    python -m bench.sim.speed [--requests 4000 | --minutes 10] [--workers 64] [--json FILE]

Prompts have about 1,000 tokens, a fifth of them a prefix that the tenant's requests share; answers have about
200. Both vary by a factor of two either way. The step time is that of a middling accelerator; tokens may take
50 ms. Workers are loaded to 70%. Time is that of the processor, for others use the machine too; beside it
stands its ratio to a bare heap, which is asked in turn with the simulation: one push and pop for every event
that it had. Checkouts are compared, call by call, by `bench/sim/cost.py`. With `--minutes` requests come for
so many minutes of processor time, and it says how much memory there was after how many.
"""

import resource
import statistics
from collections.abc import Iterator
from heapq import heappop, heappush
from time import process_time

from bench.harness import command_line, table, write_result
from penstock import rng
from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.planning.step_time import LinearStepTime
from penstock.sim.traffic.prompts import RequestRecord, Segment, SimRequest
from penstock.sim.world.run import PoolSpec, SimResult, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World

ROWS = 64
STEP = LinearStepTime(fixed_ns=10_000_000, row_ns=60_000, prefill_ns=40_000, kv_ps=500)
PROMPT, OUTPUT, LOAD = 1000, 200, 0.7
LOOKS, LOOK_EVERY, HEAP_EVENTS = 16, 2000, 40_000
REQUESTS_MAX = 1_000_000
"""Within the minutes that are asked for."""


class Load:
    """Poisson arrivals of 100 tenants, so many or until a time; looks at the machine as it goes."""

    def __init__(self, requests: int, workers: int, *, until_s: float = 0.0) -> None:
        """`until_s` in seconds of this process."""
        self.requests, self.workers, self.until_s = requests, workers, until_s
        self.heap_s: list[float] = []
        """Processor seconds that one event of a bare heap takes, asked now and then."""
        self.looked_s = 0.0
        self.memory: list[tuple[int, float]] = []
        """(requests, GiB)."""

    def __iter__(self) -> Iterator[SimRequest]:
        random = rng.stream(1, "speed")
        # A request takes its prompt's time, and its share of the steps it decodes in.
        each_s = 1.082 * (PROMPT * 40_000 * 0.85 + OUTPUT * 15_000_000 / 32) / NS_PER_S
        per_s, at_s = LOAD * self.workers / each_s, 0.0
        for number in range(self.requests):
            if number % max(1, min(self.requests // LOOKS, LOOK_EVERY)) == 0:
                self._look(number)
                if self.until_s and process_time() > self.until_s:
                    return
            at_s += random.expovariate(per_s)
            tenant = random.randrange(100)
            prompt, output = (
                max(1, int(mean * 2 ** random.uniform(-1, 1))) for mean in (PROMPT * 0.8, OUTPUT)
            )
            segments = Segment(1 + tenant, PROMPT // 5), Segment(1000 + number, prompt)
            yield SimRequest(
                id=f"r{number}", at_ns=int(at_s * NS_PER_S), tenant=f"t{tenant}", prompt=segments,
                output_tokens=output,
            )  # fmt: skip

    def _look(self, number: int) -> None:
        began_s = process_time()
        heap: list[tuple[int, int]] = []
        for event in range(HEAP_EVENTS):
            heappush(heap, (event * 7919 % 100_003, event))
            if len(heap) > 1000:
                heappop(heap)
        spent_s = process_time() - began_s
        self.looked_s += spent_s
        self.heap_s.append(spent_s / HEAP_EVENTS)
        self.memory.append((number, gib()))


def gib() -> float:
    """Resident memory at most, until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def drop(_: RequestRecord) -> None:
    """Records are counted and hashed, and not kept."""


def simulate(load: Load) -> tuple[SimResult, float]:
    """The run, and its seconds of processor time."""
    engine = EngineSettings(step_tokens=2048, max_running=ROWS, itl_target_ms=50)
    worker = SimWorkerSpec(step_time=STEP, engine=engine, num_blocks=16_384)
    spec = WorldSpec(pools=(PoolSpec(worker=worker, count=load.workers),))
    world = World(spec, load, on_record=drop)
    began_s = process_time()
    result = world.run()
    return result, process_time() - began_s - load.looked_s


def figures(load: Load, result: SimResult, spent_s: float) -> dict[str, float]:
    """The figures of a run."""
    counters = result.counters
    heap_s = result.num_events * statistics.fmean(load.heap_s)
    return {
        "workers": load.workers,
        "requests": counters.arrived,
        "cpu_s": round(spent_s, 2),
        "requests_per_s": round(counters.arrived / spent_s, 1),
        "times_bare_heap": round(spent_s / heap_s, 1),
        "heap_events_per_request": round(spent_s / statistics.fmean(load.heap_s) / counters.arrived, 1),
        "events_per_request": round(result.num_events / counters.arrived, 2),
        "steps_per_request": round(counters.steps / counters.arrived, 2),
        "rows_per_step": round(counters.completion_tokens / max(1, counters.steps), 2),
        "virtual_s": round(result.virtual_ns / NS_PER_S, 2),
        "gib_max": round(gib(), 3),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=0.0, help="of requests, in place of a number")
    args = parser.parse_args()
    requests, until_s = args.requests, 0.0
    if args.minutes:
        requests, until_s = REQUESTS_MAX, process_time() + args.minutes * 60
    load = Load(requests, args.workers, until_s=until_s)
    said = figures(load, *simulate(load))
    print(table((f"{args.workers} workers", ""), said.items()))
    if args.minutes:
        print("GiB after so many requests:", load.memory[:: max(1, len(load.memory) // 8)])
    write_result(args.json, {"alone": said, "memory": load.memory})


if __name__ == "__main__":
    main()
