"""From a key to the tenant behind it, with the limits of its tier worked in.

    Authorization: Bearer ... ─> TenantTable ─> Caller(tenant, key_prefix)
                                  Tenants: tier + tenant of the configuration ─> Tenant

A table never changes: a reload makes a new one, and requests that run keep the tenant they came with.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.config.tenancy import TenantConfig, TierConfig
from penstock.config.tenancy_checks import KEY_TENANT
from penstock.config.tree import Config
from penstock.errors import Unauthenticated
from penstock.gateway.auth import ANYBODY, Caller, credential
from penstock.gateway.exchange import RequestHead
from penstock.policy.tenant import Tenant
from penstock.rng import fresh_key
from penstock.types import TenantId

SALT_BYTES = 16
MICROS = 1_000_000
PREFIX_CHARS = 8
"""Shown of a key that has no id of its own."""
_NO_TIER = TierConfig(name="none")


class Tenants:
    """Makes `Tenant`s. `secret` keys the cache namespaces, so that no caller can work out another's."""

    def __init__(
        self, tenants: Sequence[TenantConfig], tiers: Sequence[TierConfig], *, secret: bytes
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        # BLAKE2b takes keys of up to 64 bytes.
        self._secret = hashlib.blake2b(secret, person=b"penstock-secret").digest()
        self._known = {
            TenantId(tenant.id): self._make(tenant, self._tiers[tenant.tier] if tenant.tier else _NO_TIER)
            for tenant in tenants
        }

    @property
    def tiers(self) -> frozenset[str]:
        """Names of the tiers there are."""
        return frozenset(self._tiers)

    @property
    def known(self) -> Mapping[TenantId, Tenant]:
        """The tenants of the configuration."""
        return self._known

    def tenant(self, tenant_id: str, tier: str = "") -> Tenant:
        """The tenant of this id: as configured, else a new one of the named tier (which must exist), else without limits."""
        found = self._known.get(TenantId(tenant_id))
        if found is not None:
            return found
        return self._make(TenantConfig(id=tenant_id, tier=tier), self._tiers[tier] if tier else _NO_TIER)

    def _make(self, tenant: TenantConfig, tier: TierConfig) -> Tenant:
        given = {
            field: value
            for field in TierConfig.__struct_fields__
            if field != "name" and (value := getattr(tenant, field)) is not None
        }
        allowed = msgspec.structs.replace(tier, **given)
        salt = hashlib.blake2b(
            tenant.id.encode(), digest_size=SALT_BYTES, key=self._secret, person=b"penstock-salt"
        )
        return Tenant(
            id=TenantId(tenant.id),
            tier=tenant.tier,
            weight=allowed.weight,
            band=allowed.band,
            requests_per_minute=allowed.requests_per_minute,
            tokens_per_minute=allowed.tokens_per_minute,
            concurrent_max=allowed.concurrent_max,
            input_tokens_max=allowed.input_tokens_max,
            output_tokens_max=allowed.output_tokens_max,
            context_tokens_max=allowed.context_tokens_max,
            models=frozenset(allowed.models),
            adapters=frozenset(allowed.adapters),
            budget_day_micros=round(allowed.budget_per_day * MICROS),
            budget_month_micros=round(allowed.budget_per_month * MICROS),
            degrade=allowed.degrade,
            cache_salt=salt.digest(),
            fairness_key=tenant.id,
        )


class TenantTable:
    """Who may call. Where authentication is off, everybody may."""

    def __init__(self, config: Config, *, secret: bytes = b"") -> None:
        """`secret` is the gateway's own where `auth.secret` is empty; without either, one for this process."""
        self._open = config.auth.disabled
        secret = config.auth.secret.encode() or secret or fresh_key()
        self.tenants = Tenants(config.tenants, config.tiers, secret=secret)
        self._plain = _PlainKeys(config.auth.keys, self.tenants)

    def check(self, head: RequestHead) -> Caller:
        """The caller behind a request's `Authorization` header.

        Raises:
            Unauthenticated: there is none, or what it says is not accepted.
        """
        return ANYBODY if self._open else self.of_key(credential(head))

    def of_key(self, key: bytes) -> Caller:
        """The caller behind an API key.

        Raises:
            Unauthenticated: it is not one of ours.
        """
        found = self._plain.find(key)
        if found is None:
            raise Unauthenticated("Incorrect API key provided.")
        return found


class _PlainKeys:
    """The keys of the configuration. They are hashed at start, so that no later memory dump or log line can show one.

    Looking up a digest takes a time that may depend on the digests; keyed with what nobody knows, they tell nothing.
    """

    def __init__(self, keys: Iterable[str], tenants: Tenants) -> None:
        self._key = fresh_key()
        self._callers: dict[bytes, Caller] = {}
        taken: set[str] = set()
        for key in dict.fromkeys(keys):
            tenant_id = _own_tenant(key, taken)
            taken.add(tenant_id)
            self._callers[self._digest(key.encode())] = Caller(
                tenant=tenants.tenant(tenant_id), key_prefix=tenant_id
            )

    def find(self, key: bytes) -> Caller | None:
        """The caller of this key, if it is one."""
        digest = self._digest(key)
        return self._callers.get(digest)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._key, digest_size=32, person=b"penstock-key").digest()


def _own_tenant(key: str, taken: set[str]) -> str:
    """The tenant that a key is by itself: named by the key's hash, so the same after every start."""
    digest = hashlib.blake2b(key.encode(), digest_size=16, person=b"penstock-tenant").hexdigest()
    short = f"{KEY_TENANT}{digest[:PREFIX_CHARS]}"
    return short if short not in taken else f"{KEY_TENANT}{digest}"
