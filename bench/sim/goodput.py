"""Goodput by load in the simulator, with default promises and without any, side by side.

    python -m bench.sim.goodput [--loads 0.6,0.8,1,2,5,20] [--seeds 2] [--json FILE]
    python -m bench.sim.goodput --clients --loads 5,20 --seeds 10 [--jobs 2]     by what refused clients do

Goodput is requests per second that met both promises (TTFT and TPOT), and their output tokens per second
(tests/doubles/mixed_load.py): mixed bands, tenants and lengths; loads are multiples of the knee and count
first attempts. Both sides are held against the same default promises. "no promises" sets
`admission.ttft_target_ms` and `tpot_target_ms` to 0, as defaults were before. Clients either take no for an
answer, or come again three times: half of them when they were told to, half after a second. With `--clients`
only "defaults" is played, once with clients that take no for an answer, once with such as all obey
`Retry-After`, and once with such as all come again after a second whatever they were told; shares are of the
mean goodput at the knee.
"""

import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import msgspec
from mixed_load import drained_s, goodput_of, mixed

from bench.harness import command_line, write_result
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.sim.scenarios.setup import Knobs, play
from penstock.sim.traffic.workload import Chat

SIDES = {
    "no promises": AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=()),
    "defaults": AdmissionConfig(),
}


def rows(loads: list[float], seeds: int) -> Iterator[dict[str, float | str]]:
    """One for each side, kind of client and load: means over the seeds."""
    for side, admission in SIDES.items():
        for retries in (0, 3):
            for load in loads:
                knobs = Knobs(load=load, config=msgspec.structs.replace(Config(), admission=admission))
                runs = [play(mixed(knobs, retries=retries), seed) for seed in range(1, seeds + 1)]
                good = [goodput_of(run) for run in runs]
                yield {
                    "side": side, "retries": retries, "load": load,
                    "goodput_rps": sum(each[0] for each in good) / seeds,
                    "goodput_tps": sum(each[1] for each in good) / seeds,
                    "throughput_tps": sum(run.figures.throughput_tps for run in runs) / seeds,
                    "drained_s": max(drained_s(run) for run in runs),
                    "ttft_p95_ms": max(run.figures.ttft_ms.p95 for run in runs),
                }  # fmt: skip


CLIENTS = {"leave": (0, 0.0), "obey Retry-After": (3, 0.0), "come again after 1 s": (3, 1.0)}
"""How often refused clients come again, and after how long; 0 s: when they were told to."""


def with_clients(job: tuple[str, float, int]) -> tuple[float, float, float, float]:
    """One run: goodput in requests and tokens per second, seconds until the queue is empty, and the
    requests that came per first attempt.
    """
    clients, load, seed = job
    retries, retry_s = CLIENTS[clients]
    made = mixed(Knobs(load=load), retries=retries)
    sources = [
        replace(source, callers=replace(source.callers, retry_s=retry_s))
        for source in made.sources
        if isinstance(source, Chat)
    ]
    assert len(sources) == len(made.sources), "the mixed load is of chats"
    run = play(replace(made, sources=tuple(sources)), seed)
    first = sum(not record.is_retry for record in run.records)
    return (*goodput_of(run), round(drained_s(run), 2), round(len(run.records) / first, 2))


def client_rows(loads: list[float], seeds: int, jobs: int) -> Iterator[dict[str, object]]:
    """One for each kind of client and load, with the spread over the seeds."""
    pairs = [("leave", 1.0), *((clients, load) for clients in CLIENTS for load in loads)]
    tasks = [(*pair, seed) for pair in pairs for seed in range(1, seeds + 1)]
    peak = 0.0
    with ProcessPoolExecutor(jobs) as pool:
        runs = pool.map(with_clients, tasks)
        for clients, load in pairs:
            found = [next(runs) for _ in range(seeds)]
            rps = [run[0] for run in found]
            peak = peak or statistics.mean(rps)
            yield {
                "clients": clients, "load": load, "goodput_rps": statistics.mean(rps),
                "goodput_rps_min": min(rps), "goodput_rps_max": max(rps),
                "share_of_knee": statistics.mean(rps) / peak,
                "goodput_tps": statistics.mean(run[1] for run in found),
                "drained_s": max(run[2] for run in found),
                "attempts_per_request": statistics.mean(run[3] for run in found),
            }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--loads", default="0.6,0.8,1,2,5,20")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--clients", action="store_true", help="by what refused clients do")
    parser.add_argument("--jobs", type=int, default=2, help="processes, with --clients")
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    loads = [float(load) for load in args.loads.split(",")]
    played = client_rows(loads, args.seeds, args.jobs) if args.clients else rows(loads, args.seeds)
    for row in played:
        found.append(row)
        values = "  ".join(
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print(values, flush=True)
    if args.json:
        write_result(args.json, {"seeds": args.seeds, "rows": found})


if __name__ == "__main__":
    main()
