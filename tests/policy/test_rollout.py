"""Rollouts: who is dealt what, what is concluded from what is seen, and when."""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.policy.rollout.cohorts import BUCKETS, GROUPS, Cohort, bucket_of, cohort_of
from penstock.policy.rollout.dealing import active_of
from penstock.policy.rollout.evidence import (
    Evidence,
    Observation,
    RolloutMetric,
    RolloutVerdict,
    Sums,
    compare,
    half_width,
)
from penstock.policy.rollout.rollout import Rollout, RolloutPlan, RolloutState
from penstock.rng import stream

PLAN = RolloutPlan(model="m", candidate="m@2", requests_min=50, warm_up_requests=0)


def rollout(**changes: object) -> Rollout:
    plan = msgspec.structs.replace(PLAN, **changes)
    return Rollout(id="r-1", plan=plan, baseline="m@1", began_ns=0, step_began_ns=0)


def feed(
    to: Rollout,
    requests: int,
    *,
    seed: int = 0,
    slower: float = 1.0,
    failing: float = 0.0,
    cut_off: float = 0.1,
    rows: tuple[float, float] = (8, 8),
) -> None:
    """As many requests of each cohort: a step of 10 ms and 0.5 ms per row, with noise."""
    draw = stream(seed, "test/rollout")
    for number in range(2 * requests):
        is_canary = number % 2 == 0
        num_rows = 1 + draw.randrange(int(2 * rows[0 if is_canary else 1]))
        step_ms = (10 + 0.5 * num_rows) * draw.lognormvariate(0, 0.2) * (slower if is_canary else 1)
        uncached = draw.randrange(20, 400)
        to.take(
            Observation(
                to.id, is_canary=is_canary, group=draw.randrange(GROUPS),
                failed=draw.random() < (failing if is_canary else 0.0),
                cut_off=draw.random() < (cut_off if is_canary else 0.1),
                tokens=draw.randrange(10, 200), tpot_ns=int(step_ms * NS_PER_MS), rows=num_rows,
                prefill_ns=int((5 + 0.1 * uncached) * draw.lognormvariate(0, 0.2) * NS_PER_MS),
                uncached_tokens=uncached,
            )
        )  # fmt: skip


# --- cohorts ----------------------------------------------------------------------------------------


@given(st.integers(0, BUCKETS - 1), st.lists(st.integers(0, BUCKETS), min_size=2, max_size=6).map(sorted))
def test_a_conversation_changes_its_version_once_at_most(bucket: int, shares: list[int]) -> None:
    has_new = [cohort_of(bucket, share) is Cohort.CANARY for share in shares]
    assert has_new == sorted(has_new), "once it has the new version it keeps it"


@pytest.mark.parametrize("share", [0, 1, 100, 500, 2500, 5000])
def test_the_control_cohort_is_as_large_as_the_canary(share: int) -> None:
    sizes = Counter(cohort_of(bucket, share) for bucket in range(BUCKETS))
    assert sizes[Cohort.CANARY] == sizes[Cohort.CONTROL] == share


def test_behind_the_last_step_all_have_it_and_nobody_is_compared() -> None:
    assert {cohort_of(bucket, BUCKETS) for bucket in range(BUCKETS)} == {Cohort.CANARY}


def test_another_rollout_deals_anew() -> None:
    conversations = [f"tenant\0{number}" for number in range(20_000)]
    first = {each for each in conversations if bucket_of("r-1", each) < 1000}
    second = {each for each in conversations if bucket_of("r-2", each) < 1000}
    assert 1800 < len(first) < 2200
    assert len(first & second) < 300, "a tenth of a tenth"


# --- evidence ---------------------------------------------------------------------------------------


def groups_of(pairs: list[tuple[int, float, float]]) -> list[Sums]:
    groups = [Sums() for _ in range(GROUPS)]
    for group, x, y in pairs:
        groups[group].add(x, y)
    return groups


def test_what_a_covariate_explains_is_no_difference() -> None:
    """The canary's workers are nearly empty: faster as it is, a tenth slower at equal rows."""
    draw = stream(1, "test/covariate")

    def cohort(rows_max: int, slower: float) -> list[Sums]:
        found: list[tuple[int, float, float]] = []
        for _ in range(2000):
            rows = draw.randrange(rows_max)
            found.append((draw.randrange(GROUPS), rows, 0.05 * rows + slower + draw.gauss(0, 0.1)))
        return groups_of(found)

    canary, control = cohort(8, 0.1), cohort(16, 0.0)
    compared = compare(canary, control)
    assert compared is not None
    difference, variance = compared
    assert difference == pytest.approx(0.1, abs=0.02)
    assert 0 < variance < 0.0001


