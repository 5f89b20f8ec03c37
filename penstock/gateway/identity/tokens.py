"""Tokens of an OpenID Connect provider: who a signed JSON Web Token says is calling (RFC 7519, RFC 8725).

PyJWT checks the signature, issuer and audience. Every choice is made here and not by the token: the
algorithm must be on the list and fit the key (so `none`, and HMAC with a public key, have no way in), the key
comes from the provider's set and never from the token's header, and times are judged by our clock.

A token that was verified is remembered under a keyed hash until it ends, so its signature is checked once.

The public keys of an OpenID Connect provider (RFC 7517), fetched in the background and kept while it is
down.

    run() ──every refresh_s──> fetch ─> parse ─> keys
      ^                                   └─ failed: the last keys stay, up to stale_s_max
      └── wait_for(): a token names an unknown key; fetch sooner, at most once per refresh_s_min

Fetching is a few kilobytes every few minutes, so the standard library does it, in a thread, and not the HTTP
client of the workers: the provider is often outside the network and then reached through the proxy that the
environment names, which `urllib` follows.

The constants behind the section `auth.jwt`: which signatures are accepted, and how the provider's keys are
followed.
"""

import asyncio
import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jwt
import msgspec

from penstock.clock import NS_PER_S, Clock, sleep
from penstock.config.branch import extended
from penstock.config.tenancy import JwtConfig, id_problem, url_problem
from penstock.errors import Forbidden, IdentityUnavailable, Unauthenticated
from penstock.gateway.identity.tenants import Caller, Tenants
from penstock.policy.tenant import Tenant
from penstock.rng import fresh_key
from penstock.telemetry.log import Log

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with a public key; each must also be of its key's kind. HMAC and "none" are not among them, so
that no setting can let them in."""


class JwtTerms(JwtConfig, frozen=True, kw_only=True):
    """The section, and what no operator has a reason to move."""

    leeway_s: float = 30.0
    """How far the provider's clock may be off ours."""
    refresh_s: float = 300.0
    """The provider's keys are fetched again this often."""
    refresh_s_min: float = 10.0
    """They are never fetched more often than this, however many tokens name an unknown key."""
    stale_s_max: float = 24 * 3600.0
    """While the provider cannot be reached its last keys stay in force for this long."""
    timeout_s: float = 5.0
    """For one fetch, and for a request that waits for it."""
    waiting_max: int = 256
    """Requests that wait for a fetch at once; one more is refused for now."""
    response_bytes_max: int = 256 * 1024
    """Of the provider's answers."""
    keys_max: int = 64
    """Keys that are taken from the provider."""
    tokens_max: int = 10_000
    """Tokens whose verification is remembered, so that one costs its signature only once."""


WELL_KNOWN = "/.well-known/openid-configuration"
RSA_BITS_MIN = 2048
_KINDS = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}

Fetch = Callable[[str], bytes]
"""Gets a URL's body. Blocks; runs in a thread. Raises OSError or ValueError."""


@dataclass(slots=True, frozen=True, kw_only=True)
class SigningKey:
    """One public key, and what it may be used for."""

    kid: str
    key: Any
    kind: str
    """JWK's `kty`."""
    curve: str
    algorithm: str
    """The only one, if the provider says one."""

    def verifies(self, algorithm: str) -> bool:
        """Whether signatures of this kind can be this key's: an RSA key never checks an HMAC."""
        if self.algorithm and self.algorithm != algorithm:
            return False
        return _KINDS.get(algorithm[:2]) == self.kind and _CURVES.get(algorithm, self.curve) == self.curve


def parse_jwks(data: bytes, *, keys_max: int) -> dict[str, SigningKey]:
    """The usable signing keys of a JWK set, by id.

    A key that cannot be used (encryption, symmetric, too short) is left out.

    Raises:
        ValueError: it is no JWK set, or has no usable key.
    """
    found: dict[str, SigningKey] = {}
    for jwk in msgspec.json.decode(data, type=dict[str, Any]).get("keys", ()):
        if len(found) < keys_max and isinstance(jwk, dict) and (key := _key_of(cast(dict[str, Any], jwk))):
            found[key.kid] = key
    if not found:
        raise ValueError("no key in it can check signatures")
    return found


