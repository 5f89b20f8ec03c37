"""Who a request belongs to, and what that one may use: the facts that every decision of this package takes.

Made by whoever reads the configuration (gateway/identity/tenants.py); never changed, only replaced by a
reload.
"""

from dataclasses import dataclass, field
from typing import Literal

from penstock.types import TenantId

Degrade = Literal["never", "allow", "prefer"]
"""Whether a smaller model may answer: never; rather than fail; or whenever it is much sooner."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Tenant:
    """One tenant with its tier's limits worked in. A limit of 0 is no limit."""

    id: TenantId
    tier: str = ""
    weight: float = 1.0
    """Share beside other tenants of the band while both have work waiting."""
    band: str = "default"
    """Priority band of its requests; the bands and their order are `queue.bands` in the configuration."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and answer tokens together."""
    concurrent_max: int = 0
    """Requests accepted and not ended."""
    output_tokens_max: int = 0
    """Of one choice."""
    context_tokens_max: int = 0
    """Prompt and answer of one choice together."""
    models: frozenset[str] = frozenset()
    """Models that it may use; empty is all."""
    adapters: frozenset[str] = frozenset()
    """Adapters that it may use; empty is all."""
    budget_day_micros: int = 0
    """Millionths of the price list's currency per UTC day."""
    budget_month_micros: int = 0
    degrade: Degrade = "allow"
    """What it wants where the request does not say."""
    trusted_special_tokens: bool = False
    """Whether special tokens in the text of its messages are those tokens; otherwise they are text."""
    cache_salt: bytes = field(default=b"", repr=False)
    """Prefix-cache namespace, made from the gateway's secret and the tenant's id: no caller can choose or
    guess it."""
    fairness_key: str = ""
    """Names the tenant to the engines, whose queue and preemption share by it."""


ANONYMOUS = Tenant(id=TenantId(""))
"""The tenant of every request where authentication is off: no limits, one shared cache."""
