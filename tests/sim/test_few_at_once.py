"""A nearly idle gateway with default settings refuses none of a few requests that come at once, however slow
its worker is: a refusal would help no other request.
"""

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.sim.traffic.prompts import RequestRecord, Segment, SimRequest
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World

LONG = 2000
ALONE_NS, AT_ONCE_NS = 5 * NS_PER_S, 120 * NS_PER_S


def play(prompts: list[int], *, fixed_ms: float, token_us: float, gap_ms: int) -> list[RequestRecord]:
    """A long prompt alone, which teaches the gateway how slow its worker is; then these."""
    step_time = LinearStepTime(
        fixed_ns=round(fixed_ms * NS_PER_MS), row_ns=NS_PER_MS, prefill_ns=round(token_us * 1000), kv_ps=20
    )
    engine = EngineSettings(step_tokens=2048, max_running=32)
    worker = SimWorkerSpec(step_time=step_time, engine=engine, num_blocks=65_536, kind="slow")
    times = [ALONE_NS, *(AT_ONCE_NS + i * gap_ms * NS_PER_MS for i in range(len(prompts)))]
    requests = [
        SimRequest(id=f"r{i}", at_ns=at_ns, prompt=(Segment(i, tokens),), output_tokens=32)
        for i, (at_ns, tokens) in enumerate(zip(times, [LONG, *prompts], strict=True))
    ]
    records = list[RequestRecord]()
    spec = WorldSpec(seed=1, pools=(PoolSpec(worker=worker, count=1),))
    World(spec, requests, on_record=records.append).run()
    return records


@pytest.mark.parametrize("fixed_ms", [10, 30])
@pytest.mark.parametrize("token_us", [100, 200])
@pytest.mark.parametrize("gap_ms", [0, 50])
def test_a_few_equal_long_prompts(fixed_ms: float, token_us: float, gap_ms: int) -> None:
    for num in (2, 3, 4):
        records = play([LONG] * num, fixed_ms=fixed_ms, token_us=token_us, gap_ms=gap_ms)
        assert [record.outcome for record in records] == [Outcome.FINISHED] * (1 + num), num


@pytest.mark.parametrize("fixed_ms", [5, 100])
@pytest.mark.parametrize("token_us", [500, 2000])
@pytest.mark.parametrize("gap_ms", [0, 10])
def test_a_few_short_prompts_after_a_slow_one(fixed_ms: float, token_us: float, gap_ms: int) -> None:
    records = play([100] * 4, fixed_ms=fixed_ms, token_us=token_us, gap_ms=gap_ms)
    assert [record.outcome for record in records] == [Outcome.FINISHED] * 5
