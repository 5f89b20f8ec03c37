"""The worth of placing adapters on demand: 200 adapters (Zipf) on four workers with room for 20 each.

    python -m bench.engine.lora_placement [--seeds N] [--seconds S] [--rate R] [--json FILE]

The real flow control, placement, adapter pools and engine schedulers in the simulator; only the time of a
step and of a load is modelled. The baseline, `loaded`, is what routers do elsewhere: the least busy of the
workers that have the adapter in memory, else the least busy of all. A wait is what a request waited for its
adapter at its worker. Both policies have the same requests; ratios are within a seed, over seeds: median
and range. The first half of a run, in which every adapter is read once and the pools fill, does not count.
"""

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.policy.placement.pick import LeastLoaded
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, WorkerCapacity
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, even, merged
from penstock.sim.world.adapters import SimAdapterSpec
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World
from penstock.types import WorkerId

WORKERS, SLOTS, ADAPTERS = 4, 20, 200
POLICIES = ("loaded", "placed")


class RouteToLoaded(LeastLoaded):
    """Where the adapter is in memory, else anywhere; the least busy each time."""

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | None:
        """See `Placement`."""
        able = [
            worker for worker in workers if worker.fits(work) and not worker.held and worker.id not in blocked
        ]
        has = [worker for worker in able if work.adapter in (worker.view.adapters or ())]
        return min(has or able, key=lambda worker: (worker.booked, worker.turn), default=None)


def spec_of(policy: str, seed: int, load_s: float) -> WorldSpec:
    """Four workers behind one gateway."""
    adapters = SimAdapterSpec(
        names=tuple(f"lora-{i}" for i in range(ADAPTERS)), slots=SLOTS, read_ns=int(load_s * 1e9)
    )
    worker = SimWorkerSpec(engine=EngineSettings(step_tokens=2048, max_running=32), adapters=adapters)
    return WorldSpec(
        seed=seed,
        config=Config(admission=AdmissionConfig(ttft_target_ms=0)),  # Nobody is turned away.
        pools=(PoolSpec(worker=worker, count=WORKERS),),
        placement=None if policy == "placed" else lambda _: RouteToLoaded(),
    )


def workload(seed: int, rate: float, seconds: float) -> list[SimRequest]:
    """Short questions, each to one adapter."""
    source = Chat(
        name="lora",
        arrivals=Poisson(rate),
        callers=Callers(tenants=even(8), adapters=ADAPTERS),
        prompt=LengthDistribution(250, 0.7, maximum=2048),
        output=LengthDistribution(100, 0.7, maximum=512),
        system_tokens=64,
    )
    return list(merged([source], seed, seconds))


def run(policy: str, seed: int, requests: Sequence[SimRequest], load_s: float) -> dict[str, float]:
    """One run's figures, in seconds."""
    world = World(spec_of(policy, seed, load_s), iter(requests))
    result = world.run()
    from_ns = requests[-1].at_ns // 2
    pools = [member.worker.adapters for member in world.members.values()]
    waits = sorted(
        wait_ns / 1e9
        for pool in pools
        if pool is not None
        for when_ns, wait_ns in pool.waits_ns
        if when_ns >= from_ns
    )
    ttfts = sorted(
        record.ttft_ns / 1e9 for record in result.records if record.first_ns >= 0 and record.at_ns >= from_ns
    )
    return {
        "wait_mean": sum(waits) / len(waits),
        "wait_p95": waits[int(0.95 * len(waits))],
        "waited": sum(wait > 0 for wait in waits) / len(waits),
        "loads": sum(pool.num_reads for pool in pools if pool is not None) - WORKERS * ADAPTERS,
        "ttft_mean": sum(ttfts) / len(ttfts),
        "ttft_p95": ttfts[int(0.95 * len(ttfts))],
        "answered": result.counters.finished / result.counters.arrived,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def main() -> None:
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second")
    parser.add_argument("--load-s", type=float, nargs="*", default=[0.1, 0.25, 0.5], help="one load takes")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    table: dict[str, object] = {}
    for load_s in args.load_s:
        found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for seed in range(args.seeds):
            requests = workload(seed, args.rate, args.seconds)
            for policy in POLICIES:
                found[policy].append(run(policy, seed, requests, load_s))
        rows = {
            policy: {name: spread([each[name] for each in runs]) for name in runs[0]}
            for policy, runs in found.items()
        }
        ratios = {
            f"{name}_ratio": spread(
                [new[name] / old[name] for new, old in zip(found["placed"], found["loaded"], strict=True)]
            )
            for name in ("wait_mean", "wait_p95", "ttft_mean", "ttft_p95")
        }
        table[f"load_{load_s:g}_s"] = rows | {"ratios": ratios}
        for name, row in (rows | {"ratios": ratios}).items():
            cells = [
                f"{key} {each['median']:.3f} ({each['min']:.3f}-{each['max']:.3f})"
                for key, each in row.items()
            ]
            print(f"{load_s:g} s {name:>7}: " + "  ".join(cells))
    if args.json:
        reported = {"command": "python " + " ".join(sys.argv), "rate": args.rate, "seeds": args.seeds}
        Path(args.json).write_text(json.dumps(reported | table, indent=1) + "\n")


if __name__ == "__main__":
    main()
