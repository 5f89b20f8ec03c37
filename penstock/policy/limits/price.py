"""The price of a request by the price list: whole numbers, rounded once.

Prices stand in the configuration per million tokens, in units of a currency, and are kept as whole millionths
of it. So the price of one token is that number of trillionths (1e-12), a sum of tokens times prices is exact,
and the only rounding is the one to whole millionths at the end: half up, once for each request.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import msgspec

from penstock.config.ledger import ModelPrice, PricesConfig, TokenPrices

MICROS = 1_000_000
_ANY = "*"


class TokenCounts(Protocol):
    """Tokens that are paid for; `types.Usage`, `UsageRecord` and the ledger's `Progress` have this shape."""

    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def cached_tokens(self) -> int: ...  # noqa: D102
    @property
    def completion_tokens(self) -> int: ...  # noqa: D102


@dataclass(slots=True, frozen=True)
class _Rates:
    """Prices that hold from some prompt length on, in millionths per million tokens."""

    above_prompt_tokens: int
    input: int
    cached_input: int
    output: int


@dataclass(slots=True, frozen=True)
class _Model:
    request: int
    """Millionths."""
    rates: tuple[_Rates, ...]
    """Longest prompts first; the last one holds for all."""


class PriceList:
    """The section `prices`, ready to be applied."""

    def __init__(self, config: PricesConfig) -> None:
        self.change(config)

    def change(self, config: PricesConfig) -> None:
        """Take new prices. They count for everything that ends from now on."""
        self.currency = config.currency
        self.version = _fingerprint(config)
        """Stands in every record that was priced with this list; empty if nothing has a price."""
        self.are_any = bool(config.models)
        """Whether a model has a price."""
        self._models = {price.model: _model(price) for price in config.models}
        self._accelerators = {model: _micros(per_hour) for model, per_hour in config.accelerators.items()}

    def cost_micros(self, model: str, usage: TokenCounts) -> int:
        """The price of these tokens of one request, in millionths; 0 for a model without a price, and for no
        tokens at all.
        """
        price = self._models.get(model) or self._models.get(_ANY)
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        if price is None or not (prompt or completion):
            return 0
        rates = next(rates for rates in price.rates if prompt > rates.above_prompt_tokens)
        cached = min(usage.cached_tokens, prompt)
        exact = (prompt - cached) * rates.input + cached * rates.cached_input + completion * rates.output
        return price.request + (exact + MICROS // 2) // MICROS

    def accelerator_micros_per_hour(self, model: str) -> int:
        """The cost of one worker of this model per hour, in millionths."""
        return self._accelerators.get(model, self._accelerators.get(_ANY, 0))


def _model(price: ModelPrice) -> _Model:
    tiers = sorted(price.tiers, key=lambda tier: -tier.above_prompt_tokens)
    rates = [_rates(tier.above_prompt_tokens, tier, price) for tier in tiers]
    return _Model(_micros(price.request), (*rates, _rates(-1, price, price)))


def _rates(above_prompt_tokens: int, price: TokenPrices, model: ModelPrice) -> _Rates:
    """The prices from a prompt's length on; what a tier does not say is the model's."""
    input_ = (model.input if price.input is None else price.input) or 0.0
    output = (model.output if price.output is None else price.output) or 0.0
    cached = input_ if price.cached_input is None else price.cached_input
    return _Rates(above_prompt_tokens, _micros(input_), _micros(cached), _micros(output))


def _micros(amount: float) -> int:
    """A price as written, in whole millionths."""
    return round(amount * MICROS)


def _fingerprint(config: PricesConfig) -> str:
    if not config.models and not config.accelerators:
        return ""
    return "#" + blake2b(msgspec.json.encode(config), digest_size=5).hexdigest()
