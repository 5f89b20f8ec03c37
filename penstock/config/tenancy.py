"""Tenants, tiers, keys and tokens: the sections `tenants`, `tiers` and `auth`."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.branch import Branch, Count, Seconds
from penstock.config.cells import Labels
from penstock.config.machine import is_loopback

Weight = Annotated[float, Meta(gt=0, le=1_000_000)]
Money = Annotated[float, Meta(ge=0, le=1_000_000_000)]
Names = Annotated[tuple[str, ...], Meta(max_length=1024)]
Degrade = Literal["never", "allow", "prefer"]


class JwtConfig(Branch, frozen=True, kw_only=True):
    """Tokens of an OpenID Connect provider, accepted beside keys.

    Off until there is an issuer; see docs/tenants.md.
    """

    issuer: str = ""
    """The required `iss` of a token, to the letter; also where the provider's description is looked up."""
    audience: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    """The values of which a token's `aud` must have one."""
    jwks_url: str = ""
    """Where the provider's public keys are; empty asks ISSUER/.well-known/openid-configuration."""
    tenant_claim: str = "sub"
    """The claim that names the tenant; dots lead into objects: "app.org_id"."""
    tier_claim: str = ""
    """The claim that names the tier of tenants that `tenants` does not list; empty: `default_tier`."""
    default_tier: str = "free"
    """Tier of a tenant that neither `tenants` nor the token says one of; empty: such tokens are refused."""
    lifetime_s_max: Seconds = 24 * 3600.0
    """Tokens that are valid for longer than this, counted from now, are refused; 0 takes any."""


class AuthConfig(Branch, frozen=True, kw_only=True):
    """Callers and their keys."""

    keys: tuple[str, ...] = ()
    """API keys that are accepted, each a tenant of its own without limits. Nothing here, in `keys_file` or in
    `jwt`: a key is made at start and printed (loopback only)."""
    admin_keys: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Keys for `/admin` (who runs the fleet), and for nothing else unless they are in `keys` too. A key that
    is made at start may use both."""
    scrape_keys: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Keys for `/metrics` and `/status.json` (Prometheus), and for nothing else."""
    disabled: bool = False
    """Accept everybody. Refused on addresses other than loopback."""
    keys_file: str = ""
    """File of hashed keys that `penstock keys` writes; read again when it changes."""
    secret: str = ""
    """Secret of the prefix-cache namespaces; empty: one is made and kept in the state directory. Gateways in
    front of the same workers must share it, or a tenant finds its cache only through the gateway that filled
    it."""
    jwt: JwtConfig = JwtConfig()

    @property
    def secrets(self) -> tuple[str, ...]:
        """Secrets, which no log line may show."""
        return (*self.keys, *self.admin_keys, *self.scrape_keys, self.secret)


class PartAllowance(Branch, frozen=True, kw_only=True):
    """The use that each key, or each user, inside a tenant may make. A limit of 0 is no limit."""

    requests_per_minute: Count = 0
    """Of all models together."""
    tokens_per_minute: Count = 0
    """Prompt and answer tokens together."""
    concurrent_max: Count = 0
    """Requests accepted and not ended."""


class Allowance(Branch, frozen=True, kw_only=True):
    """The use that a tenant may make, set by its tier or for itself. A limit of 0 is no limit.

    A value that is null for a tenant is its tier's; what is null for a tier is the default: no limit, every
    model, weight 1, the band `default`, degrade `allow`.
    """

    requests_per_minute: Count | None = None
    """Requests that are started, refused ones not among them."""
    tokens_per_minute: Count | None = None
    """Prompt and answer tokens together."""
    concurrent_max: Count | None = None
    """Requests accepted and not ended."""
    per_key: PartAllowance | None = None
    """Limits of each of the tenant's keys, within the tenant's own."""
    per_user: PartAllowance | None = None
    """Limits of each `user` that requests of the tenant name, within the tenant's own; requests that name
    none count as one user."""
    output_tokens_max: Count | None = None
    """Of one choice."""
    context_tokens_max: Count | None = None
    """Prompt and answer of one choice together."""
    models: Names | None = None
    """Models that may be used; empty: all."""
    adapters: Names | None = None
    """Adapters that may be used; empty: all."""
    weight: Weight | None = None
    """Share beside other tenants of the band while both have work waiting."""
    band: str | None = None
    """Priority band of its requests, one of `queue.bands`."""
    budget_per_day: Money | None = None
    """In the currency of the price list, per UTC day."""
    budget_per_month: Money | None = None
    """Likewise per UTC month."""
    degrade: Degrade | None = None
    """Whether a smaller model may answer where the request does not say: never, rather than fail, or when it
    is sooner."""
    trusted_special_tokens: bool | None = None
    """Whether special tokens in the text of chat messages become those tokens; otherwise they are text like
    any other."""
    residency: Labels | None = None
    """Labels of cells (`cells.all[].labels`): its requests are computed only in cells that have all of these;
    empty: in any."""