def test_conversations_that_differ_widen_the_interval() -> None:
    draw = stream(2, "test/clusters")
    alike = groups_of([(n % GROUPS, 0.0, draw.gauss(0, 0.1)) for n in range(2000)])
    level = [draw.gauss(0, 0.5) for _ in range(GROUPS)]
    apart = groups_of([(n % GROUPS, 0.0, level[n % GROUPS] + draw.gauss(0, 0.1)) for n in range(2000)])
    narrow, wide = compare(alike, alike), compare(apart, alike)
    assert narrow is not None
    assert wide is not None
    assert wide[1] > 50 * narrow[1]


def test_a_few_conversations_say_nothing() -> None:
    few = groups_of([(n % 4, 0.0, 1.0) for n in range(1000)])
    assert compare(few, few) is None


def test_an_interval_holds_at_all_times_together() -> None:
    """Of equal means, looked at after every sample, at most a share of alpha ever seems to differ."""
    wrong, runs, alpha = 0, 300, 0.05
    for run in range(runs):
        draw, total = stream(run, "test/anytime"), 0.0
        for n in range(1, 1500):
            total += draw.gauss(0, 1)
            if n >= 10 and abs(total / n) > half_width(1 / n, alpha):
                wrong += 1
                break
    assert wrong <= alpha * runs


@given(st.floats(1e-12, 10), st.floats(1.01, 100))
def test_more_variance_is_a_wider_interval(variance: float, factor: float) -> None:
    assert half_width(variance * factor, 0.01) > half_width(variance, 0.01)


def test_failures_are_seen_after_a_dozen() -> None:
    evidence = Evidence()
    for number in range(24):
        evidence.add(Observation("r-1", is_canary=number % 2 == 0, group=number, failed=number % 2 == 0))
    assert evidence.read(RolloutMetric.FAILED).verdict is RolloutVerdict.WORSE


def test_one_clients_failures_are_nobodys_verdict() -> None:
    evidence = Evidence()
    for number in range(200):
        evidence.add(Observation("r-1", is_canary=number % 2 == 0, group=3, failed=number % 2 == 0))
    assert evidence.read(RolloutMetric.FAILED).verdict is RolloutVerdict.OPEN


def test_failures_of_both_are_no_reason() -> None:
    evidence = Evidence()
    for number in range(2000):
        evidence.add(Observation("r-1", is_canary=number % 2 == 0, group=number, failed=number % 10 < 2))
    assert evidence.read(RolloutMetric.FAILED).verdict is not RolloutVerdict.WORSE


# --- the life of one --------------------------------------------------------------------------------


def walk(to: Rollout, seconds: int, **more: float) -> None:
    """Ten requests of each cohort a second, judged each time."""
    for second in range(seconds):
        if to.is_live:
            feed(to, 10, seed=second, **more)  # pyright: ignore[reportArgumentType]
            to.judge(second * NS_PER_S)


def test_an_equal_version_goes_through_all_steps() -> None:
    found = rollout(step_s=30.0, promotes=True)
    shares: list[int] = []
    for second in range(400):
        if found.is_live and found.share not in shares:
            shares.append(found.share)
        feed(found, 10, seed=second)
        found.judge(second * NS_PER_S)
    assert shares == [100, 500, 2500, 5000]
    assert found.state is RolloutState.PROMOTED, found.why
    assert found.share == BUCKETS


def test_a_version_whose_canary_ends_no_more_requests_is_not_promoted_by_itself() -> None:
    """As many as were wanted, before its workers went: nobody knows whether it could answer everybody."""
    found = rollout(steps=(25.0, 50.0), step_s=30.0, promotes=True)
    feed(found, 300)
    found.judge(NS_PER_S)
    assert found.judge(100 * NS_PER_S), "of a step that is not the last one nothing follows for everybody"
    feed(found, 300, seed=1)
    assert not found.judge(101 * NS_PER_S)
    assert "certainty about" in found.why
    before = msgspec.json.encode(found)
    assert not found.judge(162 * NS_PER_S)
    assert (found.state, found.why) == (RolloutState.RUNNING, "requests of the canary; none for 61 s")
    again = msgspec.json.decode(before, type=Rollout)
    again.judge(162 * NS_PER_S)
    assert again.why == found.why, "what is on record says it, too"
    again.judge(163 * NS_PER_S)
    feed(again, 1, seed=2)
    assert again.judge(164 * NS_PER_S)
    assert again.state is RolloutState.PROMOTED


