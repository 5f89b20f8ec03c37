"""The autoscaler beside others, over simulated days: minutes in which promises were missed, and machine time.

    python -m bench.policy.autoscale [day] [spike] [steady] [spot] [--seeds N] [--first SEED] [--json FILE]

Workers are simulated step by step, the gateway and the autoscaler are the product's. A day has an hour, with
a steep morning, and a worker takes 45 to 90 s to start, half an hour of such a day. The first day teaches;
the days after it are measured. Beside the product's rule, on the same requests and the same cold starts:

    reactive    the product's, without a forecast
    dynamo      NVIDIA Dynamo's planner: every 180 s what comes divided by what a worker was measured to do,
                and every 5 s one more if latency is over its target, one fewer if it would stay within 80 %
    keda        requests that wait, 5 for each replica, every 15 s, as vLLM's production stack has it; down
                after 300 s. keda-1, keda-half, keda-quarter: as many for each
    hpa         running and waiting requests, `CONCURRENT` for each replica, tolerance 10 %; down after 300 s
    last, trend the product's, with forecasts that are naive

`dynamo` and `hpa` are told what one worker can do, as measured here beforehand; the product finds out.
`held_until_new_workers` of a spike: good answers by the workers that are there, of what these do at
`WORKER_RPS`. A FILE that is there already is added to, so that long questions may be asked in parts.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import mean, stdev
from typing import Any

from bench.harness import add_json_option, extend_result
from penstock.clock import NS_PER_S
from penstock.config.scale import ScaleConfig
from penstock.policy.capacity.autoscaler import ScaleDecision
from penstock.policy.capacity.signals import Signals
from penstock.sim.scenarios.capacity import (
    COLD_S,
    DAY_S,
    MAX,
    OBJECTIVE,
    Mornings,
    Reactive,
    good_during,
    machine_hours,
    minutes_lost,
    recovery_s,
    scaled,
    turns,
)
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import run_scenario
from penstock.sim.scenarios.setup import Knobs, Setup, play
from penstock.sim.traffic.workload import Arrivals, Poisson, Spike
from penstock.sim.world.scaling import Decider, ScalingSpec

WORKER_RPS = 0.4
"""The measured rate of one worker with 98 % of answers as promised."""
CONCURRENT = 6
"""Requests at a worker then."""


def decided(seen: Signals, workers: int, why: str) -> ScaleDecision:
    there = seen.ready + seen.pending
    move = "out" if workers > there else "in" if workers < there else "hold"
    return ScaleDecision(
        wall_ns=seen.wall_ns, move=move, acts=True, why=why, ready=seen.ready, pending=seen.pending,
        wanted=workers, workers=workers, pools={seen.pools[0].name: workers}, opinions=(),
        cold_start_s=mean(COLD_S),
    )  # fmt: skip


class Dynamo:
    """See the module."""

    PERIOD_S, LOOK_S, CHANGE_MAX, KEEPS = 180.0, 5.0, 8, 0.8

    def __init__(self, model: str, scale: ScaleConfig) -> None:
        del model
        self._scale, self._floor, self._next_s, self._arrived = scale, scale.min, 0.0, 0
        self._workers = scale.min

    def decide(self, seen: Signals) -> ScaleDecision:
        now_s = seen.now_ns / NS_PER_S
        self._arrived += seen.arrived
        if now_s >= self._next_s + self.PERIOD_S:
            self._floor = math.ceil(self._arrived / self.PERIOD_S / WORKER_RPS)
            self._arrived, self._next_s = 0, now_s
            there = seen.ready + seen.pending
            low, high = there - self.CHANGE_MAX, there + self.CHANGE_MAX
            self._workers = max(low, min(high, self._floor))
        elif not seen.pending and not seen.draining and seen.answered:
            target_s, there = OBJECTIVE.ttft_ms / 1000, seen.ready
            if seen.ttft_p95_s > target_s or seen.shed:
                self._workers = max(self._workers, there + 1)
            elif there > 1 and seen.ttft_p95_s * there / (there - 1) < self.KEEPS * target_s:
                self._workers = max(self._floor, there - 1)
        self._workers = max(self._scale.min, min(self._scale.max, self._workers))
        return decided(seen, self._workers, "")


class Hpa:
    """The horizontal pod autoscaler's rule: metric / target, the largest of five minutes on the way down."""

    PERIOD_S, DOWN_S, TOLERANCE = 15.0, 300.0, 0.1

    def __init__(self, model: str, scale: ScaleConfig, *, target: float, counts_running: bool) -> None:
        del model
        self._scale, self._target, self._counts_running = scale, target, counts_running
        self._next_s, self._lately, self._workers = 0.0, list[tuple[float, int]](), scale.min

    def decide(self, seen: Signals) -> ScaleDecision:
        now_s = seen.now_ns / NS_PER_S
        if now_s >= self._next_s:
            self._next_s = now_s + self.PERIOD_S
            metric = seen.waiting + seen.shed + (seen.running if self._counts_running else 0)
            there = max(1, seen.ready + seen.pending)
            ratio = metric / (self._target * there)
            wanted = there if abs(ratio - 1) <= self.TOLERANCE else math.ceil(metric / self._target)
            wanted = min(wanted, max(2 * there, there + 4), self._scale.max)
            self._lately = [each for each in self._lately if each[0] > now_s - self.DOWN_S] + [
                (now_s, wanted)
            ]
            highest = max(count for _, count in self._lately)
            self._workers = max(self._scale.min, wanted if wanted > there else min(there, highest))
        return decided(seen, self._workers, "")


