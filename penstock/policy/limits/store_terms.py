"""The constants of limits that gateways share, beside the section `shared`.

Tests and simulations pass others.
"""

from msgspec.structs import asdict

from penstock.config.flow import SharedConfig

LEASE_S = 1.0
"""A gateway leases this many seconds' worth of a limit (or, while few gateways share, its part of a quarter
of the burst). While the store is late, all of them together overshoot by at most one lease each."""
TIMEOUT_S = 0.25
"""The store is away when it has not answered for this long."""
RETRY_S = 0.5
"""How often it is asked while it is away."""
GATEWAY_TTL_S = 30.0
"""A gateway that has not asked anything for this long is counted no more."""
ASKS_MAX = 512
"""Questions in one message to the store."""


class SharedTerms(SharedConfig, frozen=True, kw_only=True):
    """The section, and the times by which its store is used."""

    lease_s: float = LEASE_S
    timeout_s: float = TIMEOUT_S
    retry_s: float = RETRY_S
    gateway_ttl_s: float = GATEWAY_TTL_S


def shared_terms(config: SharedConfig) -> SharedTerms:
    """The section with its constants; itself where a caller has set those."""
    if isinstance(config, SharedTerms):
        return config
    return SharedTerms(
        **asdict(config), lease_s=LEASE_S, timeout_s=TIMEOUT_S, retry_s=RETRY_S, gateway_ttl_s=GATEWAY_TTL_S
    )
