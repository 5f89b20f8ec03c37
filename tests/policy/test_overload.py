"""The promises under overload, on virtual time: the figures of bench/overload_sim.py with short runs."""

import overload_sim
import pytest
from overload_sim import Simulation, capacity_per_s, poisson

from penstock.config.flow import QueueConfig
from penstock.policy.tenant import Tenant
from penstock.types import TenantId


def test_a_spike_of_one_tenant_is_hardly_felt_by_the_others() -> None:
    figures = overload_sim.spike(seed=7, seconds=25)
    assert figures["ratio"] <= 1.5
    assert figures["spike_others_done"] == 1


def test_goodput_holds_whatever_is_offered() -> None:
    good = overload_sim.overload(seed=7, seconds=45, slots=32, loads=(1, 2, 5, 20))
    for load in ("2x", "5x", "20x"):
        assert good[load] >= 0.9, good


def test_large_prompts_and_small_ones_are_served_alike() -> None:
    figures = overload_sim.fairness(seed=7, seconds=20)
    assert 0 < figures["largest_gap"] <= figures["bound"]


@pytest.mark.parametrize("band", ["default", "bulk"])
def test_the_same_arrivals_have_the_same_fates(band) -> None:
    def fates() -> list[tuple[int, bool]]:
        random = overload_sim.Random(3)
        tenants = [Tenant(id=TenantId(f"t{i}"), band=band, weight=i + 1) for i in range(3)]
        jobs = [job for tenant in tenants for job in poisson(random, tenant, capacity_per_s(8), 10)]
        Simulation(jobs, workers=2, slots=4, patience_s=5, queue=QueueConfig(requests_max=40)).run()
        return [(job.first_ns, job.done) for job in jobs]

    assert fates() == fates()
