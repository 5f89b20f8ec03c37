"""The cost of deciding for each request, compared with other builds: `penstock simulate steady`, in which
the gateway's driver, queues and placement and the engine's scheduler and blocks do all of the work.

    python -m bench.sim.cost [--rounds 7] [--seconds 120] [--instructions] --tree . OLD [--json FILE]

Each source tree plays the scenario on the same seed, for a tenth of the time and for all of it; the figures
are the difference, so that what starting costs is not in them.

    calls         Python and C functions that were called (cProfile): by package, and for each request
    instructions  of the processor (valgrind's cachegrind): the same whatever else the machine does
    CPU           seconds of processor time, the trees in turns; ratios to the last tree of the same round
"""

import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.harness import command_line, write_result

CHILD = '''
import cProfile, io, json, pstats, sys, time
from penstock.cli.main import main
def play(seconds):
    kept, sys.stdout = sys.stdout, io.StringIO()
    try:
        main(["simulate", "steady", "--set", f"seconds={seconds}"])
    except SystemExit:
        pass
    finally:
        told, sys.stdout = sys.stdout.getvalue(), kept
    return next(line.split("│")[2] for line in told.splitlines() if "│ requests " in line)
def calls(seconds):
    profile = cProfile.Profile()
    asked = profile.runcall(play, seconds)
    found = {}
    for (file, _, _), (_, count, _, _, callers) in pstats.Stats(profile).stats.items():
        if "/penstock/" in file:
            part = file.rpartition("/penstock/")[2].split("/")[0]
            found[part] = found.get(part, 0) + count
        else:
            for (caller, _, _), (times, *_) in callers.items():
                if "/penstock/" in caller:
                    part = caller.rpartition("/penstock/")[2].split("/")[0]
                    found[part] = found.get(part, 0) + times
    return int(asked.replace(",", "")), found
mode, first, last = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
play(first)
if mode == "calls":
    print(json.dumps([calls(first), calls(last)]))
elif mode == "cpu":
    times = [time.process_time()]
    for seconds in (first, last):
        play(seconds)
        times.append(time.process_time())
    print(json.dumps((times[2] - times[1]) - (times[1] - times[0])))
else:
    play(last)
    print(json.dumps(0))
'''  # fmt: skip


def child(tree: Path, mode: str, first: float, last: float, *before: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "PYTHONHASHSEED": "0"}
    return subprocess.run(
        [*before, sys.executable, "-c", CHILD, mode, str(first), str(last)],
        env=environment, cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip


def calls(tree: Path, first: float, last: float) -> tuple[int, dict[str, int]]:
    """Requests, and calls by package."""
    (few, less), (many, more) = json.loads(child(tree, "calls", first, last).stdout.splitlines()[-1])
    found = Counter(more)
    found.subtract(less)
    return many - few, {name: count for name, count in found.most_common() if count > 0}


def instructions(tree: Path, first: float, last: float) -> int:
    counted: list[int] = []
    for until in (first, last):
        done = child(
            tree, "once", first, until, "valgrind", "--tool=cachegrind", "--cache-sim=no",
            "--cachegrind-out-file=/dev/null",
        )  # fmt: skip
        found = re.search(r"I +refs: +([\d,]+)", done.stderr)
        assert found, done.stderr[-500:]
        counted.append(int(found[1].replace(",", "")))
    return counted[1] - counted[0]


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated")
    parser.add_argument("--instructions", action="store_true", help="with valgrind: minutes for each tree")
    parser.add_argument("--tree", nargs="*", type=Path, default=[Path()], help="the last is held against")
    args = parser.parse_args()
    first, last = args.seconds / 10, args.seconds
    reported: list[dict[str, object]] = []
    for index, tree in enumerate(args.tree):
        requests, found = calls(tree, first, last)
        reported.append(
            {"tree": index, "requests": requests, "calls": sum(found.values()), "by_package": found}
        )
        print(f"tree {index}: {requests} requests, {sum(found.values()):,} calls: {found}", flush=True)
        if args.instructions:
            reported[-1]["instructions"] = count = instructions(tree, first, last)
            print(f"tree {index}: {count:,} instructions", flush=True)
    rounds: list[list[float]] = []
    for number in range(args.rounds):
        row = [0.0 for _ in args.tree]
        for i in range(len(row)):
            index = (i + number) % len(row)
            row[index] = float(child(args.tree[index], "cpu", first, last).stdout.splitlines()[-1])
        rounds.append(row)
        print(f"round {number}: CPU {', '.join(f'{each:.2f}' for each in row)} s", flush=True)
    ratios = [[row[i] / row[-1] for row in rounds] for i in range(len(args.tree))]
    for index, each in enumerate(ratios):
        if each:
            print(f"tree {index}: CPU {statistics.median(each):.3f} ({min(each):.2f} to {max(each):.2f})")
    settings = {**vars(args), "tree": len(args.tree), "json": ""}
    write_result(args.json, {"settings": settings, "trees": reported, "cpu_s": rounds})


if __name__ == "__main__":
    main()
