"""The endpoints about tenants and their keys, for admins.

    GET  /admin/tenants                 what each tenant may use and uses
    GET  /admin/keys                    the keys of the keys file, without what is secret
    POST /admin/keys                    make one; the answer alone has it
    POST /admin/keys/{prefix}/rotate    a new one in its place; the old one ends after a grace time
    POST /admin/keys/{prefix}/revoke    never accepted again

Keys are in the file that `penstock keys` changes, under the same lock; gateways take a change within seconds.
A key that is made here is a tenant's: one for /admin or for scrapers takes the command line of the machine.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from penstock.clock import NS_PER_S
from penstock.errors import ConfigError, InvalidRequest, NotFound
from penstock.gateway.api.inspect import answer, query_of, whole_number
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.identity import api_keys
from penstock.gateway.identity.api_keys import ApiKey, Issued, edit_keys, read_keys
from penstock.gateway.identity.tenancy import Tenancy
from penstock.gateway.identity.tenants import Caller
from penstock.policy.tenant import Tenant

KEYS = "/admin/keys/"
LISTED_MAX = 500
"""Tenants, and keys, of one answer."""
DAY_S = 86_400
T = TypeVar("T")


class TenantLine(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant. A limit of 0 is no limit; money is in millionths."""

    id: str
    tier: str
    band: str
    weight: float
    live: int
    """Requests that this gateway process has accepted and that have not ended."""
    concurrent_max: int
    requests_per_minute: int
    tokens_per_minute: int
    spent_day_micros: int
    budget_day_micros: int
    spent_month_micros: int
    budget_month_micros: int
    models: list[str]
    """That it may use; empty: all."""


