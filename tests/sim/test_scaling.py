"""The autoscaler in the simulator: fifty workers that leave under load cut no stream, and spot machines that
are all taken back at once are replaced.
"""

from dataclasses import replace

from penstock.config.scale import ScaleConfig, ScalePoolConfig
from penstock.planning.step_time import LinearStepTime
from penstock.policy.capacity.autoscaler import Decision
from penstock.policy.capacity.signals import Signals
from penstock.policy.flow import Outcome
from penstock.sim.report.figures import Objective
from penstock.sim.scenarios.scenario import pool, setup
from penstock.sim.scenarios.setup import Knobs, Setup, play
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, even
from penstock.sim.world.scaling import Outage, ScalingSpec

LAW = LinearStepTime(fixed_ns=240_000_000, row_ns=16_000_000, prefill_ns=3_000_000)


def made(seconds: float, rate: float, counts: tuple[int, ...], scaling: ScalingSpec) -> Setup:
    source = Chat(
        name="chat", arrivals=Poisson(rate), callers=Callers(tenants=even(2)),
        prompt=LengthDistribution(200, 0.4, maximum=1024), output=LengthDistribution(20, 0.4, maximum=64),
        system_tokens=0,
    )  # fmt: skip
    pools = [pool(Knobs(), workers=count) for count in counts]
    pools = [replace(each, worker=replace(each.worker, step_time=LAW)) for each in pools]
    objective = Objective(ttft_ms=20_000, tpot_ms=2000)
    return replace(setup(Knobs(), pools, [source], seconds=seconds, objective=objective), scaling=scaling)


class Swings:
    """One more, one fewer, at every look."""

    def __init__(self, model: str, scale: ScaleConfig) -> None:
        self.model, self.scale = model, scale

    def decide(self, seen: Signals) -> Decision:
        workers = 2 if seen.ready + seen.pending > 2 else 3
        return Decision(
            wall_ns=seen.wall_ns, move="out" if workers > 2 else "in", acts=True, why="", ready=seen.ready,
            pending=seen.pending, wanted=workers, workers=workers, pools={"": workers}, opinions=(),
        )  # fmt: skip


def test_fifty_workers_that_leave_under_load_cut_no_stream() -> None:
    spec = ScalingSpec(scale=ScaleConfig(max=3), cold_start_s=(1.0, 4.0), decider=Swings)
    played = play(made(520.0, 0.9, (2,), spec), 1)
    assert played.scaling is not None
    assert sum(each.move == "in" for each in played.scaling.decisions) >= 50
    outcomes = {each.outcome for each in played.records}
    assert outcomes == {Outcome.FINISHED}, outcomes
    assert len({each.worker for each in played.records}) > 25, "workers that came did work"


def test_spot_machines_that_are_all_taken_back_are_replaced_by_others() -> None:
    scale = ScaleConfig(
        max=6, min=1,
        pools=(ScalePoolConfig(name="firm", price=4.0), ScalePoolConfig(name="spot", price=1.0, spot=True)),
    )  # fmt: skip
    outage = Outage(pool="spot", at_s=60.0, notice_s=30.0, lasts_s=1000.0)
    spec = ScalingSpec(scale=scale, pools=("firm", "spot"), cold_start_s=(20.0, 30.0), outages=(outage,))
    played = play(made(240.0, 1.0, (1, 2), spec), 1)
    assert played.scaling is not None
    last = played.scaling.seen[-1]
    firm, spot = last.pools
    assert (spot.ready, spot.pending) == (0, 0)
    assert firm.ready >= 2
    assert last.pools[1].trouble == "no machines are to be had"
    failed = [each for each in played.records if each.outcome is Outcome.FAILED]
    assert not failed, "the notice was long enough for all that ran"