def _key_of(jwk: dict[str, Any]) -> SigningKey | None:
    kind = jwk.get("kty")
    if kind not in _KINDS.values() or jwk.get("use", "sig") != "sig":
        return None
    try:
        made: Any = jwt.PyJWK(jwk).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if hasattr(made, "private_numbers") or hasattr(made, "private_bytes"):
        return None  # A provider that publishes its private key has other troubles; we do not trust it.
    if kind == "RSA" and made.key_size < RSA_BITS_MIN:
        return None
    fields = {name: str(jwk.get(name) or "") for name in ("kid", "crv", "alg")}
    return SigningKey(
        kid=fields["kid"], key=made, kind=str(kind), curve=fields["crv"], algorithm=fields["alg"]
    )


class ProviderKeys:
    """The provider's keys as they are known now. `run` must run for them to be."""

    def __init__(self, config: JwtConfig, *, clock: Clock, log: Log, fetch: Fetch | None = None) -> None:
        self._config = extended(config, JwtTerms)
        self._clock, self._log = clock, log
        self._fetch: Fetch = fetch or self._get
        self._keys: Mapping[str, SigningKey] = {}
        self._began_ns: int | None = None
        self._fresh_ns: int | None = None
        self._failures = 0
        self._wanted = asyncio.Event()
        self._in_flight: list[asyncio.Future[None]] | None = None
        """Requests that wait for the fetch that is under way; None while there is none."""
        self._next: list[asyncio.Future[None]] = []
        """Requests that wait for the next one."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a key that was there is there no more, or is another one."""

    @property
    def keys(self) -> Mapping[str, SigningKey]:
        """By id. Empty before the first fetch, and after the provider was away for too long."""
        return self._keys

    async def run(self) -> None:
        """Keep the keys fresh, for ever."""
        while True:
            await self._pause()
            self._wanted.clear()
            self._began_ns = self._clock.now_ns()
            self._in_flight, self._next = self._next, []
            await self._refresh()
            waiting, self._in_flight = self._in_flight, None
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def wait_for(self) -> bool:
        """Return after a fetch: one that is under way (False), else one that begins now or later (True).

        Only after the second kind a key that is still not there is unknown.

        Raises:
            IdentityUnavailable: that would take too long, too many wait already, or there are still no keys.
        """
        joins = self._in_flight is not None
        wait_s = 0.0 if joins else self._allowed_in_s()
        waiting = self._next if self._in_flight is None else self._in_flight
        if wait_s > self._config.timeout_s or len(waiting) >= self._config.waiting_max:
            raise _unavailable(wait_s)
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        if not joins:
            self._wanted.set()
        try:
            async with asyncio.timeout(wait_s + self._config.timeout_s):
                await future
        except TimeoutError:
            raise _unavailable(self._config.refresh_s_min) from None
        if not self._keys:
            raise _unavailable(self._config.refresh_s_min)
        return not joins

    async def _pause(self) -> None:
        """Until the next fetch is due, or is wanted and allowed."""
        if self._began_ns is None:
            return
        config = self._config
        # A provider that is down is asked more often than one that answers, but less and less.
        period_s = config.refresh_s
        if self._failures:
            period_s = min(period_s, config.refresh_s_min * 2 ** min(self._failures - 1, 20))
        try:
            async with asyncio.timeout(period_s):
                await self._wanted.wait()
        except TimeoutError:
            return
        await sleep(self._allowed_in_s())

    def _allowed_in_s(self) -> float:
        if self._began_ns is None:
            return 0.0
        since_s = (self._clock.now_ns() - self._began_ns) / NS_PER_S
        return max(0.0, self._config.refresh_s_min - since_s)

    async def _refresh(self) -> None:
        try:
            keys = await asyncio.to_thread(self._fetch_keys)
        except Exception as error:  # noqa: BLE001
            # A broken provider may answer anything; we ask again later.
            self._failed(error)
            return
        if self._failures or self._fresh_ns is None:
            self._log.info(
                "the identity provider's keys are here", count=len(keys), issuer=self._config.issuer
            )
        self._failures, self._fresh_ns = 0, self._clock.now_ns()
        self._take(keys)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._log.warning(
            "the identity provider's keys cannot be fetched", error=error, failures=self._failures
        )
        if self._fresh_ns is None:
            return
        if self._keys and self._clock.now_ns() - self._fresh_ns > self._config.stale_s_max * NS_PER_S:
            self._log.error("the identity provider was away for too long; its keys are dropped")
            self._take({})

    def _take(self, keys: Mapping[str, SigningKey]) -> None:
        before, self._keys = self._keys, keys
        if any(kid not in keys or keys[kid].key != key.key for kid, key in before.items()):
            self.on_change()

    def _get(self, url: str) -> bytes:
        return fetch_url(url, self._config.timeout_s, self._config.response_bytes_max, self._clock)

    def _fetch_keys(self) -> dict[str, SigningKey]:
        """In a thread: find out where the keys are, if that is not configured, and get them."""
        config = self._config
        url = config.jwks_url
        if not url:
            about = msgspec.json.decode(
                self._fetch(config.issuer.rstrip("/") + WELL_KNOWN), type=dict[str, Any]
            )
            if about.get("issuer") != config.issuer:
                raise ValueError(f"the provider calls itself {str(about.get('issuer'))[:200]!r}")
            url = str(about.get("jwks_uri") or "")
            if problem := url_problem(url):
                raise ValueError(f"jwks_uri: {problem}")
        return parse_jwks(self._fetch(url), keys_max=config.keys_max)