class KeyLine(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the file. Times are seconds since the epoch; 0: never."""

    prefix: str
    tenant: str
    tier: str
    label: str
    state: str
    """"active", "revoked", "expired" or "early"."""
    created_s: int
    expires_s: int
    admin: bool
    scrape: bool


class KeyOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/keys`."""

    tenant: str
    tier: str = ""
    label: str = ""
    expires_days: Annotated[int, Meta(ge=0, le=36_500)] = 0
    """0: it does not end."""


class RotateOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/keys/{prefix}/rotate`; it may be left out."""

    grace_days: Annotated[int, Meta(ge=0, le=365)] = 1
    """How long the old key is accepted beside the new one."""


_new = msgspec.json.Decoder(KeyOrder)
_rotate = msgspec.json.Decoder(RotateOrder)


class TenantsAdmin:
    """The endpoints."""

    def __init__(self, services: Services, tenancy: Tenancy) -> None:
        self._services, self._tenancy = services, tenancy

    async def tenants(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/tenants?offset=0`: what each tenant may use, and what it uses and has spent; at most
        500 from that one on.

        Raises:
            InvalidRequest: the query says something else.
        """
        known = list(self._tenancy.table.tenants.known.values())
        shown = _page(exchange, sorted(known, key=lambda tenant: tenant.id))
        answer(exchange, {"tenants": [self._line(each) for each in shown], "total": len(known)})

    async def keys(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/keys?offset=0`: the keys of `auth.keys_file`, newest first, without what is secret; at
        most 500 from that one on.

        Raises:
            InvalidRequest: the query says something else.
        """
        path, now_s = self._tenancy.config.auth.keys_file, self._now_s()
        records = await asyncio.to_thread(_read, Path(path)) if path else ()
        newest = sorted(records, key=lambda key: key.created_s, reverse=True)
        shown = [_shown(each, now_s) for each in _page(exchange, newest)]
        answer(exchange, {"writable": bool(path), "keys": shown, "total": len(records)})

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/keys`: make a tenant's key; the answer alone has it."""
        order, now_s = _decoded(_new, exchange.body), self._now_s()

        def change(keys: tuple[ApiKey, ...]) -> tuple[Sequence[ApiKey], Issued]:
            # A tenant's further keys are of its tier without saying so again.
            tiers = (key.tier for key in keys if key.tenant == order.tenant and not key.revoked_s)
            issued = api_keys.issue(
                now_s,
                tenant=order.tenant,
                tier=order.tier or next(tiers, ""),
                label=order.label,
                expires_s=now_s + order.expires_days * DAY_S if order.expires_days else 0,
            )
            changed = (*keys, issued.record)
            self._check(changed)
            return changed, issued

        issued = await self._edit(change)
        self._noted("made", caller, issued.record)
        answer(exchange, {"key": issued.key, **msgspec.to_builtins(_shown(issued.record, now_s))})

    async def order(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /admin/keys/{id}/rotate`: a new key in its place, and the old one ends after a grace time;
        `/revoke`: it is never accepted again. The id is the key's prefix.

        Raises:
            NotFound: there is no such key, or order.
        """
        prefix, _, verb = exchange.path.removeprefix(KEYS).rstrip("/").rpartition("/")
        if verb not in ("rotate", "revoke"):
            raise NotFound("Unknown path. There are /rotate and /revoke of a key.", code="unknown_path")
        now_s = self._now_s()
        grace_s = _decoded(_rotate, exchange.body or b"{}").grace_days * DAY_S if verb == "rotate" else 0

        def change(keys: tuple[ApiKey, ...]) -> tuple[Sequence[ApiKey], tuple[ApiKey, str]]:
            old = next((key for key in keys if key.prefix == prefix), None)
            if old is None:
                raise NotFound(f"There is no key {prefix[:20]!r}.", code="unknown_key")
            if verb == "revoke":
                ended = api_keys.revoke(old, now_s)
                return [ended if key is old else key for key in keys], (ended, "")
            if old.admin or old.scrape:
                raise ConfigError(f"{prefix} is no tenant's key: `penstock keys rotate` makes a new one")
            ended, issued = api_keys.rotate(old, now_s, grace_s=grace_s)
            kept = [ended if key is old else key for key in keys]
            return [*kept, issued.record], (issued.record, issued.key)

        record, key = await self._edit(change)
        self._noted("rotated" if key else "revoked", caller, record, of=prefix)
        shown = msgspec.to_builtins(_shown(record, now_s))
        answer(exchange, {"key": key, **shown} if key else shown)

    def _line(self, tenant: Tenant) -> TenantLine:
        services = self._services
        day_micros, month_micros = services.budgets.spent(services.clock.now_ns(), tenant.id)
        return TenantLine(
            id=tenant.id,
            tier=tenant.tier,
            band=tenant.band,
            weight=tenant.weight,
            live=services.limiter.num_live(tenant.id),
            concurrent_max=tenant.concurrent_max,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
            spent_day_micros=day_micros,
            budget_day_micros=tenant.budget_day_micros,
            spent_month_micros=month_micros,
            budget_month_micros=tenant.budget_month_micros,
            models=sorted(tenant.models),
        )

    def _check(self, keys: Sequence[ApiKey]) -> None:
        """Raises ConfigError: a gateway would not take these."""
        config = self._tenancy.config
        tiers = [tier.name for tier in config.tiers]
        if problem := api_keys.tier_problem(keys, tiers, [tenant.id for tenant in config.tenants]):
            raise ConfigError(problem)

    async def _edit(self, change: Callable[[tuple[ApiKey, ...]], tuple[Sequence[ApiKey], T]]) -> T:
        path = self._tenancy.config.auth.keys_file
        if not path:
            raise InvalidRequest(
                "This server has no file of keys: set auth.keys_file.", code="no_keys_file", param="keys_file"
            )
        try:
            return await asyncio.to_thread(edit_keys, Path(path), change)
        except ConfigError as error:
            raise InvalidRequest(f"{error}.", code="invalid_key") from error

    def _noted(self, what: str, caller: Caller, record: ApiKey, of: str = "") -> None:
        """In the log and in the audit trail; `of`: the key that it takes the place of."""
        services, by = self._services, caller.key_prefix
        services.log.info(f"a key was {what}", key_prefix=record.prefix, tenant=record.tenant, by=by)
        why = f"tenant {record.tenant}" + (f", in place of {of}" if of not in ("", record.prefix) else "")
        services.notes.note("admin", f"key {what}", record.prefix, why=why, by=by)

    def _now_s(self) -> int:
        return self._services.clock.wall_ns() // NS_PER_S


def _page(exchange: Exchange, rows: Sequence[T]) -> Sequence[T]:
    """Those that the query asks for.

    Raises:
        InvalidRequest: it says something else.
    """
    offset = whole_number(query_of(exchange), "offset", 0, minimum=0, maximum=10**9)
    return rows[offset : offset + LISTED_MAX]


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        return read_keys(path) if path.exists() else ()
    except ConfigError as error:
        raise InvalidRequest(f"{error}.", code="no_keys_file") from error


def _shown(key: ApiKey, now_s: int) -> KeyLine:
    return KeyLine(
        prefix=key.prefix,
        tenant=key.tenant,
        tier=key.tier,
        label=key.label,
        state=key.state(now_s),
        created_s=key.created_s,
        expires_s=key.expires_s,
        admin=key.admin,
        scrape=key.scrape,
    )


def _decoded(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"Invalid body: {error}.", code="invalid_value") from error
