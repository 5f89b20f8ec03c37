"""The autoscaler in the simulator: workers that leave under load cut no stream, spot machines that are all
taken back at once and a zone that is lost are replaced by others. The gate has it over many minutes.
"""

import pytest

from penstock.config.scale import ScaleConfig, ScalePoolConfig
from penstock.policy.flow import Outcome
from penstock.sim.scenarios.capacity import Swings, scaled
from penstock.sim.scenarios.setup import Knobs, Played, play
from penstock.sim.traffic.workload import Poisson
from penstock.sim.world.scaling import Outage, Scaling, ScalingSpec

COLD_S = (5.0, 10.0)


def scaling_of(played: Played) -> Scaling:
    assert played.scaling is not None
    return played.scaling


def test_workers_that_leave_under_load_cut_no_stream() -> None:
    spec = ScalingSpec(scale=ScaleConfig(max=3), cold_start_s=(1.0, 4.0), decider=Swings)
    played = play(scaled(Knobs(), Poisson(0.6), 120.0, spec, (2,)), 1)
    assert sum(each.move == "in" for each in scaling_of(played).decisions) >= 10
    assert {each.outcome for each in played.records} == {Outcome.FINISHED}


@pytest.mark.parametrize("notice_s", [0.0, 10.0])
def test_machines_that_are_taken_are_replaced_by_others(notice_s: float) -> None:
    """A zone is gone at once; spot machines have some seconds."""
    pools = (
        ScalePoolConfig(name="stays", price=4.0),
        ScalePoolConfig(name="goes", price=1.0, spot=notice_s > 0),
    )
    outage = Outage(pool="goes", at_s=60.0, notice_s=notice_s, lasts_s=3600.0)
    spec = ScalingSpec(
        scale=ScaleConfig(max=8, min=2, pools=pools), pools=("stays", "goes"), cold_start_s=COLD_S,
        outages=(outage,),
    )  # fmt: skip
    played = play(scaled(Knobs(), Poisson(0.7), 120.0, spec, (2, 2)), 1)
    stays, lost = scaling_of(played).seen[-1].pools
    assert (lost.ready, lost.trouble) == (0, "no machines are to be had")
    assert stays.ready > 2, "others have taken their place"
    assert Outcome.FAILED not in {each.outcome for each in played.records}
