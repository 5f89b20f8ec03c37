"""The cost of the router's KV index: looking a prompt up, applying events, memory; beside a naive index in
the same run.

    python -m bench.policy.kv_index [--entries 1000000] [--workers 64] [--rounds 7] [--json FILE]

Conversations of 512 blocks (8,192 tokens) begin with one of a few system prompts that all workers hold; of
the rest, one to three workers hold a prefix. The naive index is a dict from key to a set of workers, looked
up one by one: the obvious first version. Every round times all of them, one after the other; figures are
medians, with the range of the ratio.
"""

import argparse
import gc
import multiprocessing
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from bench.harness import Spread, command_line, write_result
from penstock.kv.events import BlockStored, decode_batch, encode_batch, stored_event
from penstock.kv.hashing import CanonicalHasher, PromptKeyMaker, own_keys, token_bytes
from penstock.kv.index.prefix_index import PrefixIndex

BLOCKS = 512
SYSTEM_BLOCKS, NUM_SYSTEM = 32, 4
EVENT_BLOCKS = 32
LOOKUPS = 400
LOOKUP_GOAL_US, APPLY_GOAL_PER_S, MEMORY_GOAL_MB = 20.0, 2e6, 140.0


class Index(Protocol):
    """The operations of both kinds."""

    def stored(self, worker: int, keys: Sequence[int]) -> None: ...
    def removed(self, worker: int, keys: Sequence[int]) -> None: ...


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


class Measured(msgspec.Struct, frozen=True):
    """One figure of both, and the ratio of ours to the naive one: median, least, greatest."""

    what: str
    unit: str
    ours: float
    naive: float | None
    ratio: tuple[float, float, float] | None
    goal: float | None = None


class Report(msgspec.Struct, frozen=True):
    """The run."""

    schema: str
    machine: str
    entries: int
    workers: int
    rounds: int
    figures: list[Measured]