class TierConfig(Allowance, frozen=True, kw_only=True):
    """The use that the tenants of one tier may make."""

    name: str
    """The name that tenants, keys and tokens give."""


class TenantConfig(Allowance, frozen=True, kw_only=True):
    """One tenant. A value given here counts instead of its tier's."""

    id: str
    """The name that keys and tokens give, and that the ledger records. 1 to 128 letters, digits and
    `_.:@/|+-`."""
    tier: str = ""
    """Empty: no tier, so no limits but those given here."""


FREE = TierConfig(
    name="free",
    weight=1.0,
    band="default",
    degrade="allow",
    requests_per_minute=60,
    tokens_per_minute=100_000,
    concurrent_max=4,
    output_tokens_max=4096,
    context_tokens_max=32_768,
)
PRO = TierConfig(
    name="pro",
    requests_per_minute=600,
    tokens_per_minute=1_000_000,
    concurrent_max=32,
    output_tokens_max=16_384,
    context_tokens_max=65_536,
    weight=4.0,
    band="default",
    degrade="allow",
)
ENTERPRISE = TierConfig(
    name="enterprise",
    requests_per_minute=6000,
    tokens_per_minute=10_000_000,
    concurrent_max=256,
    output_tokens_max=0,
    context_tokens_max=131_072,
    weight=16.0,
    band="priority",
    degrade="never",
)
INTERACTIVE = replace(PRO, name="interactive", band="priority")
"""For people who type and wait: `admission.targets` promises it a first token in 200 ms."""
DEFAULT_TIERS = (FREE, PRO, INTERACTIVE, ENTERPRISE)


ID = re.compile(r"[A-Za-z0-9_.:@/|+-]{1,128}")
"""The form of a tenant's name: it goes into headers, reports and log lines as it is."""
KEY_TENANT = "key-"
"""Tenants that are made of `auth.keys` begin so; no other tenant's name may."""
SECRET_CHARS_MIN = 16
"""Of keys and secrets: what is shorter is guessed, and is a part of ordinary words, which the log would then
hide."""
HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.]{2,45}")
LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def names_callers(auth: AuthConfig) -> bool:
    """Whether it is said who may call; if not, a key is made at start."""
    return bool(auth.disabled or auth.keys or auth.keys_file or auth.jwt.issuer)


def access_problems(auth: AuthConfig, host: str) -> Iterator[str]:
    """Problems of the callers' settings, for a server that listens on `host`."""
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
                    f"auth.{name}[{i}]: expected {SECRET_CHARS_MIN} to 512 visible ASCII characters without "
                    f"spaces"
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
        f"a key of {len(key)} characters is too short, it takes at least {SECRET_CHARS_MIN} or it can be "
        f"guessed; "
        "`openssl rand -hex 24` makes a good one"
    )


def host_problems(hosts: Sequence[str]) -> Iterator[str]:
    """Problems of `server.hosts`."""
    for i, host in enumerate(hosts):
        if not HOST.fullmatch(host):
            yield (
                f"server.hosts[{i}]: expected the name or address of a host, without scheme and port, got "
                f"{host[:80]!r}"
            )


def tenant_problems(
    tenants: Sequence[TenantConfig], tiers: Sequence[TierConfig], auth: AuthConfig, bands: Sequence[str]
) -> Iterator[str]:
    """Problems of tenants and tiers; `bands` are the queue's."""
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
        yield (
            f"{where}.band: there is no band {allowed.band[:80]!r} in queue.bands; there are "
            f"{', '.join(known)}"
        )


def _allowance_problems(allowed: Allowance, where: str) -> Iterator[str]:
    for field in ("models", "adapters"):
        for i, name in enumerate(getattr(allowed, field) or ()):
            if not re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,256}", name):
                yield f"{where}.{field}[{i}]: expected 1 to 256 characters without white space"
    context = allowed.context_tokens_max
    limit = allowed.output_tokens_max
    if context and limit and limit > context:
        yield (
            f"{where}.output_tokens_max: {limit} is above context_tokens_max ({context}), so it can never be "
            "used"
        )
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

    Over plain HTTP they could be anybody's; on this machine no network lies in between.
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


RETIRED: dict[str, str] = {
    **{
        f"{section}[].input_tokens_max": "`tiers[].context_tokens_max` bounds prompt and answer together"
        for section in ("tiers", "tenants")
    },
    "auth.keys_file_check_s": "a constant now: every 2 s",
    "auth.keys_file_shrinks": "a server takes such a file when it starts; revoke keys with `penstock keys "
    "revoke`",
    "auth.keys_max": "a constant now: 100,000 keys",
    "auth.jwt.algorithms": "every signature with a public key that is of its key's kind is accepted now",
    **{
        f"auth.jwt.{key}": "a constant now (penstock/gateway/identity/tokens.py)"
        for key in (
            "leeway_s", "refresh_s", "refresh_s_min", "stale_s_max", "timeout_s", "waiting_max",
            "response_bytes_max", "keys_max", "tokens_max",
        )
    },
}  # fmt: skip
