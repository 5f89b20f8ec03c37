"""Tokens of an OpenID Connect provider: who a signed JSON Web Token says is calling (RFC 7519, RFC 8725).

PyJWT checks the signature, issuer and audience. What may be chosen is chosen here and not by the token: the
algorithm must be on the list and fit the key (so `none`, and HMAC with a public key, have no way in), the key
comes from the provider's set and never from the token's header, and times are judged by our clock.

A token that was verified is remembered under a keyed hash until it ends, so its signature is checked once.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, cast

import jwt

from penstock.clock import NS_PER_S, Clock
from penstock.config.branch import extended
from penstock.config.tenancy import JwtConfig, id_problem
from penstock.errors import Forbidden, Unauthenticated
from penstock.gateway.identity.auth import Caller
from penstock.gateway.identity.jwks import ProviderKeys, SigningKey
from penstock.gateway.identity.jwt_terms import ALGORITHMS, JwtTerms
from penstock.gateway.identity.tiers import Tenants
from penstock.policy.tenant import Tenant
from penstock.rng import fresh_key

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
    """Who tokens belong to."""

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
