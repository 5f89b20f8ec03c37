"""A simulated fleet goes through the product's names and identities: workers name their blocks themselves,
and announce from what.
"""

from collections.abc import Iterator

import pytest
from sim_checks import Checks

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import Config
from penstock.errors import ConfigError
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import described
from penstock.sim.scenarios.setup import Knobs, with_settings
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.world.faults import Chaos, FaultKind, InjectedFault
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World

NEW, OLD = SimWorkerSpec(checkpoint="7b v2"), SimWorkerSpec(checkpoint="7b v1")
TWO = WorldSpec(pools=(PoolSpec(worker=OLD, count=2), PoolSpec(worker=NEW, count=1)))
"""One model under one name, whose workers are of two identities."""
PROMPT, NUM = 400, 40


def thrice() -> Iterator[SimRequest]:
    """Every prompt three times, one after the other with time to answer; each time in another order."""
    for i in range(3 * NUM):
        again, number = divmod(i, NUM)
        number = number if again % 2 else NUM - 1 - number
        yield SimRequest(
            id=f"r{i}", at_ns=i * NS_PER_S, tenant="t", prompt=(Segment(1 + number, PROMPT),), output_tokens=8
        )


def test_prompts_are_found_at_workers_of_every_identity() -> None:
    result = World(TWO, thrice()).run()
    first, again = result.records[:NUM], result.records[NUM:]
    assert {record.worker for record in first} == {"model-0", "model-1", "model-2"}
    assert {record.cached_tokens for record in again} == {(PROMPT - 1) // 16 * 16}


def test_workers_that_announce_something_else_than_they_compute_are_found_out() -> None:
    """As when the two sides name a model differently: nothing hits, and that is told."""
    world = World(TWO, thrice())
    for member in world.members.values():
        member.worker.identity = "by its name"
    result = world.run()
    assert sum(record.cached_tokens == 0 for record in result.records[NUM:]) >= NUM // 2
    (gateway,) = world.gateways
    assert gateway.caches.locality.statistics(result.virtual_ns).unmatched_workers >= 1


def test_a_stream_moves_only_to_a_worker_that_computes_the_same() -> None:
    spec = WorldSpec(pools=(PoolSpec(worker=OLD, count=1), PoolSpec(worker=NEW, count=1)))
    requests = [
        SimRequest(id=f"r{i}", at_ns=i, tenant="t", prompt=(Segment(1 + i, 64),), output_tokens=600)
        for i in range(8)
    ]
    world = World(spec, iter(requests))
    Chaos(world, [InjectedFault(FaultKind.WORKER_CRASH, NS_PER_S, 3 * NS_PER_S, 0)])
    checks = Checks(world)
    result = world.run()
    checks.finish(result)
    moved = {record.worker for record in result.records if record.migrations}
    assert moved == {"model-2"}, (
        "which was started in place of the one that crashed, with the same checkpoint"
    )
    assert result.counters.finished == len(requests)


def test_a_scenario_is_what_an_operator_would_write() -> None:
    spec = SCENARIOS["downgrade"].build(Knobs()).world
    assert [(model.name, model.replicas) for model in spec.config.models] == [("model", 2), ("small", 2)]
    assert [pool.worker.engine.configured for pool in spec.pools] == [
        model.engine for model in spec.config.models
    ]
    assert {model.path for model in spec.config.models} == {"/models/7b", "/models/0.5b"}, "names are labels"
    assert len({pool.worker.identity for pool in spec.pools}) == 2


def test_what_penstock_serve_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        SCENARIOS["steady"].build(with_settings(Knobs(), {"routing.models": "[{model: nowhere}]"}))
    with pytest.raises(ConfigError, match=r"models\[0\]\.name"):
        described(Config(), [PoolSpec(model="two words")])
    other = SimWorkerSpec(engine=EngineSettings(max_running=3))
    with pytest.raises(ConfigError, match="a model has one"):
        described(Config(), [PoolSpec(region="east"), PoolSpec(region="west", worker=other)])
