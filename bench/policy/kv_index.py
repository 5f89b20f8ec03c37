"""What do look-ups, blocks and a million entries cost the KV index? CPU and memory beside a naive index.

    python -m bench.policy.kv_index [--entries 1000000] [--workers 64] [--rounds 7] [--json FILE]

Conversations of 512 blocks (8,192 tokens) begin with one of a few system prompts that all workers hold; of
the rest, one to three workers hold a prefix. The naive index is a dict from key to a set of workers, looked
up one by one: the obvious first version. CPU time, in turns. Goals: a look-up in 20 us, 2 million blocks/s,
140 MB for a million entries.
"""

import gc
import multiprocessing
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.harness import Spread, command_line, cpu_us, in_turns, ratio, rounds_table, spread, write_result
from penstock.kv.index.prefix_index import PrefixIndex

BLOCKS = 512
SYSTEM_BLOCKS, NUM_SYSTEM = 32, 4
EVENT_BLOCKS, BATCHES = 32, 3000
LOOKUPS = 400


class NaiveIndex:
    """Key -> set of workers."""

    def __init__(self) -> None:
        self.holders: dict[int, set[int]] = {}

    def stored(self, worker: int, keys: Sequence[int]) -> None:
        for key in keys:
            self.holders.setdefault(key, set()).add(worker)

    def removed(self, worker: int, keys: Sequence[int]) -> None:
        for key in keys:
            if held := self.holders.get(key):
                held.discard(worker)
                if not held:
                    del self.holders[key]

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Worker -> blocks of its prefix."""
        lengths: dict[int, int] = {}
        alive = self.holders.get(keys[0], set())
        for i, key in enumerate(keys[1:], 1):
            there = alive & self.holders.get(key, set())
            for worker in alive - there:
                lengths[worker] = i
            if not (alive := there):
                break
        return lengths | dict.fromkeys(alive, len(keys))


Index = PrefixIndex | NaiveIndex
Kinds = dict[str, Callable[[], float]]
"""Microseconds of CPU for each look-up or block."""
MAKE: dict[str, Callable[[], Index]] = {
    "naive": NaiveIndex, "ours": lambda: PrefixIndex(entries_max=4_000_000, predicted_max=100_000)
}  # fmt: skip


def fill(index: Index, entries: int, workers: int) -> list[list[int]]:
    """Store conversations until there are so many entries; some of their key lists."""
    draw = random.Random(1)
    systems = [[draw.getrandbits(64) for _ in range(SYSTEM_BLOCKS)] for _ in range(NUM_SYSTEM)]
    for worker in range(workers):
        for system in systems:
            index.stored(worker, system)
    kept: list[list[int]] = []
    made, every = 0, max(1, entries // BLOCKS // LOOKUPS)
    while made < entries:
        keys = systems[made % NUM_SYSTEM] + [draw.getrandbits(64) for _ in range(BLOCKS - SYSTEM_BLOCKS)]
        index.stored(draw.randrange(workers), keys)
        for _ in range(draw.randrange(3)):
            index.stored(draw.randrange(workers), keys[: draw.randrange(BLOCKS)])
        if (made // BLOCKS) % every == 0:
            kept.append(keys)
        made += BLOCKS - SYSTEM_BLOCKS
    return kept


def resident_mb(kind: str, entries: int, workers: int) -> float:
    """In a process of its own: how much memory the index takes, as the operating system counts it."""

    def rss_mb() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    index = MAKE[kind]()
    before = rss_mb()
    fill(index, entries, workers)
    return rss_mb() - before


def lookups(ours: PrefixIndex, naive: NaiveIndex, prompts: list[list[int]]) -> Kinds:
    for keys in prompts:  # They answer the same.
        held = {worker: each.blocks for worker, each in ours.match(0, keys).holders()}
        assert held == naive.match(keys)

    def look() -> None:
        for keys in prompts:
            next(ours.match(0, keys).holders())

    def look_naively() -> None:
        for keys in prompts:
            max(naive.match(keys).items(), key=lambda item: item[1])

    kinds = {"naive": look_naively, "ours": look}
    return {kind: partial(cpu_us, work, len(prompts)) for kind, work in kinds.items()}


def applying(index: Index, workers: int) -> Callable[[], float]:
    """Store and remove again: half of the operations each."""
    draw = random.Random(2)
    batches = [
        (draw.randrange(workers), [draw.getrandbits(64) for _ in range(EVENT_BLOCKS)]) for _ in range(BATCHES)
    ]

    def work() -> None:
        for worker, keys in batches:
            index.stored(worker, keys)
        for worker, keys in batches:
            index.removed(worker, keys)

    return partial(cpu_us, work, 2 * EVENT_BLOCKS * BATCHES)


def times(entries: int, workers: int, rounds: int, *, everything: bool) -> dict[str, dict[str, list[float]]]:
    """Microseconds: by question and kind, one a round."""
    ours, naive = MAKE["ours"](), MAKE["naive"]()
    assert isinstance(ours, PrefixIndex)
    assert isinstance(naive, NaiveIndex)
    prompts = fill(ours, entries, workers)
    fill(naive, entries, workers)
    gc.collect()
    gc.freeze()
    asked = {"look-up": lookups(ours, naive, prompts)}
    if everything:
        asked["apply a block"] = {"naive": applying(naive, workers), "ours": applying(ours, workers)}
    return {question: in_turns(rounds, kinds) for question, kinds in asked.items()}


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: a look-up over the naive index's."""
    us = times(100_000, 64, rounds, everything=False)["look-up"]
    return {"look-up": ratio(us["ours"], us["naive"])}


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {kind: pool.apply(resident_mb, (kind, args.entries, args.workers)) for kind in MAKE}
    found = times(args.entries, args.workers, args.rounds, everything=True)
    print(rounds_table("us of CPU", "", {**found, "memory, MB": {kind: [mb] for kind, mb in memory.items()}}))
    rates = spread(1 / us for us in found["apply a block"]["ours"])
    print(f"{rates} million blocks/s are applied")
    settings = {"entries": args.entries, "workers": args.workers}
    write_result(
        args.json, {**settings, "us": found, "memory_mb": memory, "million_blocks_per_s": rates.rounded()}
    )


if __name__ == "__main__":
    main()