def test_a_quiet_minute_in_the_middle_is_no_quiet_end() -> None:
    found = rollout(steps=(50.0,), step_s=120.0, promotes=True)
    feed(found, 300)
    found.judge(NS_PER_S)
    found.judge(100 * NS_PER_S)
    assert found.why == "requests of the canary; none for 99 s"
    feed(found, 1, seed=1)
    found.judge(101 * NS_PER_S)
    assert "certainty about" in found.why
    assert found.judge(121 * NS_PER_S)
    assert found.state is RolloutState.PROMOTED


def test_an_operator_promotes_what_is_ready() -> None:
    found = rollout(steps=(50.0,), step_s=10.0)
    walk(found, 60)
    assert found.state is RolloutState.READY
    assert found.share == BUCKETS // 2, "it stays where it is"
    found.promote()
    assert found.share == BUCKETS


@pytest.mark.parametrize(
    ("worse", "metric"),
    [
        ({"slower": 1.3}, RolloutMetric.TPOT),
        ({"failing": 0.1}, RolloutMetric.FAILED),
        ({"cut_off": 0.5}, RolloutMetric.CUT_OFF),
    ],
)
def test_a_worse_version_is_taken_back(worse: dict[str, float], metric: RolloutMetric) -> None:
    found = rollout(step_s=600.0)
    walk(found, 120, **worse)
    assert found.state is RolloutState.ROLLED_BACK
    assert found.why.startswith(metric.value), found.why
    assert found.share == 0


def test_a_ready_version_that_turns_bad_is_taken_back() -> None:
    found = rollout(steps=(50.0,), step_s=10.0)
    walk(found, 60)
    assert found.state is RolloutState.READY
    walk(found, 60, failing=0.3)
    assert found.state is RolloutState.ROLLED_BACK


def test_times_of_a_cold_version_do_not_count() -> None:
    found = rollout(warm_up_requests=100)
    feed(found, 100, slower=5.0)
    assert found.evidence.read(RolloutMetric.TPOT).canary_requests == 0
    feed(found, 100)
    assert found.evidence.read(RolloutMetric.TPOT).canary_requests == 100


def test_a_version_that_fails_while_it_is_cold_is_taken_back() -> None:
    found = rollout(warm_up_requests=1000)
    feed(found, 20, failing=1.0)
    found.judge(0)
    assert found.state is RolloutState.ROLLED_BACK


def test_without_requests_it_waits_and_says_so() -> None:
    found = rollout()
    assert not found.judge(3600 * NS_PER_S)
    assert found.state is RolloutState.RUNNING
    assert found.why == "50 requests of each cohort; the canary has 0, control 0"


