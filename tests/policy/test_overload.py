"""The promises under overload, on virtual time: the figures of bench/overload_sim.py with short runs."""

import overload_sim


def test_a_spike_of_one_tenant_is_hardly_felt_by_the_others() -> None:
    figures = overload_sim.spike(seed=7, seconds=16, workers=2, slots=32)
    assert figures["ratio"] <= 1.5
    assert figures["spike_others_done"] == 1


def test_large_prompts_and_small_ones_are_served_alike() -> None:
    figures = overload_sim.fairness(seed=7, seconds=6, slots=32)
    assert 0 < figures["largest_gap"] <= figures["bound"]
