"""The online linear model on its own: what it learns, what an outlier does to it, and what it says before it
has seen anything.
"""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.policy.estimates import OnlineLinearModel
from penstock.rng import stream

UNITS = (1.0, 1000.0)
LAW = (5e6, 4e3)
"""5 ms, and 4 us per token, in nanoseconds."""


def loads(count: int, seed: int = 1) -> Iterator[tuple[float, float]]:
    draw = stream(seed, "loads")
    for _ in range(count):
        yield 1.0, float(draw.randrange(1, 4000))


def value_of(terms: Sequence[float], law: Sequence[float] = LAW) -> float:
    return sum(term * each for term, each in zip(terms, law, strict=True))


def learned(count: int = 200, scale: float = 1.0) -> OnlineLinearModel:
    model = OnlineLinearModel(UNITS, memory=0.98)
    for terms in loads(count):
        model.observe(terms, value_of(terms) * scale)
    return model


def test_it_finds_the_law_and_predicts_by_it() -> None:
    model = learned()
    assert model.num_observed == 200
    assert list(model.coefficients) == pytest.approx(LAW, rel=0.01)
    assert model.predict((1.0, 2500.0)) == pytest.approx(value_of((1.0, 2500.0)), rel=0.01)


@given(exponent=st.integers(-6, 6))
def test_the_unit_of_values_does_not_matter(exponent: int) -> None:
    scale = 10.0**exponent
    assert list(learned(40, scale).coefficients) == pytest.approx(
        [each * scale for each in learned(40).coefficients], rel=1e-6
    )


def test_before_anything_is_seen_it_says_what_the_prior_says_or_nothing() -> None:
    assert OnlineLinearModel(UNITS, memory=0.9).predict((1.0, 100.0)) == 0.0
    believed = OnlineLinearModel(UNITS, memory=0.9, prior=LAW)
    assert list(believed.coefficients) == list(LAW)
    assert believed.num_observed == 0


def test_a_prior_holds_where_nothing_was_seen_when_the_unit_becomes_known() -> None:
    """One observation with the first term alone leaves the second as it was believed."""
    model = OnlineLinearModel(UNITS, memory=0.9, prior=LAW)
    model.observe((1.0, 0.0), 7e6)
    assert model.coefficients[0] == pytest.approx(7e6, rel=0.01)
    assert model.coefficients[1] == pytest.approx(LAW[1], rel=1e-6)


def test_the_first_observation_counts_in_full_and_zero_is_an_observation() -> None:
    model = OnlineLinearModel((1.0,), memory=0.9)
    model.observe((1.0,), 0.0)
    assert (model.num_observed, model.predict((1.0,))) == (1, 0.0)
    model = OnlineLinearModel((1.0,), memory=0.9)
    model.observe((1.0,), 40.0)
    assert model.predict((1.0,)) == pytest.approx(40.0, rel=0.01)
    with pytest.raises(AssertionError):
        model.observe((1.0,), -1.0)


def test_an_outlier_moves_it_little_and_a_change_is_followed() -> None:
    model = learned()
    model.observe((1.0, 1000.0), 50 * value_of((1.0, 1000.0)))
    assert model.predict((1.0, 1000.0)) == pytest.approx(value_of((1.0, 1000.0)), rel=0.10)
    for terms in loads(300, seed=2):
        model.observe(terms, 3 * value_of(terms))
    assert model.predict((1.0, 1000.0)) == pytest.approx(3 * value_of((1.0, 1000.0)), rel=0.10)


def test_an_outlier_among_the_first_moves_it_as_any_other_does() -> None:
    """There is no usual deviation yet by which to tell one."""
    model = OnlineLinearModel((1.0,), memory=0.9)
    for value in (10.0, 10.0, 40.0):
        model.observe((1.0,), value)
    assert model.predict((1.0,)) > 11.0


def test_knowledge_of_one_kind_of_load_does_not_fade_while_another_comes() -> None:
    model = OnlineLinearModel((1.0, 1.0), memory=0.5)
    model.observe((1.0, 0.0), 100.0)
    for _ in range(200):
        model.observe((0.0, 1.0), 30.0)
    assert model.predict((1.0, 0.0)) == pytest.approx(100.0, rel=0.01)
    assert model.predict((0.0, 1.0)) == pytest.approx(30.0, rel=0.01)


@given(
    values=st.lists(
        st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e9)), min_size=1, max_size=40
    )
)
def test_more_of_anything_never_predicts_less(values: list[tuple[float, float, float]]) -> None:
    model = OnlineLinearModel((1.0, 10.0), memory=0.9)
    for first, second, value in values:
        model.observe((first, second), value)
    assert min(model.coefficients) >= 0
    assert model.predict((2.0, 3.0)) >= model.predict((1.0, 3.0)) >= 0
