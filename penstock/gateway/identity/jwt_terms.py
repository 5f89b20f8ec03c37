"""The constants behind the section `auth.jwt`: which signatures are accepted, and how the provider's keys are
followed.
"""

from penstock.config.tenancy import JwtConfig

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
    """Requests that wait for a fetch at once; one more is told to come back."""
    response_bytes_max: int = 256 * 1024
    """Of the provider's answers."""
    keys_max: int = 64
    """Keys that are taken from the provider."""
    tokens_max: int = 10_000
    """Tokens whose verification is remembered, so that one costs its signature only once."""
