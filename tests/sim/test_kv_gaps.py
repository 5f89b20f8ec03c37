"""What a gateway knows of its worker's cache after a gap: all of it, or, where it cannot be said again,
nothing from before.
"""

import pytest
from sim_checks import Checks
from sim_load import poisson

from penstock.clock import NS_PER_S
from penstock.kv.index.worker_cache_view import StreamState
from penstock.sim.world.faults import Chaos, FaultKind, InjectedFault
from penstock.sim.world.world import PoolSpec, World, WorldSpec


def run(kept: int, *faults: InjectedFault) -> tuple[World, int, int]:
    """The world, the blocks that the gateway believes to be cached, and those that are."""
    world = World(WorldSpec(pools=(PoolSpec(count=1),), kv_kept=kept), poisson(3, 5, 3, output=40))
    Chaos(world, faults)
    checks = Checks(world)
    checks.finish(world.run())
    (gateway,) = world.gateways
    index = gateway.caches.locality.index
    cached = sum(len(member.worker.scheduler.kv.pool.names()) for member in world.members.values())
    return world, index.num_entries - index.num_predicted, cached


def gap(from_s: float, to_s: float) -> InjectedFault:
    return InjectedFault(FaultKind.KV_GAP, int(from_s * NS_PER_S), int(to_s * NS_PER_S), 0)


@pytest.mark.parametrize("kept", [0, 1000])
@pytest.mark.parametrize("to_s", [1.7, 60])
def test_what_was_missed_is_heard_again(kept, to_s) -> None:
    world, believed, cached = run(kept, gap(0.5, to_s))
    assert believed == cached > 100
    cache_view = world.gateways[0].caches.locality.get(next(iter(world.members)))
    assert cache_view.num_gaps == (1 if kept else 0)
    assert cache_view.state is StreamState.SYNCED


def test_what_cannot_be_said_again_is_not_believed() -> None:
    world, believed, cached = run(2, gap(0.5, 1.7))
    assert 0 < believed < cached
    cache_view = world.gateways[0].caches.locality.get(next(iter(world.members)))
    assert cache_view.num_gaps == 1
    assert cache_view.wanted is None


@pytest.mark.parametrize("kept", [0, 1000])
def test_a_gateway_that_is_connected_again_hears_what_there_is(kept) -> None:
    reset = InjectedFault(FaultKind.LINK_RESET, int(1.2 * NS_PER_S), int(1.3 * NS_PER_S), 0)
    _, believed, cached = run(kept, reset)
    assert believed == cached > 100
