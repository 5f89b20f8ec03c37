import pytest

from penstock.config.checks import check
from penstock.config.ledger import ModelPrice, PricesConfig, PriceTier
from penstock.config.load import parse_config
from penstock.config.tree import Config
from penstock.errors import ConfigError


def prices(*models: ModelPrice) -> Config:
    return Config(prices=PricesConfig(models=models))


def tiered(*thresholds: int) -> Config:
    tiers = tuple(PriceTier(above_prompt_tokens=tokens, input=1, output=1) for tokens in thresholds)
    return prices(ModelPrice(model="m", input=1, tiers=tiers))


def test_a_price_list_that_is_fine() -> None:
    check(tiered(1000, 2000))
    check(prices(ModelPrice(model="free"), ModelPrice(model="*", output=0.000001)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            prices(ModelPrice(model="m"), ModelPrice(model="m")),
            r"prices\.models\[1\]\.model: 'm' has a price in",
        ),
        (
            prices(ModelPrice(model="m", output=1e-7)),
            r"prices\.models\[0\]\.output: 1e-07 is less than a mill",
        ),
        (tiered(2000, 1000), r"prices\.models\[0\]\.tiers: above_prompt_tokens must rise"),
        (tiered(1000, 1000), r"must rise from one to the next, got \[1000, 1000\]"),
    ],
)
def test_what_is_wrong(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_machines_have_prices_by_model() -> None:
    assert parse_config("prices: {accelerators: {m: 2, '*': 1.5}}").prices.accelerators == {"m": 2, "*": 1.5}
    with pytest.raises(ConfigError, match=r"prices\.accelerators"):
        parse_config("prices: {accelerators: {m: -1}}")
    with pytest.raises(ConfigError, match=r"prices\.accelerators: expected a mapping"):
        parse_config("prices: {accelerators: [{model: m, per_hour: 2}]}")
