"""Rollouts in the simulator: what is equal is promoted, what is worse is taken back, and copies are seen by
nobody.
"""

from penstock.policy.rollout.rollout import RolloutState
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import Verdict, run_scenario
from penstock.sim.scenarios.setup import Knobs, play
from penstock.sim.world.rollout import SimRollout


def passed(name: str) -> Verdict:
    verdict = run_scenario(SCENARIOS[name], Knobs(), 1)
    assert verdict.passed, [each for each in verdict.findings if not each.passed]
    return verdict


def trial_of(verdict: Verdict) -> SimRollout:
    assert verdict.played.rollout is not None
    return verdict.played.rollout


def test_an_equal_version_is_promoted_and_a_conversation_changes_once_at_most() -> None:
    trial = trial_of(passed("version-equal"))
    assert trial.rollout.state is RolloutState.PROMOTED
    assert trial.changes() == 1
    both = [each for each in trial.got.values() if len(each) == 2]
    assert both
    assert {tuple(each) for each in both} == {("model@1", "model@2")}


def test_a_worse_version_is_taken_back_and_its_conversations_get_the_old_one() -> None:
    verdict = passed("version-slow")
    trial = trial_of(verdict)
    assert trial.rollout.why
    changed = {tuple(each) for each in trial.got.values() if len(each) > 1}
    assert any(each[-1] == "model@1" for each in changed), "some had the new one, and got the old one back"
    assert changed <= {("model@1", "model@2"), ("model@2", "model@1"), ("model@1", "model@2", "model@1")}


def test_copies_find_a_broken_version_and_nobody_notices() -> None:
    verdict = passed("version-shadow")
    trial = trial_of(verdict)
    assert trial.rollout.step == -1, "nobody has ever had it"
    assert verdict.baseline is not None
    ends = {each.id: each.end_ns for each in verdict.baseline.records}
    assert all(ends[each.id] == each.end_ns for each in verdict.played.records)


def test_the_same_seed_is_the_same_rollout() -> None:
    setup = SCENARIOS["version-failing"].build(Knobs())
    first, again = play(setup, 2), play(setup, 2)
    assert first.result.digest == again.result.digest
    assert first.rollout is not None
    assert again.rollout is not None
    assert first.rollout.rollout == again.rollout.rollout
