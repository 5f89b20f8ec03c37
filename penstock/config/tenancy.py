"""Tenants, tiers, keys and tokens: the sections `tenants`, `tiers` and `auth`."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.branch import Branch, Count, Positive, Seconds

Weight = Annotated[float, Meta(gt=0, le=1_000_000)]
Money = Annotated[float, Meta(ge=0, le=1_000_000_000)]
Names = Annotated[tuple[str, ...], Meta(max_length=1024)]
Degrade = Literal["never", "allow", "prefer"]
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Signatures with a public key. HMAC and "none" are not among them, so that no setting can let them in."""


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
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1, max_length=16)] = (
        "RS256",
        "ES256",
        "EdDSA",
    )
    """Signatures that are accepted."""
    leeway_s: Seconds = 30.0
    """How far the provider's clock may be off ours."""
    lifetime_s_max: Seconds = 24 * 3600.0
    """Tokens that are valid for longer than this, counted from now, are refused; 0 takes any."""
    refresh_s: Annotated[float, Meta(ge=1)] = 300.0
    """The provider's keys are fetched again this often."""
    refresh_s_min: Annotated[float, Meta(ge=0.1)] = 10.0
    """They are never fetched more often than this, however many tokens name an unknown key."""
    stale_s_max: Seconds = 24 * 3600.0
    """While the provider cannot be reached its last keys stay in force for this long."""
    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """For one fetch, and for a request that waits for it."""
    waiting_max: Positive = 256
    """Requests that wait for a fetch at once; one more is told to come back."""
    response_bytes_max: Positive = 256 * 1024
    """Of the provider's answers."""
    keys_max: Positive = 64
    """Keys that are taken from the provider."""
    tokens_max: Positive = 10_000
    """Tokens whose verification is remembered, so that one costs its signature only once."""


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
    keys_file_check_s: Annotated[float, Meta(ge=0.1)] = 2.0
    """How often the file is looked at."""
    keys_file_shrinks: bool = False
    """Take a keys file also when all of its keys, or more than half, are gone from it. By default that is an accident (a copy in
    progress, a full disk) and the old keys stay; keys that `penstock keys revoke` marks are always refused."""
    keys_max: Positive = 100_000
    """Keys in the file at most."""
    secret: str = ""
    """Secret of the prefix-cache namespaces; empty: one is made and kept in the state directory. Gateways in front of the
    same workers must share it, or a tenant finds its cache only through the gateway that filled it."""
    jwt: JwtConfig = JwtConfig()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log line may show."""
        return (*self.keys, *self.admin_keys, *self.scrape_keys, self.secret)


class TierConfig(Branch, frozen=True, kw_only=True):
    """What the tenants of one tier may use. A limit of 0 is no limit."""

    name: str
    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    """Prompt and answer tokens together."""
    concurrent_max: Count = 0
    """Requests accepted and not ended."""
    input_tokens_max: Count = 0
    """Of one prompt."""
    output_tokens_max: Count = 0
    """Of one choice."""
    context_tokens_max: Count = 0
    """Prompt and answer of one choice together."""
    models: Names = ()
    """Models that may be used; empty: all."""
    adapters: Names = ()
    """Adapters that may be used; empty: all."""
    weight: Weight = 1.0
    """Share beside other tenants of the band while both have work waiting."""
    band: str = "default"
    """Priority band of its requests, one of `queue.bands`."""
    budget_per_day: Money = 0.0
    """In the currency of the price list, per UTC day."""
    budget_per_month: Money = 0.0
    degrade: Degrade = "allow"
    """Whether a smaller model may answer where the request does not say: never, rather than fail, or when it is sooner."""
    trusted_special_tokens: bool = False
    """Whether special tokens in the text of chat messages become those tokens; otherwise they are text like any other."""


class TenantConfig(Branch, frozen=True, kw_only=True):
    """One tenant. What is given here counts instead of its tier's; what is null is the tier's."""

    id: str
    """What keys and tokens name, and what the ledger says. 1 to 128 letters, digits and `_.:@/|+-`."""
    tier: str = ""
    """Empty: no tier, so no limits but those given here."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_max: Count | None = None
    input_tokens_max: Count | None = None
    output_tokens_max: Count | None = None
    context_tokens_max: Count | None = None
    models: Names | None = None
    adapters: Names | None = None
    weight: Weight | None = None
    band: str | None = None
    budget_per_day: Money | None = None
    budget_per_month: Money | None = None
    degrade: Degrade | None = None
    trusted_special_tokens: bool | None = None


FREE = TierConfig(
    name="free",
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
)
ENTERPRISE = TierConfig(
    name="enterprise",
    requests_per_minute=6000,
    tokens_per_minute=10_000_000,
    concurrent_max=256,
    context_tokens_max=131_072,
    weight=16.0,
    band="priority",
    degrade="never",
)
INTERACTIVE = TierConfig(
    name="interactive",
    requests_per_minute=600,
    tokens_per_minute=1_000_000,
    concurrent_max=32,
    output_tokens_max=16_384,
    context_tokens_max=65_536,
    weight=4.0,
    band="priority",
)
"""For people who type and wait: `admission.targets` promises it a first token in 200 ms."""
DEFAULT_TIERS = (FREE, PRO, INTERACTIVE, ENTERPRISE)
