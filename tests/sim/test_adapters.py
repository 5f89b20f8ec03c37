"""Adapters in the simulated world: workers load what requests name, and placement spares them loads."""

from collections.abc import Iterable

from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.policy.placement.pick import LeastLoaded
from penstock.sim.traffic.prompts import SimRequest
from penstock.sim.traffic.workload import Callers, Chat, LengthDistribution, Poisson, even, merged
from penstock.sim.world.adapters import SimAdapterSpec
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World

ADAPTERS, SLOTS, SECONDS = 30, 8, 60


def world_of(requests: Iterable[SimRequest], *, places: bool = True, gateways: int = 1) -> World:
    adapters = SimAdapterSpec(
        names=tuple(f"lora-{i}" for i in range(ADAPTERS)), slots=SLOTS, read_ns=NS_PER_S // 4
    )
    worker = SimWorkerSpec(engine=EngineSettings(step_tokens=512, max_running=16), adapters=adapters)
    return World(
        WorldSpec(
            config=Config(admission=AdmissionConfig(ttft_target_ms=0)),
            pools=(PoolSpec(worker=worker, count=2),),
            placement=None if places else lambda _: LeastLoaded(),
            gateways=gateways,
        ),
        requests,
    )


def requests_of(seed: int) -> list[SimRequest]:
    source = Chat(
        arrivals=Poisson(6),
        callers=Callers(tenants=even(2), adapters=ADAPTERS),
        prompt=LengthDistribution(100, maximum=256),
        output=LengthDistribution(40, maximum=80),
    )
    return list(merged([source], seed, SECONDS))


def waits_s(world: World) -> tuple[float, int]:
    """What all requests of the second half waited for their adapters, and what was read."""
    pools = [member.worker.adapters for member in world.members.values()]
    found = [wait for pool in pools if pool for at, wait in pool.waits_ns if at > SECONDS / 2 * NS_PER_S]
    return sum(found) / NS_PER_S, sum(pool.num_reads for pool in pools if pool)


def test_placing_adapters_halves_the_waits_for_loads() -> None:
    found: list[tuple[float, int]] = []
    for places in (True, False):
        world = world_of(iter(requests_of(1)), places=places)
        counters = world.run().counters
        assert counters.finished == counters.arrived > 300
        found.append(waits_s(world))
        for member in world.members.values():
            assert member.worker.adapters is not None
            member.worker.adapters.check_invariants()
            assert len(member.worker.adapters.loaded) <= SLOTS
    (placed_s, _), (spread_s, _) = found
    assert placed_s < 0.5 * spread_s


def test_two_gateways_and_clients_that_leave_while_they_wait() -> None:
    requests = [
        SimRequest(
            id=each.id, at_ns=each.at_ns, tenant=each.tenant, model=each.model, prompt=each.prompt,
            output_tokens=each.output_tokens, adapter=each.adapter,
            cancel_at_ns=each.at_ns + NS_PER_S // 5 if i % 3 == 0 else 0,
        )
        for i, each in enumerate(requests_of(2))
    ]  # fmt: skip
    world = world_of(iter(requests), gateways=2)
    counters = world.run().counters
    assert counters.ended == counters.arrived
    assert counters.cancelled > 20
    assert not [member.worker.num_streams for member in world.members.values() if member.worker.num_streams]