def fill(index: Index, entries: int, workers: int, seed: int = 1) -> list[list[int]]:
    """Store conversations until there are so many entries; some of their key lists."""
    draw = random.Random(seed)
    systems = [[draw.getrandbits(64) for _ in range(SYSTEM_BLOCKS)] for _ in range(NUM_SYSTEM)]
    for worker in range(workers):
        for system in systems:
            index.stored(worker, system)
    kept: list[list[int]] = []
    made, every = 0, max(1, entries // BLOCKS // LOOKUPS)
    while made < entries:
        keys = systems[made % NUM_SYSTEM] + [draw.getrandbits(64) for _ in range(BLOCKS - SYSTEM_BLOCKS)]
        first = draw.randrange(workers)
        index.stored(first, keys)
        for _ in range(draw.randrange(3)):
            index.stored(draw.randrange(workers), keys[: draw.randrange(BLOCKS)])
        if (made // BLOCKS) % every == 0:
            kept.append(keys)
        made += BLOCKS - SYSTEM_BLOCKS
    return kept


def resident_mb(kind: str, entries: int, workers: int, answers: "multiprocessing.Queue[float]") -> None:
    """In a process of its own: how much memory the index takes, as the operating system counts it."""
    index = make(kind)
    gc.collect()
    before = _rss_mb()
    fill(index, entries, workers)
    gc.collect()
    answers.put(_rss_mb() - before)


def make(kind: str) -> Index:
    return PrefixIndex(entries_max=4_000_000, predicted_max=100_000) if kind == "ours" else NaiveIndex()


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def memory_of(kind: str, entries: int, workers: int) -> float:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[float] = context.Queue()
    process = context.Process(target=resident_mb, args=(kind, entries, workers, answers))
    process.start()
    found = answers.get(timeout=600)
    process.join()
    return found


def timed(work: Callable[[], int]) -> float:
    """Seconds of CPU per unit of work."""
    start = time.process_time()
    units = work()
    return (time.process_time() - start) / units


def pairs(
    rounds: int, ours: Callable[[], int], naive: Callable[[], int]
) -> tuple[float, float, tuple[float, float, float]]:
    """Median seconds per unit of both, and the ratio's median and range."""
    found = [(timed(ours), timed(naive)) for _ in range(rounds)]
    ratios = [a / b for a, b in found]
    middle = statistics.median
    return (
        middle(a for a, _ in found),
        middle(b for _, b in found),
        (middle(ratios), min(ratios), max(ratios)),
    )


def measure_lookups(
    args: argparse.Namespace, ours: PrefixIndex, naive: NaiveIndex, prompts: list[list[int]]
) -> Measured:
    def look() -> int:
        for keys in prompts:
            match = ours.match(0, keys)
            next(match.holders())
        return len(prompts)

    def look_naively() -> int:
        for keys in prompts:
            max(naive.match(keys).items(), key=lambda item: item[1])
        return len(prompts)

    for keys in prompts:  # They answer the same.
        match, expected = ours.match(0, keys), naive.match(keys)
        assert {worker: held.blocks for worker, held in match.holders()} == expected
    a, b, ratio = pairs(args.rounds, look, look_naively)
    return Measured(
        f"look up {BLOCKS} blocks over {args.workers} workers", "us", a * 1e6, b * 1e6, ratio, LOOKUP_GOAL_US
    )


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: a look-up over the naive index's."""
    ours, naive = PrefixIndex(entries_max=1_000_000, predicted_max=100_000), NaiveIndex()
    prompts = fill(ours, 100_000, 64)
    fill(naive, 100_000, 64)
    args = argparse.Namespace(rounds=rounds, workers=64)
    found = measure_lookups(args, ours, naive, prompts).ratio
    assert found is not None
    return {"look-up": Spread(*found)}


def measure_apply(args: argparse.Namespace, ours: PrefixIndex, naive: NaiveIndex) -> Measured:
    """Store and remove again: half of the operations each."""
    draw = random.Random(2)
    batches = [
        (draw.randrange(args.workers), [draw.getrandbits(64) for _ in range(EVENT_BLOCKS)])
        for _ in range(3000)
    ]

    def apply_to(index: Index) -> Callable[[], int]:
        def work() -> int:
            for worker, keys in batches:
                index.stored(worker, keys)
            for worker, keys in batches:
                index.removed(worker, keys)
            return 2 * EVENT_BLOCKS * len(batches)

        return work

    a, b, ratio = pairs(args.rounds, apply_to(ours), apply_to(naive))
    inverse = (1 / ratio[0], 1 / ratio[2], 1 / ratio[1])
    return Measured("apply events", "million blocks/s", 1e-6 / a, 1e-6 / b, inverse, APPLY_GOAL_PER_S / 1e6)


def measure_wire(args: argparse.Namespace, index: PrefixIndex) -> list[Measured]:
    """From the bytes of an event to the index: our engine's, whose hashes are the keys, and others', made
    anew from tokens.
    """
    draw = random.Random(3)
    hasher = CanonicalHasher(key=b"0123456789abcdef", model="m")
    payloads = [
        encode_batch(
            (
                stored_event(
                    tuple(draw.randbytes(32) for _ in range(EVENT_BLOCKS)),
                    token_ids=tuple(draw.randrange(50_000) for _ in range(16 * EVENT_BLOCKS)),
                ),
            ),
            wall_ns=0,
        )
        for _ in range(300)
    ]

    def events() -> list[BlockStored]:
        return [
            event
            for payload in payloads
            for event in decode_batch(payload).events
            if isinstance(event, BlockStored)
        ]

    def own() -> int:
        for event in events():
            index.stored(1, own_keys(event.block_hashes))
        return EVENT_BLOCKS * len(payloads)

    def foreign() -> int:
        for event in events():
            index.stored(2, hasher.extend(1, token_bytes(event.token_ids)))
        return EVENT_BLOCKS * len(payloads)

    own_s, foreign_s = (statistics.median(timed(work) for _ in range(args.rounds)) for work in (own, foreign))
    return [
        Measured("decode and apply, our engine's events", "us/block", own_s * 1e6, None, None),
        Measured("decode, hash and apply, other engines' events", "us/block", foreign_s * 1e6, None, None),
    ]


def measure_keys(args: argparse.Namespace) -> list[Measured]:
    """Making the keys of a prompt."""
    maker, tokens = PromptKeyMaker(key=b"0123456789abcdef", model="m"), tuple(range(16 * BLOCKS))
    found = statistics.median(
        timed(lambda: len([maker.keys(tokens).canonical])) for _ in range(20 * args.rounds)
    )
    return [Measured(f"canonical keys of {BLOCKS} blocks", "us", found * 1e6, None, None)]


def show(report: Report) -> None:
    print(f"{report.machine}; {report.entries:,} entries, {report.workers} workers, {report.rounds} rounds")
    print(f"{'':48}{'ours':>10}{'naive':>10}  ratio (range)            goal")
    for each in report.figures:
        naive = "" if each.naive is None else f"{each.naive:.2f}"
        ratio = "" if each.ratio is None else "{:.2f} ({:.2f}-{:.2f})".format(*each.ratio)
        goal = "" if each.goal is None else f"{each.goal:g}"
        print(f"{each.what + ', ' + each.unit:48}{each.ours:>10.2f}{naive:>10}  {ratio:24} {goal}")


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    args = parser.parse_args()
    sizes = [memory_of(kind, args.entries, args.workers) for kind in ("ours", "naive")]
    memory = Measured(
        "memory of 1,000,000 entries", "MB", sizes[0] * 1e6 / args.entries, sizes[1] * 1e6 / args.entries,
        (sizes[0] / sizes[1],) * 3, MEMORY_GOAL_MB,
    )  # fmt: skip
    ours, naive = PrefixIndex(entries_max=4_000_000, predicted_max=100_000), NaiveIndex()
    prompts = fill(ours, args.entries, args.workers)
    fill(naive, args.entries, args.workers)
    gc.collect()
    gc.freeze()
    figures = [
        measure_lookups(args, ours, naive, prompts),
        measure_apply(args, ours, naive),
        memory,
        *measure_wire(args, ours),
        *measure_keys(args),
    ]
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    report = Report("penstock.kv_index/2", machine, args.entries, args.workers, args.rounds, figures)
    show(report)
    write_result(args.json, msgspec.to_builtins(report))


if __name__ == "__main__":
    main()
