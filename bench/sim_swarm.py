"""Many simulated worlds with drawn failures, each checked; a failing one is made small and written down.

    python bench/sim_swarm.py [--first 1] [--seeds 200] [--seconds 600]     seeds first .. first + seeds - 1, as far as time allows
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
TELL_EVERY = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=0, help="begin no other seed after this long; 0: no bound"
    )
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--shrink-runs", type=int, default=300)
    args = parser.parse_args()
    if args.replay is not None:
        result = run_case(msgspec.json.decode(args.replay.read_bytes(), type=Case), every=1)
        print(f"nothing fails: {result.counters}")
        return 0
    clock, failed, requests, done = SystemClock(), 0, 0, 0
    began_ns = clock.now_ns()

    def spent_s() -> float:
        return (clock.now_ns() - began_ns) / NS_PER_S

    for seed in range(args.first, args.first + args.seeds):
        if args.seconds and spent_s() > args.seconds:
            break
        case = draw_case(seed)
        requests, done = requests + len(case.requests), done + 1
        if why := failure(case):
            failed += 1
            write_down(case, why, args.shrink_runs)
        if done % TELL_EVERY == 0:
            print(
                f"... up to seed {seed}: {requests} requests, {failed} failed, {spent_s():.0f} s", flush=True
            )
    last = args.first + done - 1
    print(f"{done} seeds ({args.first} to {last}), {requests} requests, {failed} failed, {spent_s():.0f} s")
    return 1 if failed else 0


def write_down(case: Case, why: str, runs_max: int) -> None:
    """Make it small, and say how to see it again."""
    small = shrink(case, lambda tried: failure(tried)[:20] == why[:20], runs_max=runs_max)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"case-{case.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(small)))
    print(f"seed {case.seed}: {why}")
    print(f"  {len(small.requests)} requests, faults {[fault.kind.value for fault in small.faults]}")
    print(f"  python bench/sim_swarm.py --replay {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
