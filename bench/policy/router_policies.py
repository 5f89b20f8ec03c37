"""The worth of placement: prefix hit rate and time to first token on four workers, by policy.

    python -m bench.policy.router_policies [--json] [--seeds N] [--seconds S] [--trace FILE [--speed X]
                                           [--limit N]]

Runs the real flow control, placement, prefix index, engine scheduler and KV block pools in the simulator;
only the time of an engine's step is modelled. Policies beside ours: round robin, least-loaded, and an
approximate prefix router (the longest prefix that was sent there before, if it is over half of the prompt and
the worker is not overloaded: smg's rule). `ideal` is the hit rate of one cache without end. Without a trace
it makes conversations; a trace is a file in the format penstock-trace/1. Ratios are to round robin in the
same run, over seeds: median and range.
"""

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median

from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import PlacementConfig, RoutingConfig
from penstock.config.tree import Config
from penstock.kv.hashing import BlockHasher, PromptKeys, own_keys
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.worker_cache_view import KVIndexLimits
from penstock.policy.placement.pick import LeastLoaded
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import CapacityTable, Placement, WorkerCapacity
from penstock.policy.terms import QueueTerms
from penstock.sim.traffic.prompts import PromptBlockNames, Segment, SimRequest
from penstock.sim.traffic.traces import Trace
from penstock.sim.traffic.workload import Callers, Conversations, LengthDistribution, Poisson, even, merged
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World
from penstock.types import WorkerId

WORKERS = 4
KEY = b"bench/router_policies"
POLICIES = ("round_robin", "least_loaded", "approximate", "weighted", "ttft")


class RoundRobin(LeastLoaded):
    """Each worker in its turn, among those that the request fits on."""

    def __init__(self) -> None:
        self._next = 0

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | None:
        workers_now = list(workers)
        for i in range(len(workers_now)):
            worker = workers_now[(self._next + i) % len(workers_now)]
            if worker.fits(work) and not worker.held and worker.id not in blocked:
                self._next += i + 1
                return worker
        return None


class Approximate(LeastLoaded):
    """The worker that was sent most of this prompt before, unless that is little or the worker has far more
    to do than others.
    """

    def __init__(self) -> None:
        # Such a router keeps a tree of what was sent, bounded by its size and not by time.
        self._seen = KVLocality(KVIndexLimits(predicted_ttl_s=3600), KEY)

    def place(
        self,
        now_ns: int,
        work: Work,
        workers: CapacityTable,
        avoid: Collection[WorkerId],
        blocked: Collection[WorkerId],
    ) -> WorkerCapacity | None:
        assert isinstance(work.keys, PromptKeys)
        for worker in workers:
            if self._seen.get(worker.id) is None:
                self._seen.add(worker.id, model=work.keys.model, is_own=True)
                self._seen.identify(worker.id, worker.view.identity)
        best = next(iter(self._seen.match(now_ns, work.keys).holders(1)), None)
        if best is not None and best[1].blocks > work.keys.num_blocks / 2:
            worker, loads = workers.get(best[0]), [worker.booked for worker in workers]
            mean = sum(loads) / len(loads)
            if (
                worker is not None
                and worker.fits(work)
                and not (worker.booked > mean + 32 and worker.booked > 1.1 * mean)
            ):
                return worker
        return super().place(now_ns, work, workers, avoid, blocked)

    def started(self, now_ns: int, work: Work, worker: WorkerCapacity) -> None:
        self._seen.sent(now_ns, worker.id, work.keys)


def spec_of(policy: str, seed: int, worker: SimWorkerSpec) -> WorldSpec:
    """Four workers behind one gateway."""
    made: Callable[[], Placement] | None = {"round_robin": RoundRobin, "approximate": Approximate}.get(policy)
    named = policy if made is None else "ttft"
    once = None if made is None else made()
    config = Config(
        routing=RoutingConfig(placement=PlacementConfig(policy=named)),
        queue=QueueTerms(requests_max=100_000, bands=QueueTerms().bands),
    )
    return WorldSpec(
        seed=seed,
        config=config,
        pools=(PoolSpec(worker=worker, count=WORKERS),),
        placement=None if once is None else lambda _: once,
    )


