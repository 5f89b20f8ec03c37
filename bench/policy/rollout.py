"""How often a rollout judges right: versions that are equal, slow, failing, cut off or cold, 100 times each.

    python -m bench.policy.rollout [--trials N] [--hours H] [--fit FILE] [--only VERSION] [--keep FILE]
                                   [--json FILE]

Requests come from one run of the simulator (conversations of four turns on average, 20 requests a second, on
workers of which every step is computed). In each trial conversations are dealt to canary and control cohort
anew, as the gateway deals them, and the plan's steps are walked through with the product's own policy
(policy/rollout): so what load does, and what requests of one conversation have in common, is that of the run.
Over every request's times noise is laid (log-normal), for real steps scatter and modelled ones do not: as
much as `--fit` finds in a real rollout (a server's rollouts.json, or a result that holds one), or `--noise`.
The new version's faults are laid over the canary's requests. It is judged every `LOOK_S` seconds; in the
product every second, which intervals that hold at all times do not mind. A FILE that is there already is
added to, so that the versions may be tried in parts.
"""

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import msgspec

from bench.harness import command_line, extend_result
from penstock.clock import NS_PER_S
from penstock.policy.flow import Outcome
from penstock.policy.rollout.cohorts import GROUPS, Cohort, bucket_of, cohort_of
from penstock.policy.rollout.evidence import Observation, RolloutMetric, total
from penstock.policy.rollout.rollout import Rollout, RolloutPlan, RolloutState
from penstock.rng import Stream, stream
from penstock.sim.scenarios.scenario import ANSWER, pool, setup
from penstock.sim.scenarios.setup import Knobs
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.traffic.workload import Callers, Conversations, LengthDistribution, Poisson, even, merged
from penstock.sim.world.world import World

LOOK_S = 20
SESSIONS_PER_S = 5.0
WORKERS = 17


@dataclass(slots=True, frozen=True)
class Ended:
    """One request of the run."""

    session: str
    end_ns: int
    seen: Observation


@dataclass(slots=True, frozen=True)
class Run:
    """The requests of so many simulated seconds."""

    seconds: float
    requests: list[Ended]


@dataclass(slots=True, frozen=True)
class Noise:
    """Standard deviations of logarithms."""

    tpot: float
    prefill: float


def fitted(path: Path) -> Noise:
    """The noise of a real rollout's times, less what rows and uncached tokens explain."""
    found = msgspec.json.decode(path.read_bytes())
    (rollout,) = msgspec.convert(found["rollouts"] if isinstance(found, dict) else found, list[Rollout])

    def left(metric: RolloutMetric) -> float:
        sides = [total(side[metric]) for side in (rollout.evidence.canary, rollout.evidence.control)]
        sxx = sum(each.xx - each.x**2 / each.n for each in sides)
        sxy = sum(each.xy - each.x * each.y / each.n for each in sides)
        syy = sum(each.yy - each.y**2 / each.n for each in sides)
        num = sum(each.n for each in sides)
        print(f"{path.name}: {metric} of {num} requests", flush=True)
        return math.sqrt((syy - sxy**2 / sxx) / (num - 3))

    return Noise(left(RolloutMetric.TPOT), left(RolloutMetric.PREFILL))


def recorded(seconds: float) -> list[Ended]:
    """The run, by the requests' ends, without noise."""
    source = Conversations(
        arrivals=Poisson(SESSIONS_PER_S), callers=Callers(tenants=even(6)), system_tokens=480, output=ANSWER,
        message=LengthDistribution(60, 0.8, maximum=2048), think_s=6, context_max=6000,
    )  # fmt: skip
    made = setup(Knobs(), [pool(Knobs(), workers=WORKERS)], [source], seconds=seconds)
    records: list[RequestRecord] = []
    World(made.world, merged(made.sources, 1, seconds), on_record=records.append).run()
    answered = [each for each in records if each.outcome is Outcome.FINISHED and each.first_ns >= 0]
    begins: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    for each in answered:
        begins.setdefault(each.worker, []).append(each.first_ns)
        ends.setdefault(each.worker, []).append(each.end_ns)
    for times in (*begins.values(), *ends.values()):
        times.sort()

    def rows(each: RequestRecord) -> int:
        begun = bisect_right(begins[each.worker], each.end_ns)
        return begun - bisect_right(ends[each.worker], each.end_ns) + 1

    return sorted(
        (
            Ended(
                each.id.partition(".")[0],
                each.end_ns,
                Observation(
                    "", is_canary=False, group=0, tokens=each.completion_tokens, tpot_ns=each.tpot_ns,
                    rows=rows(each), prefill_ns=each.ttft_ns - each.queue_ns,
                    uncached_tokens=each.prompt_tokens - each.cached_tokens,
                ),
            )
            for each in answered
        ),
        key=lambda each: each.end_ns,
    )  # fmt: skip


def with_noise(requests: Sequence[Ended], noise: Noise) -> list[Ended]:
    """The same, with times that scatter."""
    draw = stream(1, "bench/rollout/noise")
    return [
        Ended(
            each.session,
            each.end_ns,
            msgspec.structs.replace(
                each.seen,
                tpot_ns=round(each.seen.tpot_ns * draw.lognormvariate(0, noise.tpot)),
                prefill_ns=round(each.seen.prefill_ns * draw.lognormvariate(0, noise.prefill)),
            ),
        )
        for each in requests
    ]


