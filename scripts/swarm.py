"""Many simulated worlds with drawn failures, each checked; a failing one is made small and written down.

    python scripts/swarm.py [--first 1] [--seeds 200] [--jobs 2] [--seconds 600]
    python scripts/swarm.py --replay bench/out/case-17.json

Runs seeds first .. first + seeds - 1, in slices of some dozens; no other slice is begun after `--seconds`.
Exit status 1 if a seed fails. See docs/simulator.md.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.clock import NS_PER_S, SystemClock

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "doubles"))
from sim_case import Case, draw_case, failure, run_case, shrink

OUT = ROOT / "bench" / "out"
SLICE = 24
"""Seeds between two words about how it stands."""


class Tried(NamedTuple):
    """One seed."""

    seed: int
    requests: int
    why: str
    """Why it fails; empty: it does not."""
    small: Case | None


def try_seed(seed: int, *, shrink_runs: int) -> Tried:
    """Run it, and make it small if it fails."""
    case = draw_case(seed)
    why, small = failure(case), None
    if why:
        small = shrink(case, lambda tried: failure(tried)[:20] == why[:20], runs_max=shrink_runs)
    return Tried(seed, len(case.requests), why, small)


def write_down(tried: Tried, small: Case) -> None:
    """Say what fails, and how to see it again."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"case-{tried.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(small)))
    print(f"seed {tried.seed}: {tried.why}")
    print(f"  {len(small.requests)} requests, faults {[fault.kind.value for fault in small.faults]}")
    print(f"  python scripts/swarm.py --replay {path}", flush=True)


def main() -> int:
    """Try the seeds, or play a written case again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=0, help="0: no bound")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--shrink-runs", type=int, default=300)
    args = parser.parse_args()
    if args.replay is not None:
        result = run_case(msgspec.json.decode(args.replay.read_bytes(), type=Case), every=1)
        print(f"nothing fails: {result.counters}")
        return 0
    clock, failed, requests, done = SystemClock(), 0, 0, 0
    began_ns, spent_s = clock.now_ns(), 0.0
    with ProcessPoolExecutor(args.jobs) as pool:
        while done < args.seeds and not 0 < args.seconds < spent_s:
            first = args.first + done
            seeds = range(first, first + min(SLICE, args.seeds - done))
            for tried in pool.map(partial(try_seed, shrink_runs=args.shrink_runs), seeds):
                requests, failed = requests + tried.requests, failed + bool(tried.why)
                if tried.small is not None:
                    write_down(tried, tried.small)
            done, spent_s = done + len(seeds), (clock.now_ns() - began_ns) / NS_PER_S
            print(f"{done} seeds, {requests} requests, {failed} failed, {spent_s:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
