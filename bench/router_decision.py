"""The cost of one placement decision in CPU: the router at 1, 64 and 1,000 workers, beside least-loaded.

    python bench/router_decision.py [--json] [--seconds S]

Prompts of 512 blocks, of which a few workers hold parts in the real prefix index; every start is booked, and
ended later, so that rooms and heap live. Prompt keys are made beforehand: hashing is paid once per prompt,
whoever places it. Times are process CPU: of a decision (look-up, scores, pick, record), and per request of
everything that goes with it (booking, predicting its blocks at the worker, learning at its end).
"""

import argparse
import json
from collections.abc import Sequence
from random import Random
from statistics import median, quantiles
from time import process_time_ns

from penstock.kv.hashing import BlockHasher, PromptKeyMaker, PromptKeys
from penstock.kv.index.block_names import Stored
from penstock.kv.index.locality import KVLocality
from penstock.kv.index.prefix_index import Tier
from penstock.kv.index.worker_cache_view import KVIndexLimits
from penstock.policy.placement.pick import DecisionLog
from penstock.policy.placement.route import Router
from penstock.policy.queueing.band import Work
from penstock.policy.queueing.capacity import (
    CapacityTable,
    LeastLoaded,
    Placement,
    WorkerCapacity,
    WorkerView,
)
from penstock.policy.terms import PlacementTerms, QueueTerms
from penstock.types import RequestId, TenantId, Usage, WorkerId

KEY, IDENTITY = b"bench/router_decision", "bench"
BLOCKS = 512
STREAMS = 8
"""Requests per worker that run at any time."""
STORED = 512
"""Blocks of every conversation that its worker has."""


class FixedKeys(PromptKeys):
    """Keys that were made beforehand."""

    __slots__ = ("_made",)

    def __init__(self, maker: PromptKeyMaker, own: list[int]) -> None:
        super().__init__(maker, range(16 * len(own)))
        self._made = own

    def own(self, hasher: BlockHasher) -> Sequence[int]:
        """See `PromptKeys`."""
        return self._made


class Rig:
    """Workers with their rooms and what they have cached, under one placement."""

    def __init__(
        self, placement: Placement, rooms: CapacityTable, prompts: list[FixedKeys], seed: int
    ) -> None:
        self.placement, self.rooms, self._prompts = placement, rooms, prompts
        self._random, self._running = Random(seed), list[tuple[Work, WorkerCapacity]]()
        self._next = 0
        self.decisions: list[int] = []

    def decide(self, now_ns: int, running_max: int) -> None:
        """Place one request, after the oldest has ended if enough run."""
        self._next += 1
        keys = self._prompts[self._next % len(self._prompts)]
        if len(self._running) >= running_max:
            work, room = self._running.pop(self._random.randrange(len(self._running)))
            self.rooms.begin(room, work)
            self.placement.began(now_ns, work, room)
            self.rooms.release(room, work)
            usage = Usage(completion_tokens=100, prefill_ns=40_000_000, decode_ns=3_000_000_000)
            self.placement.ended(now_ns, work, room, usage)
        work = Work(
            id=RequestId(f"r{self._next}"), band="default", tenant=TenantId("t"), arrived_ns=now_ns,
            prompt_tokens=BLOCKS * 16, output_tokens=200, blocks=BLOCKS, keys=keys,
            session=f"s{self._next % 500}",
        )  # fmt: skip
        began = process_time_ns()
        room = self.placement.place(now_ns, work, self.rooms, (), ())
        self.decisions.append(process_time_ns() - began)
        assert isinstance(room, WorkerCapacity)
        self.rooms.book(room, work)
        self.placement.started(now_ns, work, room)
        self._running.append((work, room))


def prompts_of(maker: PromptKeyMaker, count: int, seed: int) -> list[FixedKeys]:
    """Conversations of 512 blocks; those of one group share the first 64."""
    random, groups = Random(seed), [[Random(g).getrandbits(63) for _ in range(64)] for g in range(16)]
    return [
        FixedKeys(maker, [*groups[i % 16], *(random.getrandbits(63) for _ in range(BLOCKS - 64))])
        for i in range(count)
    ]


def rig(policy: str, num_workers: int, seed: int) -> Rig:
    """One router, or least-loaded."""
    locality, rooms = KVLocality(KVIndexLimits(), KEY), CapacityTable(QueueTerms())
    prompts = prompts_of(locality.maker("m"), 2 * num_workers, seed)
    for i in range(num_workers):
        worker = WorkerId(f"w{i}")
        rooms.set(
            worker, WorkerView(max_running=64, kv_blocks_total=65_536, kv_blocks_used=20_000, running=0)
        )
        cache_view = locality.add(worker, model="m", is_own=True)
        locality.identify(worker, IDENTITY)
        for keys in prompts[2 * i : 2 * i + 2]:
            cache_view.hear([Stored(cache_view.names.keys_of(keys)[:STORED], None, b"", 16, Tier.DEVICE)])
    if policy == "least_loaded":
        return Rig(LeastLoaded(), rooms, prompts, seed)
    log = DecisionLog(kept_max=1024)
    config = PlacementTerms(policy=policy)
    return Rig(Router("m", config, Random(seed).randrange, locality=locality, log=log), rooms, prompts, seed)


def cost_us(each: Rig, num_workers: int, seconds: float) -> tuple[tuple[float, ...], float]:
    """CPU microseconds of a decision: median, first and last decile; and the median of all that a request
    costs the placement.
    """
    costs: list[float] = []
    now_ns = 0
    for _ in range(STREAMS * num_workers + 500):
        now_ns += 1_000_000
        each.decide(now_ns, STREAMS * num_workers)
    each.decisions.clear()
    until = process_time_ns() + int(seconds * 1e9)
    while process_time_ns() < until:
        began = process_time_ns()
        for _ in range(200):
            now_ns += 1_000_000
            each.decide(now_ns, STREAMS * num_workers)
        costs.append((process_time_ns() - began) / 200 / 1000)
    tenths = [cost / 1000 for cost in quantiles(each.decisions, n=10)]
    return (median(each.decisions) / 1000, tenths[0], tenths[-1]), median(costs)


def main() -> None:
    """Print CPU per decision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for num_workers in (1, 64, 1000):
        row = found[str(num_workers)] = {}
        for policy in ("least_loaded", "ttft", "weighted"):
            decision, request = cost_us(rig(policy, num_workers, 7), num_workers, args.seconds)
            row[policy], row[f"{policy}_request"] = [round(cost, 1) for cost in decision], [round(request, 1)]
        row["ttft_ratio"] = [round(row["ttft"][0] / row["least_loaded"][0], 1)]
    if args.json:
        print(json.dumps({"schema": "penstock.router_decision/1", "cpu_us": found}, indent=2))
        return
    for num_workers, row in found.items():
        print(
            f"{num_workers:>5} workers: " + ", ".join(f"{name} {_show(each)}" for name, each in row.items())
        )


def _show(values: list[float]) -> str:
    """A median, with its deciles if they are known."""
    return f"{values[0]:g}" + (f" ({values[1]:g}-{values[2]:g})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