def kept(path: Path | None, seconds: float) -> list[Ended]:
    """The run, from the file that an earlier call left, if it is there.

    Raises:
        SystemExit: the file has a run of another length.
    """
    if path is not None and path.exists():
        run = msgspec.msgpack.decode(path.read_bytes(), type=Run)
        if run.seconds != seconds:
            sys.exit(f"{path} has {run.seconds / 3600:g} hours of requests: give --hours, or another file")
        return run.requests
    requests = recorded(seconds)
    if path is not None:
        path.write_bytes(msgspec.msgpack.encode(Run(seconds, requests)))
    return requests


Change = Callable[[Observation, int, Stream], Observation]
"""The new version's effect on the canary's request of this number."""


def _same(seen: Observation, _: int, __: Stream) -> Observation:
    return seen


def _slower(factor: float) -> Change:
    return lambda seen, _, __: msgspec.structs.replace(seen, tpot_ns=round(seen.tpot_ns * factor))


def _failing(share: float) -> Change:
    return lambda seen, _, draw: msgspec.structs.replace(seen, failed=draw.random() < share)


def _babbling(seen: Observation, _: int, draw: Stream) -> Observation:
    """A fifth of the answers does not end by itself."""
    if draw.random() > 0.2:
        return seen
    return msgspec.structs.replace(seen, tokens=512, cut_off=True)


def _cold(seen: Observation, number: int, _: Stream) -> Observation:
    """Its first 40 requests find no cache, and wait for what is made at first use."""
    if number >= 40:
        return seen
    return msgspec.structs.replace(seen, prefill_ns=seen.prefill_ns * 5, tpot_ns=seen.tpot_ns * 2)


VERSIONS: dict[str, Change] = {
    "equal": _same,
    "cold, else equal": _cold,
    "2 % slower per token": _slower(1.02),
    "8 % slower per token": _slower(1.08),
    "15 % slower per token": _slower(1.15),
    "2 % of requests fail": _failing(0.02),
    "all requests fail": _failing(1.0),
    "a fifth is cut off": _babbling,
}


def trial(requests: Sequence[Ended], change: Change, number: int) -> Rollout:
    """Walk through one rollout."""
    plan = RolloutPlan(model="m", candidate="m@2", promotes=True)
    rollout = Rollout(id=f"trial-{number}", plan=plan, baseline="m@1", began_ns=0, step_began_ns=0)
    draw, num_canary, look_ns = stream(number, "bench/rollout"), 0, 0
    buckets: dict[str, int] = {}
    for each in requests:
        bucket = buckets.get(each.session)
        if bucket is None:
            bucket = buckets[each.session] = bucket_of(rollout.id, each.session)
        cohort = cohort_of(bucket, rollout.share)
        if cohort is not Cohort.REST:
            seen = each.seen
            if is_canary := cohort is Cohort.CANARY:
                seen, num_canary = change(seen, num_canary, draw), num_canary + 1
            rollout.take(msgspec.structs.replace(seen, is_canary=is_canary, group=bucket % GROUPS))
        if each.end_ns >= look_ns:
            look_ns = each.end_ns + LOOK_S * NS_PER_S
            if rollout.judge(each.end_ns) and not rollout.is_live:
                rollout.step_began_ns = each.end_ns  # When it was decided.
                return rollout
    return rollout


_SHARED: list[Ended] = []
"""The requests, in each of the processes that try."""


def _share(requests: list[Ended]) -> None:
    _SHARED[:] = requests


def _trial(name: str, number: int) -> Rollout:
    return trial(_SHARED, VERSIONS[name], number)


def main() -> None:
    """Print a table, and write JSON if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--hours", type=float, default=1.25, help="of simulated requests")
    parser.add_argument("--noise", type=float, default=0.3, help="standard deviation of a time's logarithm")
    parser.add_argument("--fit", type=Path, help="a server's rollouts.json: as much noise as there")
    parser.add_argument("--keep", type=Path, help="the simulated requests stay here for a further call")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", action="append", choices=tuple(VERSIONS), help="only these versions")
    args = parser.parse_args()
    noise = fitted(args.fit) if args.fit is not None else Noise(args.noise, args.noise)
    print(f"noise: {noise.tpot:.3f} of times per token, {noise.prefill:.3f} of prefill", flush=True)
    requests = with_noise(kept(args.keep, args.hours * 3600), noise)
    print(f"{len(requests)} requests of {len({each.session for each in requests})} conversations")
    fit = {"fitted_to": args.fit.name} if args.fit is not None else {}
    setting = {
        "trials": args.trials,
        "hours": args.hours,
        "requests": len(requests),
        "noise": asdict(noise),
        **fit,
    }
    table: dict[str, object] = {}
    for name in VERSIONS:
        if args.only and name not in args.only:
            continue
        with ProcessPoolExecutor(args.jobs, get_context("fork"), _share, (requests,)) as processes:
            ended = list(processes.map(partial(_trial, name), range(args.trials), chunksize=5))
        back = [each for each in ended if each.state is RolloutState.ROLLED_BACK]
        verdicts = [each.step_began_ns / 60e9 for each in ended if not each.is_live]
        row = {
            "rolled_back": len(back),
            "by_the_end_of_the_5_percent_step": sum(each.step <= 1 for each in back),
            "in_step": dict(Counter(each.plan.steps[each.step] for each in back)),
            "promoted": sum(each.state is RolloutState.PROMOTED for each in ended),
            "minutes_to_the_verdict": round(median(verdicts), 1) if verdicts else None,
            "because_of": dict(Counter(each.why.partition(" +")[0].partition(" -")[0] for each in back)),
        }
        table[name] = {**setting, **row}
        print(f"{name:>24}: {row}", flush=True)
    extend_result(args.json, {"versions": table})


if __name__ == "__main__":
    main()
