"""Leaping over steps in which nothing is told changes nothing: neither what is told, nor what the scheduler
is left with.
"""

from dataclasses import replace

import pytest
from sim_load import poisson

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.policy.limits.rate_limit import RateTerms
from penstock.sim.world.run import SimWorkerSpec
from penstock.sim.world.world import PoolSpec, World, WorldSpec

TIGHT = SimWorkerSpec(
    engine=EngineSettings(step_tokens=256, max_running=6, max_waiting=64), num_blocks=90, max_model_len=1200
)
QUOTA = replace(
    TIGHT, engine=EngineSettings(step_tokens=128, max_running=8, kv_quota_fraction=0.6, itl_target_ms=30)
)
UNCACHED = replace(TIGHT, engine=EngineSettings(max_running=8, prefix_cache=False, scheduling="fcfs"))
SLICED = Config(
    limits=RateTerms(slice_tokens=16),
    admission=AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=()),
)
"""Nothing is promised, so that nothing is refused."""


def run(fast_forwards: bool, worker: SimWorkerSpec, seed: int, per_s: float, **fields):
    spec = WorldSpec(
        config=SLICED,
        pools=(PoolSpec(count=2, worker=replace(worker, fast_forwards=fast_forwards)),),
        gateways=2,
        report_ns=NS_PER_S // 20,
    )
    world = World(spec, poisson(seed, per_s, 2.5, prompt=250, output=120, **fields))
    result = world.run()
    for member in world.members.values():
        member.worker.scheduler.check_invariants()
    left = [
        (worker.scheduler.statistics(), worker.scheduler.kv.pool.names(), worker.scheduler.kv.statistics())
        for worker in (member.worker for member in world.members.values())
    ]
    return result, left


@pytest.mark.parametrize(
    ("worker", "per_s", "fields"),
    [
        (TIGHT, 8, {}),
        (TIGHT, 30, {"max_tokens": 400}),
        (TIGHT, 20, {"patience_ns": NS_PER_S, "cancel_at_ns": 3 * NS_PER_S}),
        (QUOTA, 25, {"max_tokens": 250}),
        (UNCACHED, 15, {}),
    ],
)
def test_leaps_are_the_steps_they_stand_for(worker, per_s, fields) -> None:
    leapt, leapt_left = run(True, worker, 1, per_s, **fields)
    stepped, stepped_left = run(False, worker, 1, per_s, **fields)
    assert leapt.digest == stepped.digest
    assert leapt.records == stepped.records
    assert leapt_left == stepped_left
    assert leapt.num_events < stepped.num_events


def test_the_tight_worker_preempts() -> None:
    result, _ = run(True, TIGHT, 1, 30, max_tokens=400)
    assert result.counters.preemptions > 5
