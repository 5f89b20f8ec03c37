"""Tenants as the deciding parts see them: what the configuration says of one, with its tier's limits worked
in.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.tenancy import Allowance, TenantConfig, TierConfig
from penstock.policy.tenant import Tenant
from penstock.types import TenantId

SALT_BYTES = 16
MICROS = 1_000_000
_DEFAULTS: Mapping[str, Any] = {
    "requests_per_minute": 0, "tokens_per_minute": 0, "concurrent_max": 0,
    "output_tokens_max": 0, "context_tokens_max": 0, "models": (), "adapters": (), "weight": 1.0,
    "band": "default", "budget_per_day": 0.0, "budget_per_month": 0.0, "degrade": "allow",
    "trusted_special_tokens": False,
}  # fmt: skip
"""Holds where neither the tenant nor its tier says anything."""


class Tenants:
    """Makes `Tenant`s. `secret` keys the cache namespaces, so that no caller can work out another's."""

    def __init__(
        self, tenants: Sequence[TenantConfig], tiers: Sequence[TierConfig], *, secret: bytes
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        # BLAKE2b takes keys of up to 64 bytes.
        self._secret = hashlib.blake2b(secret, person=b"penstock-secret").digest()
        self._known = {TenantId(tenant.id): self._made(tenant.id, tenant.tier, tenant) for tenant in tenants}

    @property
    def tiers(self) -> frozenset[str]:
        """Names of the tiers there are."""
        return frozenset(self._tiers)

    @property
    def known(self) -> Mapping[TenantId, Tenant]:
        """The tenants of the configuration."""
        return self._known

    def has(self, tenant_id: str) -> bool:
        """Whether it is said here or by the keys file what this tenant may use."""
        return TenantId(tenant_id) in self._known

    def learn(self, tenant_id: str, tier: str) -> Tenant:
        """A tenant that only the keys file names. From now on it is known."""
        return self._known.setdefault(TenantId(tenant_id), self.tenant(tenant_id, tier))

    def tenant(self, tenant_id: str, tier: str = "") -> Tenant:
        """The tenant of this id: as configured, else a new one of the named tier (which must exist), else
        without limits.
        """
        found = self._known.get(TenantId(tenant_id))
        if found is not None:
            return found
        return self._made(tenant_id, tier)

    def _made(self, tenant_id: str, tier: str, own: Allowance | None = None) -> Tenant:
        """A tenant; what it does not say itself (`own`) is its tier's."""
        allowed = _first_given(own, self._tiers[tier] if tier else None)
        salt = hashlib.blake2b(
            tenant_id.encode(), digest_size=SALT_BYTES, key=self._secret, person=b"penstock-salt"
        )
        return Tenant(
            id=TenantId(tenant_id),
            tier=tier,
            weight=allowed["weight"],
            band=allowed["band"],
            requests_per_minute=allowed["requests_per_minute"],
            tokens_per_minute=allowed["tokens_per_minute"],
            concurrent_max=allowed["concurrent_max"],
            output_tokens_max=allowed["output_tokens_max"],
            context_tokens_max=allowed["context_tokens_max"],
            models=frozenset(allowed["models"]),
            adapters=frozenset(allowed["adapters"]),
            budget_day_micros=round(allowed["budget_per_day"] * MICROS),
            budget_month_micros=round(allowed["budget_per_month"] * MICROS),
            degrade=allowed["degrade"],
            trusted_special_tokens=allowed["trusted_special_tokens"],
            cache_salt=salt.digest(),
            fairness_key=tenant_id,
        )


def _first_given(*given: Allowance | None) -> dict[str, Any]:
    """Of every field the first value that is not null, else the default."""
    found = dict(_DEFAULTS)
    for allowance in reversed(given):
        if allowance is not None:
            said = {name: getattr(allowance, name) for name in _DEFAULTS}
            found |= {name: value for name, value in said.items() if value is not None}
    return found
