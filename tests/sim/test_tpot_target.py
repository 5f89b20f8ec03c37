"""Facts of the simulator: with more streams than steps can carry in time, decoding rows keep their target per
output token.
"""

from statistics import median, quantiles

import pytest
from sim_load import poisson

from penstock.clock import NS_PER_MS
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.sim.world.run import SimWorkerSpec
from penstock.sim.world.world import PoolSpec, World, WorldSpec

PATIENT = Config(admission=AdmissionConfig(ttft_target_ms=0, targets=()))


def tpot_ms(engine: EngineSettings) -> list[float]:
    """TPOT of the answers, in order of size, with more streams than steps can carry in time; prompts hardly
    count.
    """
    worker = SimWorkerSpec(step_time=LinearStepTime(row_ns=1_000_000, prefill_ns=20_000), engine=engine)
    spec = WorldSpec(config=PATIENT, pools=(PoolSpec(count=1, worker=worker),))
    result = World(spec, poisson(1, 12, 20, prompt=20, output=200)).run()
    return sorted(
        (record.end_ns - record.first_ns) / (record.completion_tokens - 1) / NS_PER_MS
        for record in result.records
        if record.outcome is Outcome.FINISHED and record.completion_tokens > 40
    )


@pytest.mark.parametrize(
    ("engine", "target_ms"),
    [(EngineSettings(itl_target_ms=35), 35), (EngineSettings(), 50)],
    ids=["set", "default"],
)
def test_decoding_rows_alone_keep_the_target(engine: EngineSettings, target_ms: float) -> None:
    times = tpot_ms(engine)
    assert len(times) > 100
    assert quantiles(times, n=20)[-1] <= target_ms
    assert median(times) > 0.6 * target_ms  # And batches are no smaller than need be.
