"""What is wrong with prices, budgets and the ledger."""

from collections.abc import Iterator

from penstock.config.ledger import LedgerConfig, ModelPrice, PricesConfig

MICROS = 1_000_000
SEGMENTS_MIN = 4
"""Journal files that there must be room for: one written, one ready, and some that are being delivered."""


def price_problems(prices: PricesConfig) -> Iterator[str]:
    """What contradicts itself in the section `prices`."""
    for name, entries in (("models", prices.models), ("accelerators", prices.accelerators)):
        seen: dict[str, int] = {}
        for i, entry in enumerate(entries):
            if entry.model in seen:
                yield (
                    f"prices.{name}[{i}].model: {entry.model!r} has a price in prices.{name}[{seen[entry.model]}]"
                )
            seen.setdefault(entry.model, i)
    for i, model in enumerate(prices.models):
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


def ledger_problems(ledger: LedgerConfig) -> Iterator[str]:
    """What contradicts itself in the section `ledger`."""
    if ledger.enabled and ledger.journal_bytes_max < SEGMENTS_MIN * ledger.segment_bytes:
        yield (
            f"ledger.journal_bytes_max: {ledger.journal_bytes_max} is below {SEGMENTS_MIN} times "
            f"ledger.segment_bytes ({ledger.segment_bytes})"
        )
