"""From a request's `Authorization` header to the caller behind it.

    Authorization: Bearer ... ─> TenantTable ─> Caller(tenant, key_prefix)

A table never changes: a reload makes a new one, and requests that run keep the tenant they came with.

Tenants as the deciding parts see them: what the configuration says of one, with its tier's limits worked
in.

The caller of a request: its facts for a handler, and its place in a request.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.clock import NS_PER_S, Clock
from penstock.config.tenancy import KEY_TENANT, Allowance, PartAllowance, TenantConfig, TierConfig
from penstock.config.tree import Config
from penstock.errors import ConfigError, Forbidden, Unauthenticated
from penstock.gateway.http.exchange import RequestHead
from penstock.gateway.identity.api_keys import ApiKey, digest_of, read_keys, tier_problem
from penstock.policy.tenant import ANONYMOUS, PartLimits, Tenant
from penstock.rng import fresh_key
from penstock.types import TenantId, places_of

SALT_BYTES = 16
MICROS = 1_000_000
_DEFAULTS: Mapping[str, Any] = {
    "requests_per_minute": 0, "tokens_per_minute": 0, "concurrent_max": 0,
    "output_tokens_max": 0, "context_tokens_max": 0, "models": (), "adapters": (), "weight": 1.0,
    "band": "default", "budget_per_day": 0.0, "budget_per_month": 0.0, "degrade": "allow",
    "trusted_special_tokens": False, "per_key": None, "per_user": None, "residency": (),
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
            per_key=_part(allowed["per_key"]),
            per_user=_part(allowed["per_user"]),
            output_tokens_max=allowed["output_tokens_max"],
            context_tokens_max=allowed["context_tokens_max"],
            models=frozenset(allowed["models"]),
            adapters=frozenset(allowed["adapters"]),
            budget_day_micros=round(allowed["budget_per_day"] * MICROS),
            budget_month_micros=round(allowed["budget_per_month"] * MICROS),
            degrade=allowed["degrade"],
            trusted_special_tokens=allowed["trusted_special_tokens"],
            places=places_of(allowed["residency"]),
            cache_salt=salt.digest(),
            fairness_key=tenant_id,
        )


def _part(said: PartAllowance | None) -> PartLimits | None:
    if said is None:
        return None
    return PartLimits(
        requests_per_minute=said.requests_per_minute,
        tokens_per_minute=said.tokens_per_minute,
        concurrent_max=said.concurrent_max,
    )


def _first_given(*given: Allowance | None) -> dict[str, Any]:
    """Of every field the first value that is not null, else the default."""
    found = dict(_DEFAULTS)
    for allowance in reversed(given):
        if allowance is not None:
            said = {name: getattr(allowance, name) for name in _DEFAULTS}
            found |= {name: value for name, value in said.items() if value is not None}
    return found


@dataclass(slots=True, frozen=True, kw_only=True)
class Caller:
    """An authenticated caller.

    Everything about it comes from its key or token, nothing from other headers.
    """

    tenant: Tenant
    key_prefix: str = ""
    """The shown part of its API key, or the subject of its token."""
    admin: bool = False
    """It may look at the fleet and change it (`/admin`)."""
    scrape: bool = False
    """It may read the numbers of all tenants (`/metrics`, `/status.json`), and with a key that is all it may
    do."""
    steady: bool = False
    """The table that found it would find it again at any time: neither its key nor token ends by itself."""

    @property
    def sees_all(self) -> bool:
        """Whether the numbers of all tenants are for its eyes."""
        return self.admin or self.scrape

    @property
    def cache_salt(self) -> bytes:
        """Keeps its tenant's prefix cache apart from everybody else's."""
        return self.tenant.cache_salt

    @property
    def fairness_key(self) -> str:
        """Names its tenant to the engines."""
        return self.tenant.fairness_key


ANONYMOUS_CALLER = Caller(tenant=ANONYMOUS, steady=True)
"""The caller where authentication is off, or does not matter."""
OPERATOR = Caller(tenant=ANONYMOUS, key_prefix="admin", admin=True)
"""The holder of a key that is for `/admin` alone, or where authentication is off a caller without one."""
SCRAPER = Caller(tenant=ANONYMOUS, key_prefix="scrape", scrape=True)
"""The holder of a key that is for `/metrics` and `/status.json` alone, or a caller that needs none for
them."""


def credential(head: RequestHead) -> bytes:
    """The key or token of an `Authorization: Bearer` header.

    Raises:
        Unauthenticated: there is none.
    """
    scheme, _, found = head.headers.get(b"authorization", b"").partition(b" ")
    found = found.strip()
    if scheme.lower() != b"bearer" or not found:
        raise Unauthenticated(
            "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer "
            "YOUR_KEY'."
        )
    return found


GONE_KEYS_MAX = 3
"""So many lines may always be deleted from a keys file at once, as long as a key is left."""
PREFIX_CHARS = 8
"""Shown of a key that has no id of its own."""


class TenantTable:
    """The callers and their tenants. Where authentication is off, everybody may."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock,
        keys: Sequence[ApiKey] = (),
        secret: bytes = b"",
    ) -> None:
        """`keys` are those of the keys file; `secret` is the gateway's own where `auth.secret` is empty.

        Raises:
            ConfigError: the keys do not go with the tiers.
        """
        self.open = config.auth.disabled
        """Everybody may call."""
        self._clock = clock
        secret = config.auth.secret.encode() or secret or fresh_key()
        self.tenants = Tenants(config.tenants, config.tiers, secret=secret)
        if problem := tier_problem(keys, self.tenants.tiers, self.tenants.known):
            raise ConfigError(f"{config.auth.keys_file}: {problem}")
        self._plain = _PlainKeys(config.auth.keys, self.tenants)
        self._admin = _OperatorKeys(config.auth.admin_keys)
        self._scrape = _OperatorKeys(config.auth.scrape_keys)
        self._stored = StoredKeys(keys, self.tenants)

    @property
    def num_keys(self) -> int:
        """Keys of the file and of the configuration."""
        return len(self._stored) + len(self._plain)

    def check_shrinking(self, before: "TenantTable") -> None:
        """Refuse a keys file from which so many keys are gone that it looks like an accident: deleting lines
        revokes nothing.

        Raises:
            ConfigError: it has no accepted key left, or more than half of them are gone (and more than
                `GONE_KEYS_MAX`).
        """
        now_s = self._clock.wall_ns() // NS_PER_S
        accepted = before.accepted_keys(now_s)
        num_gone = self._stored.lacks(accepted)
        if not num_gone:
            return
        if not self._stored.active(now_s) or (num_gone > GONE_KEYS_MAX and 2 * num_gone > len(accepted)):
            raise ConfigError(
                f"{num_gone} of {len(accepted)} keys are gone from the file, as after a copy that failed. If "
                f"that is meant, "
                "revoke them with `penstock keys revoke`, or restart the server"
            )

    def accepted_keys(self, now_s: int) -> frozenset[bytes]:
        """The ids of the keys file's keys that are accepted now."""
        return self._stored.active(now_s)

    def check(self, head: RequestHead) -> Caller:
        """The caller behind a request's `Authorization` header.

        Raises:
            Unauthenticated: there is none, or what it says is not accepted.
        """
        return ANONYMOUS_CALLER if self.open else self.tenant_of_key(credential(head))

    def of_key(self, key: bytes) -> Caller:
        """The caller behind an API key.

        Raises:
            Unauthenticated: it is not one of ours, or not now.
        """
        found = self._stored.find(key, self._clock.wall_ns() // NS_PER_S) or self._plain.find(key)
        if found is None:
            raise Unauthenticated("Incorrect API key provided.")
        return found

    def tenant_of_key(self, key: bytes) -> Caller:
        """The caller behind the API key of a tenant.

        Raises:
            Unauthenticated: it is not one of ours, or not now.
            Forbidden: it is a scraper's.
        """
        found = self.of_key(key)
        if found.scrape:
            raise Forbidden("This key is for /metrics and /status.json only.", code="scrape_key")
        return found

    def viewer_of_key(self, key: bytes) -> Caller:
        """The caller behind a key that reads numbers: all of them (`Caller.sees_all`), or its tenant's.

        Raises:
            Unauthenticated: it is not one of ours, or not now.
        """
        if self._admin.has(key):
            return _operator(key)
        return SCRAPER if self._scrape.has(key) else self.of_key(key)

    def admin_of_key(self, key: bytes) -> Caller:
        """The caller behind a key that may look at the fleet and change it.

        Raises:
            Unauthenticated: it is not one of ours, or not now.
            Forbidden: it is a tenant's ordinary key.
        """
        if self._admin.has(key):
            return _operator(key)
        found = self.of_key(key)
        if not found.admin:
            raise Forbidden(
                "This key may not look at the fleet or change it. That takes one of auth.admin_keys, or one "
                "made with `penstock keys create --admin`."
            )
        return found


def read_tenants(config: Config, *, clock: Clock, secret: bytes = b"") -> TenantTable:
    """The table of a configuration, with the keys of its keys file; `secret` as for the table.

    Raises:
        ConfigError: the file cannot be read, or does not go with the tiers.
    """
    auth = config.auth
    keys: Sequence[ApiKey] = ()
    if auth.keys_file and not auth.disabled:
        path = Path(auth.keys_file)
        if not path.exists():
            raise ConfigError(f"auth.keys_file: there is no {path}; `penstock keys create --file` makes it")
        keys = read_keys(path)
    return TenantTable(config, clock=clock, keys=keys, secret=secret)


class _OperatorKeys:
    """The keys of the configuration that belong to no tenant, hashed at start like the others."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._key = fresh_key()
        self._digests = {_digest(self._key, key.encode()) for key in keys}

    def has(self, key: bytes) -> bool:
        """Whether this is one of them."""
        return _digest(self._key, key) in self._digests


class _PlainKeys:
    """The keys of the configuration.

    They are hashed at start, so that no later memory dump or log line can show one.

    Looking up a digest takes a time that may depend on the digests; keyed with a secret, they tell nothing.
    """

    def __init__(self, keys: Iterable[str], tenants: Tenants) -> None:
        self._key = fresh_key()
        self._callers: dict[bytes, Caller] = {}
        taken: set[str] = set()
        for key in dict.fromkeys(keys):
            tenant_id = _own_tenant(key, taken)
            taken.add(tenant_id)
            self._callers[_digest(self._key, key.encode())] = Caller(
                tenant=tenants.tenant(tenant_id), key_prefix=tenant_id, steady=True
            )

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, key: bytes) -> Caller | None:
        """The caller of this key, if it is one."""
        return self._callers.get(_digest(self._key, key))


def _digest(secret: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(key, key=secret, digest_size=32, person=b"penstock-key").digest()


def _operator(key: bytes) -> Caller:
    """The holder of one of the configuration's admin keys: its id tells the keys apart in the audit trail."""
    digest = hashlib.blake2b(key, digest_size=16, person=b"penstock-admin").hexdigest()
    return replace(OPERATOR, key_prefix=f"{OPERATOR.key_prefix}-{digest[:PREFIX_CHARS]}")


def _own_tenant(key: str, taken: set[str]) -> str:
    """The tenant that a key is by itself: named by the key's hash, so the same after every start."""
    digest = hashlib.blake2b(key.encode(), digest_size=16, person=b"penstock-tenant").hexdigest()
    short = f"{KEY_TENANT}{digest[:PREFIX_CHARS]}"
    return short if short not in taken else f"{KEY_TENANT}{digest}"


# The keys of a keys file, ready to be asked whose a key is: its prefix finds the record, its hash is
# compared.

_KEY = re.compile(rb"sk-([a-z2-7]{12})_[A-Za-z0-9_-]{43}")
_NOBODYS_HASH = bytes(32)


@dataclass(slots=True, frozen=True)
class _Entry:
    digest: bytes
    record: ApiKey
    caller: Caller


class StoredKeys:
    """The keys of a file, ready to be asked.

    One lookup and one constant-time comparison, however many there are.
    """

    def __init__(self, keys: Sequence[ApiKey], tenants: Tenants) -> None:
        """The keys must go with the tenants (see `tier_problem`)."""
        active = [key for key in keys if not key.revoked_s]
        tiers = {key.tenant: key.tier for key in active}
        made = {tenant: tenants.learn(tenant, tier) for tenant, tier in tiers.items()}
        self._entries: Mapping[bytes, _Entry] = {
            key.id.encode(): _Entry(
                bytes.fromhex(key.hash),
                key,
                Caller(
                    tenant=made.get(key.tenant, ANONYMOUS),
                    key_prefix=key.prefix,
                    admin=key.admin,
                    scrape=key.scrape,
                    steady=not (key.revoked_s or key.expires_s or key.not_before_s),
                ),
            )
            for key in keys
        }

    def __len__(self) -> int:
        return len(self._entries)

    def active(self, now_s: int) -> frozenset[bytes]:
        """The ids of those that are accepted now."""
        return frozenset(
            name for name, entry in self._entries.items() if entry.record.state(now_s) == "active"
        )

    def lacks(self, before: frozenset[bytes]) -> int:
        """How many of these ids have no record here. Revoked and expired keys have one."""
        return len(before - self._entries.keys())

    def find(self, key: bytes, now_s: int) -> Caller | None:
        """The caller of this key, or None if it is none of these.

        Raises:
            Unauthenticated: it is one, but not now.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        entry = self._entries.get(match[1])
        # An unknown prefix takes the same steps as a known one with a wrong secret.
        known = hmac.compare_digest(digest_of(key), _NOBODYS_HASH if entry is None else entry.digest)
        if entry is None or not known:
            return None
        state = entry.record.state(now_s)
        if state != "active":
            what = {"revoked": "was revoked", "expired": "has expired", "early": "is not valid yet"}[state]
            raise Unauthenticated(f"This API key {what}.", code=f"{state}_api_key")
        return entry.caller
