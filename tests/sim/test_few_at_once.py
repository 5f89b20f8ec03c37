"""A nearly idle gateway with default settings refuses none of a few requests that come at once, however slow
its worker is: a refusal would help no other request. Under lasting load as many are in time as without that.
"""

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import Config
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.policy.terms import QueueTerms
from penstock.rng import stream
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


def in_time(late_kept: int, gateways: int) -> int:
    """Of six minutes near what one worker can do, each after a quiet time: requests that kept their promise
    of 500 ms.
    """
    step_time = LinearStepTime(fixed_ns=10 * NS_PER_MS, row_ns=NS_PER_MS, prefill_ns=100_000, kv_ps=20)
    engine = EngineSettings(step_tokens=2048, max_running=2)
    worker = SimWorkerSpec(step_time=step_time, engine=engine, num_blocks=65_536, kind="slow")
    config = Config(queue=QueueTerms(late_kept=late_kept))
    records = list[RequestRecord]()
    for seed in range(1, 7):
        arrivals, times, at_ns = stream(seed, "near-capacity"), [ALONE_NS], 20 * NS_PER_S
        while (at_ns := at_ns + int(arrivals.expovariate(1.8) * NS_PER_S)) < 80 * NS_PER_S:
            times.append(at_ns)
        requests = [
            SimRequest(id=f"r{i}", at_ns=at_ns, prompt=(Segment(i, 500),), output_tokens=100)
            for i, at_ns in enumerate(times)
        ]
        pools = (PoolSpec(worker=worker, count=1),)
        spec = WorldSpec(seed=1, config=config, gateways=gateways, pools=pools)
        World(spec, requests, on_record=records.append).run()
    due_ns = 500 * NS_PER_MS
    return sum(each.outcome is Outcome.FINISHED and each.first_ns - each.at_ns <= due_ns for each in records)


@pytest.mark.parametrize("gateways", [1, 2])
def test_load_near_capacity_is_answered_in_time_as_if_none_waited_on(gateways: int) -> None:
    """One that waits on is noted as late: what comes after it is refused by what is expected."""
    without = in_time(0, gateways)
    assert without > 80
    assert in_time(QueueTerms().late_kept, gateways) >= 0.95 * without
