"""Are the policies as good as they were? Scenarios' figures beside the baseline; the gate is open or shut.

Fixed scenarios on three fixed seeds; of those that take longest (`HEAVY`) two.

    python -m bench.sim.gate                       what `make simulate` runs: fails when something got worse
    python -m bench.sim.gate --quick               six scenarios, one seed, seconds: what the test suite runs
    python -m bench.sim.gate --update              record a new baseline (say why in the commit)
    python -m bench.sim.gate --seeds 200           many more seeds, criteria only: the nightly run

A run is the same on every machine, so an unchanged policy gives the baseline's figures to the last digit, and
any change of them is a change of policy. The margins are what such a change may cost before somebody has to
decide that it is worth it:

    SLO attainment  0.02    fairness (Jain)  0.02    prefix hit rate  0.02    cost per 1M output tokens  5 %

Each is of the mean over the seeds, per scenario. An improvement by more than the margin is reported too:
record it. Exit status 1: worse than the baseline, or a scenario's own criterion fails.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from bench.harness import command_line, write_result
from penstock.sim.report.compare import numbers
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import run_scenario
from penstock.sim.scenarios.setup import Knobs

BASELINE = Path(__file__).parents[1] / "data" / "sim-baseline.json"
SEEDS = (1, 2, 3)
NOT_GATED = {
    "autoscale-day": "tests/policy/test_autoscaler.py", "cold-start": "docs/testing-overload.md",
    "diurnal": "docs/testing-overload.md", "gray-failure": "tests/sim/test_failures.py",
    "poison-request": "tests/sim/test_failures.py", "rolling-restart": "docs/testing-overload.md",
    "slow-route": "tests/sim/test_failures.py", "slow-spells": "tests/policy/test_hedge.py",
}  # fmt: skip
"""The test that asks the same, or the page with its figure; with these the gate would not end in 30 s."""
GATED = tuple(name for name in SCENARIOS if name not in NOT_GATED)
HEAVY = (
    "autoscale-spike", "autoscale-steady", "external-crash", "spot-all-revoked", "spot-revocation",
    "noisy-tenant", "downgrade", "zone-loss", "priority-overload", "worker-crash", "region-failover",
    "spike-20x", "slow-worker", "rollout-bad",
)  # fmt: skip
"""Those that take longest, longest first: begun last, one would keep a core busy while the other is idle.
The gate has them on the first `HEAVY_SEEDS` of its seeds."""
HEAVY_SEEDS = 2
QUICK = ("conversations", "neighbour-flood", "kv-full", "noisy-tenant", "worker-crash", "rollout-bad")


class Margin(msgspec.Struct, frozen=True):
    """How much worse a figure may be."""

    absolute: float = 0.0
    relative: float = 0.0
    more_is_better: bool = True


MARGINS: Mapping[str, Margin] = {
    "attainment": Margin(absolute=0.02),
    "jain": Margin(absolute=0.02),
    "hit_rate": Margin(absolute=0.02),
    "cost_per_million": Margin(relative=0.05, more_is_better=False),
}

Measured = dict[str, dict[str, list[float]]]
"""Per scenario and figure one value per seed; of a heavy one for the first seeds alone."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded figures."""

    seeds: tuple[int, ...]
    measured: Measured
    digests: dict[str, list[str]]
    """Of every run: equal ones mean that nothing at all has changed."""


class OneRun(NamedTuple):
    """A scenario on one seed."""

    figures: dict[str, float]
    digest: str
    failed: list[str]
    cpu_s: float


def run_one(name: str, seed: int, knobs: Knobs) -> OneRun:
    """Play it and look."""
    began_s = time.process_time()
    verdict = run_scenario(SCENARIOS[name], knobs, seed)
    found = numbers(verdict.played.figures)
    failed = [
        f"{name}, seed {seed}: {each.words} is {each.value:.4g}, bound {each.bound:g}"
        for each in verdict.findings
        if not each.passed
    ]
    figures = {figure: round(found[figure], 6) for figure in MARGINS}
    return OneRun(figures, verdict.played.result.digest, failed, time.process_time() - began_s)