def _unavailable(wait_s: float) -> IdentityUnavailable:
    return IdentityUnavailable(
        "The identity provider's keys are not available right now, so your token cannot be checked.",
        retry_after_s=wait_s,
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to plain HTTP or into a network that only we can reach."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Refuse."""
        return


def fetch_url(url: str, timeout_s: float, bytes_max: int, clock: Clock) -> bytes:
    """Get a URL's body, within a time and a size.

    Raises:
        OSError: no answer, or not a 200.
        ValueError: the body is too large or too slow.
    """
    deadline_ns = clock.now_ns() + int(timeout_s * NS_PER_S)
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "penstock"})
    try:
        opened = urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()  # It holds the connection.
        raise
    with opened as response:
        if response.status != 200:
            raise ValueError(f"it answered with status {response.status}")
        body = b""
        while piece := response.read1(65_536):
            body += piece
            if len(body) > bytes_max:
                raise ValueError(f"the answer is over the bound of {bytes_max} bytes")
            if clock.now_ns() > deadline_ns:
                raise ValueError(f"the answer took more than {timeout_s:g} s")
    return body


SUBJECT_CHARS = 128
"""Shown of a token's subject."""
TIME_MAX = 2**53
_ERRORS = (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError)


@dataclass(slots=True, frozen=True)
class _Known:
    caller: Caller
    ends_s: float
    """From then on it is not accepted any more, leeway included."""


