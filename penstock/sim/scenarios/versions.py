"""Scenarios in which a new version of a model is tried: one that is equal, or equal and cold, one that is
slow, slightly slower, fails, computes garbage or does not stop talking, and one that only gets copies.

Steps are short, for there are few requests; docs/rollout.md has the figures of a server's plan, with noise.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from penstock.clock import NS_PER_S
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.policy.rollout.rollout import RolloutPlan, RolloutState
from penstock.sim.scenarios.scenario import (
    Check,
    Finding,
    answered,
    at_least,
    at_most,
    pool,
    scenario,
    setup,
)
from penstock.sim.scenarios.setup import Knobs, Played, Setup
from penstock.sim.traffic.workload import Callers, Conversations, LengthDistribution, Poisson, even
from penstock.sim.world.rollout import RolloutSpec, SimRollout, Slower, Version
from penstock.sim.world.run import PoolSpec

OLD, NEW = "model@1", "model@2"
LAW = LinearStepTime(fixed_ns=30_000_000, row_ns=1_000_000, prefill_ns=200_000)
PLAN = RolloutPlan(
    model="model", candidate=NEW, steps=(20.0, 50.0), step_s=12.0, requests_min=30, warm_up_requests=8,
    promotes=True,
)  # fmt: skip
SECONDS = 36.0


def _setup(
    knobs: Knobs, *, slower: float = 1.0, seconds: float = SECONDS, plan: RolloutPlan = PLAN,
    version: Version = Version(),  # noqa: B008 - it is frozen.
) -> Setup:  # fmt: skip
    source = Conversations(
        arrivals=Poisson(6.0 * knobs.load), callers=Callers(tenants=even(6), patience_s=30.0),
        system_tokens=64, turns=3.0, message=LengthDistribution(60, 0.5, maximum=512),
        output=LengthDistribution(24, 0.4, maximum=96), think_s=2.0, context_max=2000,
    )  # fmt: skip
    law, pools = knobs.step_time or LAW, list[PoolSpec]()
    for model, workers, times in ((OLD, 3, 1.0), (NEW, 3, slower)):
        made = pool(knobs, workers=workers)
        made = replace(made, worker=replace(made.worker, step_time=Slower(law, times)))
        pools.append(replace(made, model=model, count=workers))
    made = setup(knobs, pools, [source], seconds=seconds)
    return replace(made, rollout=RolloutSpec(plan=plan, baseline=OLD, version=version))


def _of(played: Played) -> SimRollout:
    assert played.rollout is not None, "a version is tried"
    return played.rollout


def _common(played: Played) -> Sequence[Finding]:
    trial = _of(played)
    is_back = trial.rollout.state is RolloutState.ROLLED_BACK
    return (
        answered(played),
        at_most("changes of version of one conversation", trial.changes(), 2 if is_back else 1),
    )


def _failed(played: Played) -> int:
    return sum(record.outcome is Outcome.FAILED for record in played.records)


def _check_promoted(played: Played, _: Played | None) -> Sequence[Finding]:
    trial = _of(played)
    late = [record for record in played.records if record.at_ns > trial.ended_ns + NS_PER_S]
    return (
        *_common(played),
        at_most("failed requests", _failed(played), 0),
        at_least("promoted", trial.rollout.state is RolloutState.PROMOTED, 1),
        at_most("requests that the old version got after that", trial.versions_of(late).get(OLD, 0), 0),
    )


@scenario(_check_promoted)
def version_equal(knobs: Knobs) -> Setup:
    """Is a new version that is as good as the old one given to all?

    It is held against a control cohort of its own size, and nothing is worse.
    """
    return _setup(knobs)


@scenario(_check_promoted)
def version_cold(knobs: Knobs) -> Setup:
    """Is a new version taken back because its first requests are slow, while its caches are cold?

    The first requests of a version count only if they fail.
    """
    plan = msgspec.structs.replace(PLAN, warm_up_requests=25)
    return _setup(knobs, seconds=42, plan=plan, version=Version(cold_s=3.0))


def _check_taken_back(within_s: float, *, failed_max: int = 0, because: Sequence[str]) -> Check:
    def check(played: Played, _: Played | None) -> Sequence[Finding]:
        trial = _of(played)
        ended_ns = trial.ended_ns or played.result.virtual_ns
        late = [record for record in played.records if record.at_ns > ended_ns + NS_PER_S]
        why = trial.rollout.why
        return (
            *_common(played),
            at_least("taken back", trial.rollout.state is RolloutState.ROLLED_BACK, 1),
            at_least("for what is wrong with it", any(each in why for each in because), 1),
            at_most("seconds until then", ended_ns / NS_PER_S, within_s),
            at_most("failed requests", _failed(played), failed_max),
            at_most("requests that it got after that", trial.versions_of(late).get(NEW, 0), 0),
            at_least(
                "good share of requests after that", sum(map(played.good, late)) / max(1, len(late)), 0.95
            ),
        )

    return check


@scenario(_check_taken_back(30, because=("time per token", "machine time")))
def version_slow(knobs: Knobs) -> Setup:
    """Is a new version that is a quarter slower taken back by itself?

    Its tokens are compared at equal numbers of rows, for a new version has few requests, and so fast steps.
    """
    return _setup(knobs, slower=1.25, seconds=30)


def _check_never_promoted(played: Played, _: Played | None) -> Sequence[Finding]:
    trial = _of(played)
    return (
        *_common(played),
        at_most("failed requests", _failed(played), 0),
        at_most("promoted", trial.rollout.state is RolloutState.PROMOTED, 0),
    )


@scenario(_check_never_promoted)
def version_slightly_worse(knobs: Knobs) -> Setup:
    """Is a new version given to all that is 8 % slower, where 5 % are allowed?

    It is taken back, or waits for more requests: what looks worse is never promoted.
    """
    return _setup(knobs, slower=1.08)


@scenario(_check_taken_back(12, failed_max=16, because=("failed", "failures")))
def version_failing(knobs: Knobs) -> Setup:
    """How many requests does a new version cost that fails them all?

    Half of its last ten is a hard stop: nobody has to be sure.
    """
    return _setup(knobs, seconds=20, version=Version(fails=True))


@scenario(_check_taken_back(12, failed_max=16, because=("failed", "failures")))
def version_garbage(knobs: Knobs) -> Setup:
    """How many requests does a new version cost whose logits are not numbers?

    Its engine ends such a request with an error, and that counts as any.
    """
    return _setup(knobs, seconds=20, version=Version(garbage=True))


@scenario(_check_taken_back(45, because=("length of answers", "answers cut off")))
def version_babbling(knobs: Knobs) -> Setup:
    """Is a new version taken back that answers every second question without end?

    Lengths of answers, and how many are cut off, are compared like times.
    """
    return _setup(knobs, version=Version(babbles=0.5))


def _check_shadow(played: Played, baseline: Played | None) -> Sequence[Finding]:
    assert baseline is not None, "it is compared with the run without copies"
    trial = _of(played)
    first = {record.id: record.first_ns for record in baseline.records}
    return (
        *_common(played),
        at_least("taken back", trial.rollout.state is RolloutState.ROLLED_BACK, 1),
        at_least("copies", trial.num_copies, 5),
        at_most("failed requests", _failed(played), 0),
        at_most("requests that it answered", trial.versions_of(played.records).get(NEW, 0), 0),
        at_most(
            "requests whose first token came at another time than without copies",
            sum(first[record.id] != record.first_ns for record in played.records), 0,
        ),
        at_most("tokens on the bill, beside those without copies",
                played.result.counters.completion_tokens - baseline.result.counters.completion_tokens, 0),
    )  # fmt: skip


def _shadowed(knobs: Knobs) -> Setup:
    plan = msgspec.structs.replace(PLAN, shadow=50.0, steps=(50.0,))
    return _setup(knobs, seconds=15, plan=plan, version=Version(garbage=True))


def _without(knobs: Knobs) -> Setup:
    made = _shadowed(knobs)
    (source,) = made.sources
    assert isinstance(source, Conversations), "of which there is one kind here"
    return replace(made, rollout=None, sources=(replace(source, callers=replace(source.callers, model=OLD)),))


@scenario(_check_shadow, baseline=_without)
def version_shadow(knobs: Knobs) -> Setup:
    """Can a broken version be found out before anybody has it, and does anybody notice?

    It gets copies of requests, into rows that nobody needs, and its answers go nowhere. For comparison: the
    same requests without it, whose every first token comes at the same nanosecond.
    """
    return _shadowed(knobs)
