"""Many simulated worlds with drawn failures, each checked; a failing one is made small and written down.

    python bench/sim_swarm.py [--first 1] [--seeds 200]      runs seeds first .. first + seeds - 1
    python bench/sim_swarm.py --replay bench/out/case-17.json

Exit status 1 if a seed fails. See docs/simulator.md.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S, SystemClock
from penstock.sim.case import Case, draw_case, failure, run_case, shrink

OUT = Path(__file__).parent / "out"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--shrink-runs", type=int, default=300)
    args = parser.parse_args()
    if args.replay is not None:
        result = run_case(msgspec.json.decode(args.replay.read_bytes(), type=Case), every=1)
        print(f"nothing fails: {result.counters}")
        return 0
    clock, failed, requests = SystemClock(), 0, 0
    began_ns = clock.now_ns()
    for seed in range(args.first, args.first + args.seeds):
        case = draw_case(seed)
        requests += len(case.requests)
        why = failure(case)
        if not why:
            continue
        failed += 1
        small = shrink(
            case, lambda tried, why=why: failure(tried)[:20] == why[:20], runs_max=args.shrink_runs
        )
        OUT.mkdir(exist_ok=True)
        path = OUT / f"case-{seed}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(small)))
        print(f"seed {seed}: {why}", flush=True)
        print(f"  {len(small.requests)} requests, faults {[fault.kind.value for fault in small.faults]}")
        print(f"  python bench/sim_swarm.py --replay {path}", flush=True)
    spent_s = (clock.now_ns() - began_ns) / NS_PER_S
    print(f"{args.seeds} seeds, {requests} requests, {failed} failed, {spent_s:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
