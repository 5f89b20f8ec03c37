"""In the simulated world a worker that becomes 12 % slower is out within five minutes, by the policies of the
gateway, and no other is; steps are noisy and the load goes up and down.
"""

import math
from collections.abc import Sequence

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.policy.resilience.anomalies import Standing
from penstock.schedule.step import StepShape
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.world.messages import Rank
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import WORLD, World

BEGINS_S, SECONDS, SIGMA = 100, 330, 0.2
"""Of a step's time; the demo model's steps, beside other work on its cores, were measured to spread so."""


class NoisySteps(LinearStepTime):
    """Each step takes more or less than the law says, by chance."""

    def __init__(self) -> None:
        super().__init__(fixed_ns=80_000_000, row_ns=400_000, prefill_ns=200_000)
        self._draw = rng.stream(3, "noisy steps")

    def step_ns(self, shape: StepShape) -> int:
        return int(super().step_ns(shape) * math.exp(self._draw.gauss(0.0, SIGMA)))

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        return [self.step_ns(StepShape(rows, 0, 0, count)) for count in kv_tokens]


def requests():
    """Long answers, more and fewer of them in turns."""
    at_s, number = 0.0, 0
    while at_s < SECONDS:
        number += 1
        yield SimRequest(id=f"r{number}", at_ns=int(at_s * NS_PER_S), model="model",
                         prompt=(Segment(number, 64 + 37 * (number % 11)),),
                         output_tokens=300 + 90 * (number % 7), max_tokens=2000)  # fmt: skip
        at_s += 2.2 + math.sin(at_s / 25)


def test_who_becomes_slow_is_out_within_five_minutes_and_no_other_is():
    worker = SimWorkerSpec(step_time=NoisySteps(), engine=EngineSettings(step_tokens=512, max_running=16))
    spec = WorldSpec(pools=(PoolSpec(worker=worker, count=4),), watches_speed=True)
    world = World(spec, requests())
    slow = next(iter(world.members.values())).worker
    world.timeline.at(
        BEGINS_S * NS_PER_S, WORLD, Rank.FAULT, lambda now_ns, _: slow.change_pace(now_ns, 1.12), None
    )
    result = world.run()
    assert result.counters.ended == result.counters.arrived > 100
    found = [
        (at_ns // NS_PER_S, each.worker, each.standing) for at_ns, each in world.gateways[0].speeds.standings
    ]
    assert {each for _, each, _ in found} == {slow.id}
    out = next(at_s for at_s, _, standing in found if standing is Standing.EJECTED)
    assert BEGINS_S < out <= BEGINS_S + 300
    moved = [each for each in result.records if each.migrations]
    assert moved, "what ran there went on elsewhere, while others had room"
    assert all(each.worker != slow.id and each.completion_tokens > 0 for each in moved)
    assert {each.outcome for each in result.records} == {Outcome.FINISHED}