def ideal_hit_rate(requests: Sequence[SimRequest]) -> float:
    """Of one cache that never forgets and knows every prompt as soon as it came, answers too."""
    names, seen, hits, total = PromptBlockNames(BlockHasher(key=KEY, identity="any")), set[int](), 0, 0
    for request in requests:
        keys = own_keys(names.chain(request.prompt, salt=request.tenant.encode(), adapter=request.adapter))
        usable = keys[: (request.prompt_tokens - 1) // 16]
        matched = next((i for i, key in enumerate(usable) if key not in seen), len(usable))
        hits, total = hits + 16 * matched, total + request.prompt_tokens
        whole = (
            (*request.prompt, Segment(request.answer, request.output_tokens))
            if request.answer
            else request.prompt
        )
        seen.update(own_keys(names.chain(whole, salt=request.tenant.encode(), adapter=request.adapter)))
    return hits / total


def run(policy: str, seed: int, requests: Sequence[SimRequest], worker: SimWorkerSpec) -> dict[str, float]:
    """One run: hit rate and TTFT."""
    result = World(spec_of(policy, seed, worker), iter(requests)).run()
    counters = result.counters
    ttfts = sorted(record.ttft_ns / 1e9 for record in result.records if record.first_ns >= 0)
    return {
        "hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
        "ttft_mean": sum(ttfts) / len(ttfts),
        "ttft_p50": ttfts[len(ttfts) // 2],
        "ttft_p95": ttfts[int(0.95 * len(ttfts))],
        "answered": counters.finished / counters.arrived,
    }


def workload(args: argparse.Namespace, seed: int) -> list[SimRequest]:
    """The trace, or conversations of eight tenants."""
    if args.trace:
        trace = Trace(path=Path(args.trace), speed=args.speed, limit=args.limit, prompt_max=100_000)
        return list(merged([trace], seed, args.seconds))
    talks = Conversations(
        arrivals=Poisson(args.rate),
        callers=Callers(tenants=even(8)),
        system_tokens=1500,
        turns=6.0,
        message=LengthDistribution(400, 1.0, maximum=8192),
        output=LengthDistribution(200, maximum=2048),
        think_s=10.0,
    )
    return list(merged([talks], seed, args.seconds))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=4.0, help="conversations that begin per second")
    parser.add_argument("--trace", default="")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=16_384, help="KV blocks of a worker")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    args = parser.parse_args()
    worker = SimWorkerSpec(
        engine=EngineSettings(step_tokens=2048, max_running=64), num_blocks=args.blocks, max_model_len=131_072
    )
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in args.policies}
    ideals: list[float] = []
    requests: Sequence[SimRequest] = ()
    for seed in range(args.seeds):
        requests = workload(args, seed)
        ideals.append(ideal_hit_rate(requests))
        for policy in args.policies:
            found[policy].append(run(policy, seed, requests, worker))
    base = found[args.policies[0]]
    table = {
        policy: {
            name: spread([each[name] for each in runs])
            for name in ("hit_rate", "ttft_p50", "ttft_p95", "answered")
        }
        | {
            f"{name}_ratio": spread(
                [each[name] / first[name] for each, first in zip(runs, base, strict=True)]
            )
            for name in ("ttft_mean", "ttft_p50", "ttft_p95")
        }
        for policy, runs in found.items()
    }
    summary = {
        "workload": (args.trace and Path(args.trace).name) or "conversations",
        "requests": len(requests),
        "seeds": args.seeds,
        "ideal_hit_rate": spread(ideals),
        "base": args.policies[0],
        "policies": table,
    }
    if args.json:
        print(json.dumps(summary, indent=1))
        return
    print(
        f"{summary['workload']}: {len(requests)} requests, ideal hit rate "
        f"{summary['ideal_hit_rate']['median']:.3f}"
    )
    for policy, row in table.items():
        cells = [
            f"{name} {value['median']:.3f} ({value['min']:.3f}-{value['max']:.3f})"
            for name, value in row.items()
        ]
        print(f"{policy:>13}: " + "  ".join(cells))


if __name__ == "__main__":
    main()
