"""The tenant that a request belongs to, and what it may use: the facts that every decision of this package
takes.

Made from the configuration (gateway/identity/tenants.py); never changed, only replaced by a reload.

The functions say what one request may ask for: models, adapters and tokens; how much in a minute or a day is
for limits/. Each returns if the request may, and raises what its client has to change if not. A limit of 0 is
no limit.
"""

from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import ContextTooLong, Forbidden, InvalidRequest
from penstock.types import TenantId, without_version

Degrade = Literal["never", "allow", "prefer"]
"""Whether a smaller model may answer: never; rather than fail; or whenever it is much sooner."""


@dataclass(slots=True, frozen=True, kw_only=True)
class PartLimits:
    """The use that each key, or each user, of a tenant may make. A limit of 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_max: int = 0


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
    per_key: PartLimits | None = None
    """The use that each of its keys may make."""
    per_user: PartLimits | None = None
    """The use that each `user` that its requests name may make."""
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
    """Its mode where the request does not say."""
    trusted_special_tokens: bool = False
    """Whether special tokens in the text of its messages are those tokens; otherwise they are text."""
    places: frozenset[str] = frozenset()
    """Capabilities that say where its requests may be computed (`types.PLACE`); empty: anywhere."""
    cache_salt: bytes = field(default=b"", repr=False)
    """Prefix-cache namespace, made from the gateway's secret and the tenant's id: no caller can choose or
    guess it."""
    fairness_key: str = ""
    """Names the tenant to the engines, whose queue and preemption share by it."""
    has_levels: bool = field(init=False, repr=False)
    """Whether its keys or its users have limits of their own. It and the next two are said once, when the
    tenant is made: they are asked of every request."""
    has_budget: bool = field(init=False, repr=False)
    """Whether its spending is bounded."""
    has_lengths: bool = field(init=False, repr=False)
    """Whether its prompts or answers are bounded."""

    def __post_init__(self) -> None:
        assert self.weight > 0, self.id
        has_levels = self.per_key is not None or self.per_user is not None
        object.__setattr__(self, "has_levels", has_levels)
        object.__setattr__(self, "has_budget", bool(self.budget_day_micros or self.budget_month_micros))
        object.__setattr__(self, "has_lengths", bool(self.output_tokens_max or self.context_tokens_max))


ANONYMOUS = Tenant(id=TenantId(""))
"""The tenant of every request where authentication is off: no limits, one shared cache."""


SHOWN_CHARS = 64


def may_use_model(tenant: Tenant, model: str) -> bool:
    """Whether the tenant's allowlist has this model; a name without a version is all of its versions."""
    return not tenant.models or model in tenant.models or without_version(model) in tenant.models


def check_model(tenant: Tenant, model: str) -> None:
    """Refuse a model that is not on the tenant's allowlist.

    Raises:
        Forbidden: it is not.
    """
    if not may_use_model(tenant, model):
        raise Forbidden(
            f"The model '{model[:SHOWN_CHARS]}' is not allowed for {_who(tenant)}.",
            param="model",
            code="model_not_allowed",
        )


def may_use_adapter(tenant: Tenant, adapter: str) -> bool:
    """Whether the tenant's allowlist has this adapter."""
    return not tenant.adapters or adapter in tenant.adapters


def check_adapter(tenant: Tenant, adapter: str) -> None:
    """Refuse an adapter that is not on the tenant's allowlist.

    Raises:
        Forbidden: it is not.
    """
    if not may_use_adapter(tenant, adapter):
        raise Forbidden(
            f"The adapter '{adapter[:SHOWN_CHARS]}' is not allowed for {_who(tenant)}.",
            param="model",
            code="adapter_not_allowed",
        )


def check_tokens(
    tenant: Tenant, prompt_tokens: int, max_tokens: int | None, *, param: str = "messages"
) -> None:
    """Refuse a prompt, or an answer's asked-for length, that is over the tenant's limits.

    `max_tokens` is what the request says for one choice; None if it says nothing, and then `output_room`
    clips it.

    Raises:
        ContextTooLong: the prompt is too long, or it is together with `max_tokens`.
        InvalidRequest: `max_tokens` is too large.
    """
    assert prompt_tokens >= 0, prompt_tokens
    context = tenant.context_tokens_max
    if 0 < context <= prompt_tokens:
        raise ContextTooLong(
            f"The maximum context length of {_who(tenant)} is {context} tokens (context_tokens_max). However,"
            f" your {param} resulted in {prompt_tokens} tokens. Please reduce the length of the {param}.",
            param=param,
        )
    if max_tokens is None:
        return
    if 0 < tenant.output_tokens_max < max_tokens:
        raise InvalidRequest(
            f"Invalid 'max_tokens': the maximum answer length of {_who(tenant)} is "
            f"{tenant.output_tokens_max} tokens (output_tokens_max), but got {max_tokens}.",
            param="max_tokens",
            code="invalid_value",
        )
    if 0 < context < prompt_tokens + max_tokens:
        raise ContextTooLong(
            f"The maximum context length of {_who(tenant)} is {context} tokens (context_tokens_max). However,"
            f" you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {param}, "
            f"{max_tokens} in the completion). Please reduce the length of the {param} or completion.",
            param=param,
        )


def output_room(tenant: Tenant, prompt_tokens: int, limit: int) -> int:
    """The longest answer to a request that names no length: `most`, or what the tenant's limits leave of
    it.

    At least 1 after `check_tokens`, if `most` is.
    """
    if tenant.output_tokens_max:
        limit = min(limit, tenant.output_tokens_max)
    if tenant.context_tokens_max:
        limit = min(limit, tenant.context_tokens_max - prompt_tokens)
    return limit


def _who(tenant: Tenant) -> str:
    return f"your tier '{tenant.tier}'" if tenant.tier else "your account"
