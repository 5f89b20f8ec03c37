"""Bounds on what gateways, and strangers, may do to a worker's socket."""

from dataclasses import dataclass, field

STATS_INTERVAL_S = 0.5
"""`Stats` go out this often while they change, and not at all while nothing does."""
PROOF_TIMEOUT_S = 5.0
"""Where a key is wanted, a connection without a proof is cut after this long,"""
PROOF_BYTES_MAX = 1024
"""or after so many bytes,"""
UNPROVEN_MAX = 64
"""and of more than so many at once the oldest one of the address with the most is cut: newcomers may be
gateways."""
UNPROVEN_PER_ADDRESS_MAX = 16
"""The same for one address, so that a stranger's connections cost no one else theirs."""
FLUSH_TIMEOUT_S = 2.0
"""How long the last frames may take to leave when the worker exits."""


@dataclass(slots=True, frozen=True)
class ServerLimits:
    """Bounds on what gateways may leave here."""

    buffer_bytes_max: int
    """Unsent bytes for one connection; over it the connection is dropped."""
    requests_max: int
    """Living requests over all connections; one more is refused as overloaded."""
    key: bytes = field(default=b"", repr=False)
    """What gateways must prove to have before they hear or say anything else; empty: nothing."""