class TokenVerifier:
    """The verifier of tokens and their owners."""

    def __init__(self, config: JwtConfig, keys: ProviderKeys, tenants: Tenants, *, clock: Clock) -> None:
        self._config = extended(config, JwtTerms)
        self._keys, self._tenants, self._clock = keys, tenants, clock
        self._hash_key = fresh_key()
        self._known: dict[bytes, _Known] = {}

    @property
    def num_remembered(self) -> int:
        """Tokens that need no signature check."""
        return len(self._known)

    def forget(self) -> None:
        """Check every token again: a key was withdrawn."""
        self._known.clear()

    def find(self, token: bytes) -> Caller | None:
        """The caller of this token, or None if it names a key that is not known (yet).

        Raises:
            Unauthenticated: it is not valid, or not now.
            Forbidden: it is valid, but names no tenant that could be served.
        """
        digest = hashlib.blake2b(token, key=self._hash_key, digest_size=16).digest()
        known, now_s = self._known.get(digest), self._clock.wall_ns() / NS_PER_S
        if known is not None:
            if now_s < known.ends_s:
                return known.caller
            del self._known[digest]
            raise _expired()
        return self._verified(token, digest, now_s)

    def _verified(self, token: bytes, digest: bytes, now_s: float) -> Caller | None:
        try:
            header = jwt.get_unverified_header(token)
        except _ERRORS:
            raise _invalid("it cannot be read") from None
        key = self._key_for(header)
        if key is None:
            return None
        claims = self._claims(token, key, str(header["alg"]))
        ends_s = self._check_times(claims, now_s)
        caller = Caller(tenant=self._tenant(claims), key_prefix=_text(claims, "sub")[:SUBJECT_CHARS])
        while len(self._known) >= self._config.tokens_max:
            del self._known[next(iter(self._known))]  # The one that was verified longest ago.
        self._known[digest] = _Known(caller, ends_s)
        return caller

    def _key_for(self, header: dict[str, Any]) -> SigningKey | None:
        """The provider's key that the header names.

        Raises:
            Unauthenticated: the header asks for what is not accepted.
        """
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS:
            raise _invalid("its signature algorithm is not accepted")
        if "crit" in header:
            raise _invalid("it has critical header fields that are not understood")
        keys, kid = self._keys.keys, header.get("kid")
        if kid is None:
            # Without a name only where there is nothing to choose.
            fitting = [key for key in keys.values() if key.verifies(str(algorithm))]
            if keys and len(fitting) != 1:
                raise _invalid("it does not say which key signed it")
            return fitting[0] if fitting else None
        if not isinstance(kid, str):
            raise _invalid("its key id is not text")
        key = keys.get(kid)
        if key is not None and not key.verifies(str(algorithm)):
            raise _invalid("its signature algorithm is not its key's")
        return key

    def _claims(self, token: bytes, key: SigningKey, algorithm: str) -> dict[str, Any]:
        config = self._config
        try:
            return jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=list(config.audience),
                issuer=config.issuer,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,  # These three by our own clock, below.
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidAudienceError:
            raise _invalid("it was made for another service (aud)") from None
        except jwt.InvalidIssuerError:
            raise _invalid("it is of another issuer (iss)") from None
        except jwt.MissingRequiredClaimError as error:
            raise _invalid(f"the claim '{error.claim}' is missing") from None
        except jwt.InvalidSignatureError:
            raise _invalid("its signature is wrong") from None
        except _ERRORS:
            raise _invalid("it cannot be verified") from None

    def _check_times(self, claims: dict[str, Any], now_s: float) -> float:
        """Hold `exp`, `nbf` and `iat` to our clock; returns when it ends."""
        leeway_s, longest_s = self._config.leeway_s, self._config.lifetime_s_max
        exp, nbf, iat = (_seconds(claims, name) for name in ("exp", "nbf", "iat"))
        assert exp is not None, "it is required"
        if now_s >= exp + leeway_s:
            raise _expired()
        if max(nbf or 0.0, iat or 0.0) > now_s + leeway_s:
            raise Unauthenticated("This token is not valid yet.", code="early_token")
        if longest_s and exp > now_s + longest_s + leeway_s:
            raise _invalid("it is valid for too long")
        return exp + leeway_s

    def _tenant(self, claims: dict[str, Any]) -> Tenant:
        config = self._config
        tenant_id = _text(claims, config.tenant_claim)
        if not tenant_id or id_problem(tenant_id):
            raise Forbidden(f"Your token's claim '{config.tenant_claim}' names no tenant.", code="no_tenant")
        if self._tenants.has(tenant_id):
            return self._tenants.tenant(tenant_id)
        tier = (_text(claims, config.tier_claim) if config.tier_claim else "") or config.default_tier
        if tier not in self._tenants.tiers:
            raise Forbidden("Your token names no tier that exists here.", code="no_tier")
        return self._tenants.tenant(tenant_id, tier)


def _text(claims: dict[str, Any], path: str) -> str:
    """The claim of this name; if there is none, what the path leads to. Empty if that is no text."""
    found: Any = claims
    for name in (path,) if path in claims else path.split("."):
        found = cast(dict[str, Any], found).get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""


def _seconds(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None and name != "exp":
        return None
    # NaN, infinity and integers that no float can hold are not in the range either.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= TIME_MAX:
        return float(value)
    raise _invalid(f"the claim '{name}' is no time")


def _invalid(why: str) -> Unauthenticated:
    return Unauthenticated(f"This token is not accepted: {why}.", code="invalid_token")


def _expired() -> Unauthenticated:
    return Unauthenticated("This token has expired.", code="expired_token")
