from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.ledger import ModelPrice, PricesConfig, PriceTier
from penstock.policy.limits.price import PriceList
from penstock.types import Usage

PRICES = PricesConfig(
    models=(
        ModelPrice(model="small", input=0.15, cached_input=0.075, output=0.6),
        ModelPrice(
            model="long",
            input=1.25,
            output=10.0,
            request=0.001,
            tiers=(
                PriceTier(above_prompt_tokens=1_000_000, input=5.0, output=30.0),
                PriceTier(above_prompt_tokens=200_000, input=2.5, cached_input=0.25, output=15.0),
            ),
        ),
    )
)


def usage(prompt: int, cached: int = 0, completion: int = 0) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


@pytest.mark.parametrize(
    ("model", "used", "micros"),
    [
        ("small", usage(1_000_000), 150_000),
        ("small", usage(1_000_000, 1_000_000), 75_000),
        ("small", usage(0, 0, 1_000_000), 600_000),
        ("small", usage(1000, 400, 500), 90 + 30 + 300),
        ("small", usage(3), 0),  # 0.45 millionths.
        ("small", usage(10, 0, 0), 2),  # 1.5: half up.
        ("small", usage(0), 0),
        ("long", usage(0), 0),
        ("long", usage(100), 1000 + 125),
        ("long", usage(200_000), 1000 + 250_000),
        ("long", usage(200_001), 1000 + 500_003),
        ("long", usage(300_000, 100_000, 10), 1000 + 500_000 + 25_000 + 150),
        ("long", usage(1_000_001, 1_000_001), 1000 + 5_000_005),  # No cached price: as the input.
        ("unpriced", usage(10**9), 0),
    ],
)
def test_the_bill(model: str, used: Usage, micros: int) -> None:
    assert PriceList(PRICES).cost_micros(model, used) == micros


def test_a_tier_that_does_not_name_a_price_has_the_models() -> None:
    tier = PriceTier(above_prompt_tokens=10, output=8.0)
    prices = PriceList(PricesConfig(models=(ModelPrice(model="m", input=1.0, output=4.0, tiers=(tier,)),)))
    assert prices.cost_micros("m", usage(10, 0, 10)) == 10 + 40
    assert prices.cost_micros("m", usage(20, 0, 10)) == 20 + 80


def test_a_star_prices_what_has_no_entry() -> None:
    prices = PriceList(PricesConfig(models=(ModelPrice(model="*", input=1), ModelPrice(model="a", input=2))))
    assert prices.cost_micros("a", usage(10)) == 20
    assert prices.cost_micros("b", usage(10)) == 10


def test_machines_have_a_price_by_the_hour() -> None:
    prices = PriceList(PricesConfig(accelerators={"m": 2.5}))
    assert prices.accelerator_micros_per_hour("m") == 2_500_000
    assert prices.accelerator_micros_per_hour("other") == 0


def test_the_version_changes_with_any_price_and_is_empty_without_one() -> None:
    assert PriceList(PricesConfig()).version == ""
    first = PriceList(PRICES).version
    assert first == PriceList(PRICES).version
    assert first.startswith("#")
    dearer = msgspec.structs.replace(PRICES, models=(ModelPrice(model="small", input=0.16), PRICES.models[1]))
    assert PriceList(dearer).version != first


MICRO = st.integers(0, 10**9).map(lambda micros: micros / 10**6)
TOKENS = st.integers(0, 10**7)


@given(MICRO, MICRO, MICRO, TOKENS, TOKENS, TOKENS)
def test_rounded_once_and_by_half_a_millionth_at_most(
    price: float, cached_price: float, output: float, prompt: int, cached: int, completion: int
) -> None:
    cached = min(cached, prompt)
    prices = PriceList(
        PricesConfig(models=(ModelPrice(model="m", input=price, cached_input=cached_price, output=output),))
    )
    exact = sum(
        Fraction(round(rate * 10**6), 10**6) * tokens
        for rate, tokens in ((price, prompt - cached), (cached_price, cached), (output, completion))
    )
    assert abs(prices.cost_micros("m", usage(prompt, cached, completion)) - exact) <= Fraction(1, 2)


@given(TOKENS, TOKENS, TOKENS)
def test_more_tokens_never_cost_less_within_a_tier(prompt: int, completion: int, more: int) -> None:
    prices = PriceList(PRICES)
    assert prices.cost_micros("small", usage(prompt, 0, completion)) <= prices.cost_micros(
        "small", usage(prompt + more, 0, completion + more)
    )
