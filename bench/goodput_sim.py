"""Goodput by load in the simulator, with default promises and without any, side by side.

    python bench/goodput_sim.py [--loads 0.6,0.8,1,2,5,20] [--seeds 2] [--json FILE]

Goodput is requests per second that kept both promises, and their output tokens per second
(sim/scenarios/overload.py): mixed bands, tenants and lengths; loads are multiples of the knee and count first
attempts. Both sides are held against the same default promises. "no promises" sets `admission.ttft_target_ms`
and `tpot_target_ms` to 0, as defaults were before. Clients either take no for an answer, or come again three
times: half of them when they were told to, half after a second.
"""

import argparse
from collections.abc import Iterator

import msgspec
from provenance import add_json_option, write_result

from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.sim.scenarios.overload import drained_s, goodput_of, mixed
from penstock.sim.scenarios.setup import Knobs, play

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", default="0.6,0.8,1,2,5,20")
    parser.add_argument("--seeds", type=int, default=2)
    add_json_option(parser)
    args = parser.parse_args()
    found: list[dict[str, float | str]] = []
    for row in rows([float(load) for load in args.loads.split(",")], args.seeds):
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
