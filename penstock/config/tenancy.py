"""Tenants, tiers, keys and tokens: the sections `tenants`, `tiers` and `auth`."""

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from penstock.config.branch import Branch, Count, Seconds

Weight = Annotated[float, Meta(gt=0, le=1_000_000)]
Money = Annotated[float, Meta(ge=0, le=1_000_000_000)]
Names = Annotated[tuple[str, ...], Meta(max_length=1024)]
Degrade = Literal["never", "allow", "prefer"]


class JwtConfig(Branch, frozen=True, kw_only=True):
    """Tokens of an OpenID Connect provider, accepted beside keys. Off until there is an issuer; see docs/tenants.md."""

    issuer: str = ""
    """What a token's `iss` must be, to the letter; also where the provider's description is looked up."""
    audience: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    """What a token's `aud` must have one of."""
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
    """Who may call."""

    keys: tuple[str, ...] = ()
    """API keys that are accepted, each a tenant of its own without limits. Nothing here, in `keys_file` or in `jwt`: a
    key is made at start and printed (loopback only)."""
    admin_keys: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Keys for `/admin` (who runs the fleet), and for nothing else unless they are in `keys` too. A key that is made at start
    may use both."""
    scrape_keys: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Keys for `/metrics` and `/status.json` (Prometheus), and for nothing else."""
    disabled: bool = False
    """Accept everybody. Refused on addresses other than loopback."""
    keys_file: str = ""
    """File of hashed keys that `penstock keys` writes; read again when it changes."""
    secret: str = ""
    """Secret of the prefix-cache namespaces; empty: one is made and kept in the state directory. Gateways in front of the
    same workers must share it, or a tenant finds its cache only through the gateway that filled it."""
    jwt: JwtConfig = JwtConfig()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log line may show."""
        return (*self.keys, *self.admin_keys, *self.scrape_keys, self.secret)


class Allowance(Branch, frozen=True, kw_only=True):
    """What a tenant may use, said by its tier or for itself. A limit of 0 is no limit. What is null for a tenant is its tier's;
    what is null for a tier is the default: no limit, every model, weight 1, the band `default`, degrade `allow`.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and answer tokens together."""
    concurrent_max: Count | None = None
    """Requests accepted and not ended."""
    input_tokens_max: Count | None = None
    """Of one prompt."""
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
    degrade: Degrade | None = None
    """Whether a smaller model may answer where the request does not say: never, rather than fail, or when it is sooner."""
    trusted_special_tokens: bool | None = None
    """Whether special tokens in the text of chat messages become those tokens; otherwise they are text like any other."""


class TierConfig(Allowance, frozen=True, kw_only=True):
    """What the tenants of one tier may use."""

    name: str


class TenantConfig(Allowance, frozen=True, kw_only=True):
    """One tenant. What is given here counts instead of its tier's."""

    id: str
    """What keys and tokens name, and what the ledger says. 1 to 128 letters, digits and `_.:@/|+-`."""
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