def measure(
    names: Sequence[str],
    seeds: Sequence[int],
    knobs: Knobs,
    say: Callable[[str], None] = print,
    *,
    jobs: int = 1,
) -> tuple[Baseline, list[str]]:
    """The figures of every scenario and seed, and which criteria failed; with several `jobs` in so many
    processes.
    """
    measured, digests, failed = Measured(), dict[str, list[str]](), list[str]()
    order = sorted(names, key=lambda name: HEAVY.index(name) if name in HEAVY else len(HEAVY))
    fewer = seeds[:HEAVY_SEEDS] if tuple(seeds) == SEEDS else seeds
    seeds_of = {name: fewer if name in HEAVY else seeds for name in order}
    each_name = [name for name in order for _ in seeds_of[name]]
    each_seed = [seed for name in order for seed in seeds_of[name]]
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        run = partial(run_one, knobs=knobs)
        runs = iter((map if pool is None else pool.map)(run, each_name, each_seed))
        for name in order:
            found = [next(runs) for _ in seeds_of[name]]
            measured[name] = {figure: [run.figures[figure] for run in found] for figure in MARGINS}
            digests[name] = [run.digest for run in found]
            failed += [line for run in found for line in run.failed]
            shown = "  ".join(f"{figure} {fmean(each):.4g}" for figure, each in measured[name].items())
            say(f"{name:20} {shown}  ({sum(run.cpu_s for run in found):.1f} s of CPU)")
    measured, digests = ({name: found[name] for name in names} for found in (measured, digests))
    return Baseline(seeds=tuple(seeds), measured=measured, digests=digests), failed


def judge(recorded: Baseline, now: Baseline) -> tuple[list[str], list[str]]:
    """The figures that got worse, and better, by more than their margin; over the seeds that both have."""
    worse, better = list[str](), list[str]()
    shared = [seed for seed in now.seeds if seed in recorded.seeds]
    assert shared, "the baseline was recorded with other seeds"
    for name, figures in now.measured.items():
        if name not in recorded.measured:
            worse.append(f"{name}: not in the baseline; record it with --update")
            continue
        for figure, values in figures.items():
            margin, before = MARGINS[figure], recorded.measured[name][figure]
            pairs = [
                (before[recorded.seeds.index(seed)], values[now.seeds.index(seed)])
                for seed in shared
                if recorded.seeds.index(seed) < len(before) and now.seeds.index(seed) < len(values)
            ]
            was, is_ = (fmean(each) for each in zip(*pairs, strict=True))
            allowed = margin.absolute + margin.relative * abs(was)
            gained = (is_ - was) * (1 if margin.more_is_better else -1)
            line = f"{name}: {figure} {was:.4g} -> {is_:.4g} (margin {allowed:.3g})"
            if gained < -allowed:
                worse.append(line)
            elif gained > allowed:
                better.append(line)
    return worse, better


def read_baseline(path: Path = BASELINE) -> Baseline:
    """The recorded one."""
    return msgspec.json.decode(path.read_bytes(), type=Baseline)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="N seeds, criteria only")
    parser.add_argument("--scenario", action="append", choices=GATED, help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    names = args.scenario or (QUICK if args.quick else GATED)
    seeds = range(1, args.seeds + 1) if args.seeds else SEEDS[:1] if args.quick else SEEDS
    now, failed = measure(names, seeds, Knobs(), jobs=args.jobs)
    write_result(args.json, {"seeds": now.seeds, "measured": now.measured, "failed": failed})
    if args.seeds:
        return _verdict(failed, [], [])
    if args.update:
        old = read_baseline() if BASELINE.exists() and args.scenario else None
        merged = now if old is None else Baseline(
            seeds=now.seeds, measured=old.measured | now.measured, digests=old.digests | now.digests
        )  # fmt: skip
        BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(merged), indent=1) + b"\n")
        print(f"recorded in {BASELINE}")
        return _verdict(failed, [], [])
    recorded = read_baseline()
    same = sum(
        now.digests[name] == recorded.digests.get(name, [])[: len(now.digests[name])] for name in names
    )
    print(f"{same} of {len(names)} scenarios are as recorded, to the last event")
    return _verdict(failed, *judge(recorded, now))


def _verdict(failed: Sequence[str], worse: Sequence[str], better: Sequence[str]) -> int:
    for title, lines in (("BETTER", better), ("WORSE", worse), ("CRITERION FAILS", failed)):
        for line in lines:
            print(f"{title}: {line}")
    print("the gate is shut" if failed or worse else "the gate is open")
    return 1 if failed or worse else 0


if __name__ == "__main__":
    sys.exit(main())
