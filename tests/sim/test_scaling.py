"""The autoscaler in the simulator: fifty workers that leave under load cut no stream, spot machines that are
all taken back at once and a zone that is lost are replaced by others.
"""

import pytest

from penstock.policy.flow import Outcome
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import Verdict, run_scenario
from penstock.sim.scenarios.setup import Knobs


def passed(name: str) -> Verdict:
    verdict = run_scenario(SCENARIOS[name], Knobs(), 1)
    assert verdict.passed, [each for each in verdict.findings if not each.passed]
    return verdict


def test_fifty_workers_that_leave_under_load_cut_no_stream() -> None:
    played = passed("drain-under-load").played
    assert {each.outcome for each in played.records} == {Outcome.FINISHED}


@pytest.mark.parametrize(("name", "pool"), [("spot-all-revoked", 1), ("zone-loss", 0)])
def test_machines_that_are_taken_are_replaced_by_others(name: str, pool: int) -> None:
    scaling = passed(name).played.scaling
    assert scaling is not None
    lost = scaling.seen[-1].pools[pool]
    assert (lost.ready, lost.trouble) == (0, "no machines are to be had")
