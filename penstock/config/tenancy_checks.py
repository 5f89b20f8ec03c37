"""Tenants, tiers and access settings that are each fine but not together. Every problem begins with the key's name."""

import re
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from penstock.config.hosts import is_loopback
from penstock.config.tenancy import DEFAULT_TIERS, Allowance, AuthConfig, JwtConfig, TenantConfig, TierConfig

ID = re.compile(r"[A-Za-z0-9_.:@/|+-]{1,128}")
"""What a tenant may be called: it goes into headers, reports and log lines as it is."""
KEY_TENANT = "key-"
"""Tenants that are made of `auth.keys` begin so; nobody else's name may."""
SECRET_CHARS_MIN = 16
"""Of keys and secrets: what is shorter is guessed, and is a part of ordinary words, which the log would then hide."""
HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.]{2,45}")
LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def names_callers(auth: AuthConfig) -> bool:
    """Whether it is said who may call; if not, a key is made at start."""
    return bool(auth.disabled or auth.keys or auth.keys_file or auth.jwt.issuer)


def access_problems(auth: AuthConfig, host: str) -> Iterator[str]:
    """What is wrong with who may call, for a server that listens on `host`."""
    if auth.disabled and not is_loopback(host):
        yield f"auth.disabled: refused because server.host {host!r} is reachable from other machines"
    elif not names_callers(auth) and not is_loopback(host):
        yield (
            f"auth.keys: needed because server.host {host!r} is reachable from other machines; "
            "set them or PENSTOCK_API_KEY, or auth.keys_file, or auth.jwt"
        )
    lists = (("keys", auth.keys), ("admin_keys", auth.admin_keys), ("scrape_keys", auth.scrape_keys))
    for name, keys in lists:
        for i, key in enumerate(keys):
            if not re.fullmatch(r"[!-~]{0,512}", key):
                yield (
                    f"auth.{name}[{i}]: expected {SECRET_CHARS_MIN} to 512 visible ASCII characters without spaces"
                )
            elif problem := key_problem(key):
                yield f"auth.{name}[{i}]: {problem}"
    if auth.secret and len(auth.secret) < SECRET_CHARS_MIN:
        yield f"auth.secret: expected at least {SECRET_CHARS_MIN} characters"
    yield from _jwt_problems(auth.jwt)


def key_problem(key: str) -> str:
    """Why no key may be as short as this one; empty if it is not."""
    if len(key) >= SECRET_CHARS_MIN:
        return ""
    return (
        f"a key of {len(key)} characters is too short, it takes at least {SECRET_CHARS_MIN} or it can be guessed; "
        "`openssl rand -hex 24` makes a good one"
    )


def host_problems(hosts: Sequence[str]) -> Iterator[str]:
    """What is wrong with `server.hosts`."""
    for i, host in enumerate(hosts):
        if not HOST.fullmatch(host):
            yield (
                f"server.hosts[{i}]: expected the name or address of a host, without scheme and port, got {host[:80]!r}"
            )


def tenant_problems(
    tenants: Sequence[TenantConfig], tiers: Sequence[TierConfig], auth: AuthConfig, bands: Sequence[str]
) -> Iterator[str]:
    """What is wrong with tenants and tiers; `bands` are the queue's."""
    names: dict[str, int] = {}
    for i, tier in enumerate(tiers):
        where = f"tiers[{i}]"
        if not LABEL.fullmatch(tier.name):
            yield f"{where}.name: expected 1 to 64 letters, digits and _.-, got {tier.name[:80]!r}"
        elif tier.name in names:
            yield f"{where}.name: {tier.name!r} is the name of tiers[{names[tier.name]}] already"
        names.setdefault(tier.name, i)
        if tier not in DEFAULT_TIERS:  # Those may name bands that the operator has replaced.
            yield from _unknown_band(tier, where, bands)
        yield from _allowance_problems(tier, where)
    ids: dict[str, int] = {}
    for i, tenant in enumerate(tenants):
        where = f"tenants[{i}]"
        if problem := id_problem(tenant.id):
            yield f"{where}.id: {problem}"
        elif tenant.id in ids:
            yield f"{where}.id: {tenant.id!r} is the id of tenants[{ids[tenant.id]}] already"
        ids.setdefault(tenant.id, i)
        yield from _unknown_tier(f"{where}.tier", tenant.tier, names)
        yield from _unknown_band(tenant, where, bands)
        yield from _allowance_problems(tenant, where)
    if auth.jwt.issuer:
        yield from _unknown_tier("auth.jwt.default_tier", auth.jwt.default_tier, names)


def id_problem(tenant_id: str) -> str:
    """Why no tenant may have this id; empty if one may."""
    if not ID.fullmatch(tenant_id):
        return f"expected 1 to 128 letters, digits and _.:@/|+-, got {tenant_id[:160]!r}"
    if tenant_id.startswith(KEY_TENANT):
        return f"{tenant_id!r} begins with {KEY_TENANT!r}, which is for the tenants of auth.keys"
    return ""


def _unknown_tier(where: str, tier: str, known: dict[str, int]) -> Iterator[str]:
    if tier and tier not in known:
        yield f"{where}: there is no tier {tier[:80]!r}; there are {', '.join(known) or 'none'}"


def _unknown_band(allowed: Allowance, where: str, known: Sequence[str]) -> Iterator[str]:
    if allowed.band is not None and allowed.band not in known:
        yield f"{where}.band: there is no band {allowed.band[:80]!r} in queue.bands; there are {', '.join(known)}"


def _allowance_problems(allowed: Allowance, where: str) -> Iterator[str]:
    for field in ("models", "adapters"):
        for i, name in enumerate(getattr(allowed, field) or ()):
            if not re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,256}", name):
                yield f"{where}.{field}[{i}]: expected 1 to 256 characters without white space"
    context = allowed.context_tokens_max
    for field in ("input_tokens_max", "output_tokens_max"):
        limit: int | None = getattr(allowed, field)
        if context and limit and limit > context:
            yield f"{where}.{field}: {limit} is above context_tokens_max ({context}), so it can never be used"
    day, month = allowed.budget_per_day, allowed.budget_per_month
    if day and month and day > month:
        yield f"{where}.budget_per_day: {day:g} is above budget_per_month ({month:g})"


def _jwt_problems(jwt: JwtConfig) -> Iterator[str]:
    if not jwt.issuer:
        if jwt.jwks_url or jwt.audience:
            yield "auth.jwt.issuer: needed, since tokens of just anybody cannot be accepted"
        return
    if not jwt.audience:
        yield "auth.jwt.audience: needed, or tokens that were made for other services would be accepted"
    for name, url in (("issuer", jwt.issuer), ("jwks_url", jwt.jwks_url)):
        if url and (problem := url_problem(url)):
            yield f"auth.jwt.{name}: {problem}"
    for name, claim in (("tenant_claim", jwt.tenant_claim), ("tier_claim", jwt.tier_claim)):
        if not claim and name == "tier_claim":
            continue
        if not re.fullmatch(r"[^.\s]{1,128}(\.[^.\s]{1,128}){0,7}", claim):
            yield f"auth.jwt.{name}: expected the name of a claim, got {claim[:80]!r}"


def url_problem(url: str) -> str:
    """Why keys may not be fetched there; empty if they may.

    Over plain HTTP they could be anybody's; on this machine there is nobody in between.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"not a URL: {error}"
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.username
        or parts.fragment
        or not url.isascii()
    ):
        return f"expected https://HOST/PATH, got {url[:80]!r}"
    if parts.scheme == "http" and not is_loopback(host):
        return "refused over http: anybody in between could put in keys of their own; use https"
    return ""
