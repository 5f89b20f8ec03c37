"""Prices, budgets and the usage ledger: the sections `prices`, `budgets` and `ledger`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Positive

Money = Annotated[float, Meta(ge=0, le=1_000_000_000)]
"""In units of `prices.currency`; kept as whole millionths."""


class TokenPrices(Branch, frozen=True, kw_only=True):
    """The price of tokens for the caller."""

    input: Money | None = None
    """Per million prompt tokens; null is 0, and in a tier the model's own price."""
    cached_input: Money | None = None
    """Per million prompt tokens that came from the prefix cache; null takes the price of `input`."""
    output: Money | None = None
    """Per million generated tokens; null as with `input`."""


class PriceTier(TokenPrices, frozen=True, kw_only=True):
    """Other prices for long prompts: they count for the whole request."""

    above_prompt_tokens: Positive
    """Prompts that are longer than this have these prices."""


class ModelPrice(TokenPrices, frozen=True, kw_only=True):
    """The prices of one model for its callers."""

    model: str
    """The served name; "*" stands for every model that has no entry of its own."""
    request: Money = 0.0
    """Per request that generated or computed anything."""
    tiers: Annotated[tuple[PriceTier, ...], Meta(max_length=16)] = ()
    """By length of the prompt, thresholds rising."""


class PricesConfig(Branch, frozen=True, kw_only=True):
    """The prices of tokens and machines. Without entries every request costs 0."""

    currency: str = "USD"
    """A label: nothing is converted."""
    models: Annotated[tuple[ModelPrice, ...], Meta(max_length=1024)] = ()
    """A model that is not here, with no "*" either, costs nothing."""
    accelerators: Annotated[dict[str, Money], Meta(max_length=1024)] = {}  # noqa: RUF012 - msgspec copies it.
    """Model (its served name, or "*" for every other one) -> what one worker's machine costs the operator per
    hour."""


class BudgetsConfig(Branch, frozen=True, kw_only=True):
    """How the budgets of tiers and tenants are held; the amounts stand there."""

    downgrade_at: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """From this share of a budget on, requests go to a cheaper fallback (`routing.models`) where tenant and
    request allow that."""
    hard: bool = True
    """Refuse and stop over the budget; false only warns."""


class LedgerConfig(Branch, frozen=True, kw_only=True):
    """The usage ledger: one record for every accepted request.

    On by default: what was not written cannot be asked for later.
    """

    enabled: bool = True
    """false keeps no records, and so no budgets over a restart."""
    directory: str = ""
    """Where it is kept; empty takes `ledger` in the state directory (PENSTOCK_STATE_DIR,
    ~/.local/state/penstock). A local disk."""
    when_full: Literal["refuse", "go_on"] = "refuse"
    """No room for the journal: refuse new requests as overloaded, or answer them without a record and count
    those."""
    keep_days: Annotated[int, Meta(ge=0)] = 400
    """Records that ended longer ago leave the database; 0 keeps all."""


MICROS = 1_000_000


def price_problems(prices: PricesConfig) -> Iterator[str]:
    """Contradictions in the section `prices`."""
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


RETIRED: dict[str, str] = {
    "prices.version": "always a fingerprint of the section",
    "budgets.warn_at": "constants now: 0.5, 0.8 and 1",
    "budgets.slice_tokens": "a constant now: 256 tokens",
    "budgets.tenants_max": "a constant now: 100,000 tenants",
    "budgets.refresh_s": "a constant now: every ten seconds",
    "ledger.fsync_ms": "fixed at 100",
    "ledger.deliver_ms": "fixed at 250",
    "ledger.deliver_records_max": "fixed at 2000",
    "ledger.segment_bytes": "fixed at 4 MiB",
    "ledger.segment_age_s": "fixed at 3600",
    "ledger.journal_bytes_max": "fixed at 256 MiB for each gateway process",
    "ledger.buffer_bytes_max": "fixed at 8 MiB",
}
