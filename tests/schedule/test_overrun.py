"""The tracked quantile of how far steps run over their prediction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rng import stream
from penstock.schedule.step_time import USUAL, WORST, Overrun


def after(*ratios: float) -> float:
    overrun = Overrun()
    for ratio in ratios:
        overrun.observe(ratio)
    return overrun.factor


def test_it_rises_within_a_few_bad_steps_and_forgets_them_slowly() -> None:
    risen = after(1.5, 1.5, 1.5)
    assert risen > 1.5
    assert after(1.5, 1.5, 1.5, *[1.0] * 50) == pytest.approx(risen - 50 * 0.002)
    assert after(*[1.0] * 1000) == 1.0


def test_only_the_sign_of_an_error_counts() -> None:
    assert after(1000.0) == after(1.3) == pytest.approx(USUAL + 0.098)


@pytest.mark.parametrize("spread", [0.05, 0.15, 0.3])
def test_one_step_in_fifty_is_above_it(spread: float) -> None:
    overrun, chance, above = Overrun(), stream(5, "overrun"), 0
    for step in range(6000):
        ratio = 0.9 + min(chance.expovariate(1 / spread), 1.0)
        above += step >= 1000 and ratio > overrun.factor
        overrun.observe(ratio)
    assert 0.01 < above / 5000 < 0.03


@given(st.lists(st.floats(0, 1e6)))
def test_it_stays_within_its_bounds(ratios: list[float]) -> None:
    assert 1.0 <= after(*ratios) <= WORST
