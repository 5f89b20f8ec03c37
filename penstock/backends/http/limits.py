"""Bounds on waits, sizes and connections for workers that are reached over HTTP: what the section `backends`
says, and constants.
"""

from dataclasses import dataclass

from penstock.config.fleet import BackendsConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class HttpLimits:
    """HTTP to one server. They hold for each."""

    connect_timeout_s: float = 5.0
    """TCP and TLS together."""
    first_byte_timeout_s: float = 120.0
    """From the request to the answer's head."""
    idle_timeout_s: float = 60.0
    """Between two events of a stream, or its head and the first."""
    request_timeout_s: float = 3600.0
    """One answer in all."""
    connections_max: int = 1024
    """Open at once, which is streams at once."""
    idle_connections_max: int = 64
    keepalive_s: float = 20.0
    """A connection that was idle for longer is not used again."""
    event_bytes_max: int = 1024 * 1024
    """One event of a stream."""
    response_bytes_max: int = 64 * 1024 * 1024
    """One whole answer."""
    error_bytes_max: int = 64 * 1024
    """An answer that is an error, of which little is shown."""
    ca_file: str = ""
    """Certificates (PEM) of authorities to trust beside the system's own."""

    @classmethod
    def of(cls, config: BackendsConfig) -> "HttpLimits":
        """As configured."""
        return cls(
            first_byte_timeout_s=config.first_byte_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            ca_file=config.ca_file,
        )


HTTP_LIMITS = HttpLimits()


@dataclass(slots=True, frozen=True, kw_only=True)
class HttpBackendLimits:
    """How one worker is asked for answers, for its health and for its load."""

    http: HttpLimits = HTTP_LIMITS
    probe_s: float = 2.0
    """Its health and metrics are read this often, give or take a tenth."""
    probe_timeout_s: float = 5.0
    """One look may take so long; after that the worker counts as not ready."""
    stale_s: float = 10.0
    """A load that was read longer ago is not believed any more: only what this gateway started there counts
    then."""
    metrics_bytes_max: int = 8 * 1024 * 1024
    """One page of metrics."""
