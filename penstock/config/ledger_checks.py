"""What is wrong with prices."""

from collections.abc import Iterator

from penstock.config.ledger import ModelPrice, PricesConfig

MICROS = 1_000_000


def price_problems(prices: PricesConfig) -> Iterator[str]:
    """What contradicts itself in the section `prices`."""
    seen: dict[str, int] = {}
    for i, model in enumerate(prices.models):
        if model.model in seen:
            yield (
                f"prices.models[{i}].model: {model.model!r} has a price in prices.models[{seen[model.model]}]"
            )
        seen.setdefault(model.model, i)
        yield from _model_problems(model, f"prices.models[{i}]")


def _model_problems(model: ModelPrice, where: str) -> Iterator[str]:
    for part, at in ((model, where), *((tier, f"{where}.tiers[{i}]") for i, tier in enumerate(model.tiers))):
        for name in ("input", "cached_input", "output"):
            price = getattr(part, name)
            if price and round(price * MICROS) == 0:
                yield f"{at}.{name}: {price:g} is less than a millionth and would count as 0"
    thresholds = [tier.above_prompt_tokens for tier in model.tiers]
    if thresholds != sorted(set(thresholds)):
        yield f"{where}.tiers: above_prompt_tokens must rise from one to the next, got {thresholds}"