def test_it_is_the_same_after_a_restart() -> None:
    found = rollout()
    walk(found, 20)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Rollout)
    assert again == found
    assert [msgspec.structs.astuple(each) for each in again.readings()] == [
        msgspec.structs.astuple(each) for each in found.readings()
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": ()}, {"steps": (5.0, 1.0)}, {"steps": (1.0, 1.0)}, {"steps": (60.0,)},
        {"steps": (math.nan,)}, {"step_s": 0.0}, {"requests_min": 0}, {"warm_up_requests": -1},
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_has_a_fault(changes: dict[str, object]) -> None:
    assert msgspec.structs.replace(PLAN, **changes).faults()
    assert not PLAN.faults()


@pytest.mark.parametrize(
    ("worse", "words"),
    [({"slower": 3.0}, "hard stop: time per token is"), ({"failing": 1.0}, "hard stop: 5 of its last")],
)
def test_a_version_that_is_worse_beyond_all_doubt_is_stopped_after_a_few_requests(
    worse: dict[str, float], words: str
) -> None:
    found = rollout()
    for seed in range(40):
        feed(found, 1, seed=seed, **worse)
        if found.judge(NS_PER_S):
            break
    assert found.state is RolloutState.ROLLED_BACK
    assert words in found.why
    assert found.evidence.requests(canary=True) <= 12


def test_no_hard_stop_for_what_fails_on_both_sides_or_for_one_client() -> None:
    evidence = Evidence()
    for number in range(60):
        evidence.add(Observation("r", is_canary=number % 2 == 0, group=number % GROUPS, failed=True))
    assert evidence.hard_stop() == "", "the old version fails as well"
    evidence = Evidence()
    for number in range(60):
        is_canary = number % 2 == 0
        evidence.add(Observation("r", is_canary=is_canary, group=1 if is_canary else number % GROUPS,
                                 failed=is_canary))  # fmt: skip
    assert evidence.hard_stop() == "", "all from one group of conversations"


def test_equal_versions_are_never_stopped_hard() -> None:
    for seed in range(20):
        found = rollout()
        for part in range(15):
            feed(found, 10, seed=1000 * seed + part)
            assert found.evidence.hard_stop() == ""


def test_machine_time_counts_a_dearer_prefill_and_dearer_tokens() -> None:
    found = rollout()
    feed(found, 600, slower=1.4)
    reading = found.evidence.read(RolloutMetric.COST)
    assert reading.verdict is RolloutVerdict.WORSE
    assert reading.difference is not None
    assert 0.2 < reading.difference < 0.45
    equal = rollout()
    feed(equal, 600)
    assert equal.evidence.read(RolloutMetric.COST).verdict is not RolloutVerdict.WORSE


def test_a_probe_score_counts_if_there_is_one_and_less_is_worse() -> None:
    found = rollout()
    feed(found, 100)
    assert RolloutMetric.SCORE not in found.evidence.metrics
    draw = stream(1, "test/rollout/score")
    for number in range(3000):
        is_canary = number % 2 == 0
        right = draw.random() < (0.7 if is_canary else 0.9)
        found.take(Observation("r-1", is_canary=is_canary, group=number % GROUPS, score=float(right)))
    assert found.evidence.requests(canary=True) == 100, "a probe is no request"
    reading = found.evidence.read(RolloutMetric.SCORE)
    assert reading.verdict is RolloutVerdict.WORSE
    assert found.judge(NS_PER_S)
    assert "probe score -" in found.why
    better = Evidence()
    for number in range(3000):
        is_canary = number % 2 == 0
        right = draw.random() < (0.9 if is_canary else 0.7)
        better.add(Observation("r", is_canary=is_canary, group=number % GROUPS, score=float(right)))
    assert better.read(RolloutMetric.SCORE).verdict is RolloutVerdict.FINE


# --- shadow traffic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "may"), [(0.0, True), (0.009, False), (0.01, True), (100.0, True), (100.1, False)]
)
def test_how_much_of_the_traffic_may_be_copied(percent: float, may: bool) -> None:
    assert (msgspec.structs.replace(PLAN, shadow=percent).faults() == "") is may


def test_while_it_is_in_the_shadow_nobody_has_the_candidate() -> None:
    trial = Rollout.begin("r-1", msgspec.structs.replace(PLAN, shadow=20.0), "m@1", 0)
    active = active_of(trial)
    assert active is not None
    assert (trial.share, trial.shadow, active.serves) == (0, BUCKETS // 5, "m@1")
    found = [active.assign(lambda number=number: f"c{number}") for number in range(2000)]
    assert {each.version for each in found} == {"m@1"}
    copied = [each for each in found if each.cohort is Cohort.SHADOW]
    assert 300 < len(copied) < 500
    assert {each.candidate for each in copied} == {"m@2"}
    assert not any(each.candidate for each in found if each.cohort is not Cohort.SHADOW)


def test_the_shadow_comes_before_the_first_step_and_its_evidence_counts_on() -> None:
    trial = Rollout.begin("r-1", msgspec.structs.replace(PLAN, shadow=100.0, step_s=10.0), "m@1", 0)
    assert trial.is_shadowing
    assert trial.judge(NS_PER_S) is False
    assert "50 requests that the candidate had rows to spare for; there were 0" in trial.why
    feed(trial, 60)
    assert trial.judge(11 * NS_PER_S)
    assert (trial.step, trial.share, trial.shadow) == (0, BUCKETS // 100, 0)
    assert trial.evidence.requests(canary=True) == 60
    assert trial.judge(12 * NS_PER_S) is False, "the step wants requests of its own"


def test_what_is_worse_in_the_shadow_is_taken_back_before_anybody_has_it() -> None:
    trial = Rollout.begin("r-1", msgspec.structs.replace(PLAN, shadow=100.0), "m@1", 0)
    feed(trial, 400, slower=1.4)
    assert trial.judge(NS_PER_S)
    assert trial.state is RolloutState.ROLLED_BACK
    assert trial.step == -1
    assert active_of(trial) is None


@pytest.mark.parametrize("shadow", [-1.0, 0.001, 101.0, math.nan])
def test_a_shadow_is_a_percentage(shadow: float) -> None:
    assert "'shadow' must be 0 or a percentage" in msgspec.structs.replace(PLAN, shadow=shadow).faults()
