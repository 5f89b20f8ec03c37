"""What does deciding for a request cost in this checkout beside others? Calls, instructions and CPU of each.

`penstock simulate steady` is played: the gateway's driver, queues and placement and the engine's scheduler
and blocks do all of the work.

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
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from bench.harness import command_line, commit, in_turns, ratio, table, write_result
from bench.process import needed

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
        counted = [(file, count)] if "/penstock/" in file else [(at, n[0]) for (at, *_), n in callers.items()]
        for at, times in counted:
            if "/penstock/" in at:
                part = at.rpartition("/penstock/")[2].split("/")[0]
                found[part] = found.get(part, 0) + times
    return int(asked.replace(",", "")), found
mode, first, last = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
play(first)
if mode == "calls":
    print(json.dumps([calls(first), calls(last)]))
else:
    times = [time.process_time()]
    for seconds in (first, last) if mode == "cpu" else (last,):
        play(seconds)
        times.append(time.process_time())
    print(json.dumps((times[-1] - times[-2]) - (times[1] - times[0])))
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
    tool = (needed("valgrind"), "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    counted: list[int] = []
    for until in (first, last):
        found = re.search(r"I +refs: +([\d,]+)", child(tree, "once", first, until, *tool).stderr)
        assert found, "valgrind says how many"
        counted.append(int(found[1].replace(",", "")))
    return counted[1] - counted[0]


def cpu_s(tree: Path, first: float, last: float) -> float:
    return float(child(tree, "cpu", first, last).stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated")
    parser.add_argument("--instructions", action="store_true", help="with valgrind: minutes for each tree")
    parser.add_argument("--tree", nargs="*", type=Path, default=[Path()], help="the last is held against")
    args = parser.parse_args()
    span = args.seconds / 10, args.seconds
    reported: dict[str, dict[str, object]] = {}
    trees = {f"tree {index}": tree for index, tree in enumerate(args.tree)}
    for name, tree in trees.items():
        requests, found = calls(tree, *span)
        reported[name] = {"commit": commit(tree), "requests": requests, "calls": sum(found.values())}
        reported[name]["by_package"] = found
        if args.instructions:
            reported[name]["instructions"] = instructions(tree, *span)
        print(f"{name}: {reported[name]}", flush=True)
    kinds = {name: partial(cpu_s, tree, *span) for name, tree in trees.items()}
    rounds = in_turns(args.rounds, kinds, warm_up=False)
    last = rounds[[*trees][-1]]
    if args.rounds:
        print(table(("", "CPU over the last"), [(name, ratio(each, last)) for name, each in rounds.items()]))
    write_result(args.json, {"seconds": args.seconds, "trees": reported, "cpu_s": rounds})


if __name__ == "__main__":
    main()