Make = Callable[[str, ScaleConfig], Decider]
RULES: dict[str, Make | None] = {
    "penstock": None,
    "reactive": Reactive,
    "dynamo": Dynamo,
    "keda": partial(Hpa, target=5, counts_running=False),
    "keda-1": partial(Hpa, target=1, counts_running=False),
    "keda-half": partial(Hpa, target=0.5, counts_running=False),
    "keda-quarter": partial(Hpa, target=0.25, counts_running=False),
    "hpa": partial(Hpa, target=CONCURRENT, counts_running=True),
    "last": None,
    "trend": None,
}


def made(rule: str, arrivals: Arrivals, seconds: float, start: int = 1, **scaling: Any) -> Setup:  # noqa: ANN401
    """One run's setup."""
    spec = ScalingSpec(
        scale=ScaleConfig(max=MAX), cold_start_s=COLD_S, season_s=DAY_S, decider=RULES[rule],
        forecast=rule if rule in ("last", "trend") else "seasonal",
    )  # fmt: skip
    return scaled(Knobs(), arrivals, seconds, replace(spec, **scaling), (start,))


Row = dict[str, Any]


def _day(rule: str, seed: int, *, peak: float, days: int) -> Row:
    played = play(made(rule, Mornings(peak), (1 + days) * DAY_S), seed)
    since = [each for each in played.records if each.at_ns >= DAY_S * NS_PER_S]
    return {
        "lost": minutes_lost(played, DAY_S), "hours": machine_hours(played, DAY_S),
        "good": sum(map(played.good, since)) / len(since), "requests": len(since),
    }  # fmt: skip


def _spike(rule: str, seed: int, *, cold_s: float) -> Row:
    begins, ends = 600.0, 1020.0
    played = play(made(rule, Spike(0.15, 20.0, begins, ends), 1200.0, cold_start_s=(cold_s, cold_s)), seed)
    assert played.scaling is not None, "it scales"

    def good(since_s: float, until_s: float) -> int:
        return sum(played.good(each) for each in played.records if since_s <= each.at_ns / NS_PER_S < until_s)

    alone = [each for each in played.scaling.seen if begins <= each.now_ns / NS_PER_S < begins + cold_s]
    workers_s = sum(each.ready * each.window_s for each in alone)
    return {
        "recovered_s": recovery_s(played, begins, ends), "good": good_during(played, begins, ends),
        "good_per_s": good(begins, ends) / (ends - begins),
        "held_until_new_workers": good(begins, begins + cold_s) / (workers_s * WORKER_RPS),
    }  # fmt: skip


def _steady(rule: str, seed: int) -> Row:
    played = play(made(rule, Poisson(1.3), 3600.0, start=4), seed)
    assert played.scaling is not None, "it scales"
    moves = sum(each.move != "hold" for each in played.scaling.decisions)
    return {"turns": turns(played), "moves": moves, "lost": minutes_lost(played)}


def _scenario(name: str, seed: int) -> Row:
    verdict = run_scenario(SCENARIOS[name], Knobs(), seed)
    return {"passes": verdict.passed} | {each.words: round(each.value, 4) for each in verdict.findings}


def _asked(args: argparse.Namespace, run: Callable[[str, int], Row], names: Sequence[str]) -> dict[str, Any]:
    """Each name on each seed, several at once; their rows, and the spread of each figure."""
    seeds = range(args.first, args.first + args.seeds)
    asked = [(name, seed) for name in names for seed in seeds]
    rows: dict[str, list[Row]] = {name: [] for name in names}
    with ProcessPoolExecutor(args.jobs) as processes:
        for (name, seed), row in zip(asked, processes.map(run, *zip(*asked, strict=True)), strict=True):
            rows[name].append({"seed": seed, **row})
            print(name, rows[name][-1], flush=True)
    return {
        name: {"runs": found}
        | {each: spread([row[each] for row in found]) for each in found[0] if each != "seed"}
        for name, found in rows.items()
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(values), "sd": stdev(values) if len(values) > 1 else 0.0}


def day(args: argparse.Namespace, rules: Sequence[str]) -> dict[str, Any]:
    """Days after the first, by rule."""
    return _asked(args, partial(_day, peak=args.peak, days=args.days), rules)


def spike(args: argparse.Namespace, rules: Sequence[str]) -> dict[str, Any]:
    """Twenty times the load from one second to the next, for seven minutes."""
    return {
        f"cold start {cold_s:.0f} s": _asked(args, partial(_spike, cold_s=cold_s), rules)
        for cold_s in (30.0, 60.0, 120.0)
    }


def steady(args: argparse.Namespace, rules: Sequence[str]) -> dict[str, Any]:
    """An even load for an hour: changes of direction."""
    return _asked(args, _steady, rules)


def spot(args: argparse.Namespace, rules: Sequence[str]) -> dict[str, Any]:
    """All spot machines are taken back at once, and fifty workers leave under load: the scenarios of these
    names, of the product's rule.
    """
    del rules
    return _asked(args, _scenario, ("spot-all-revoked", "zone-loss", "drain-under-load"))


PARTS = {"day": day, "spike": spike, "steady": steady, "spot": spot}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=11, help="the first seed: 1 to 10 were tuned on")
    parser.add_argument("--days", type=int, default=1, help="days that are measured, after the first")
    parser.add_argument("--peak", type=float, default=2.6, help="requests per second of the busiest hour")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--rules", default=",".join(RULES))
    add_json_option(parser)
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    rules = args.rules.split(",")
    result = {name: PARTS[name](args, rules) for name in args.parts or PARTS}
    extend_result(args.json, result)


if __name__ == "__main__":
    main()
