"""How workers that are not ours are talked to: the section `backends`. docs/backends.md has the story."""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch, Count, Positive, Seconds

Timeout = Annotated[float, Meta(gt=0, le=86_400)]


class HttpConfig(Branch, frozen=True, kw_only=True):
    """HTTP to one worker: bounds on waits, sizes and connections. They hold for each worker."""

    connect_timeout_s: Timeout = 5.0
    """TCP and TLS together."""
    first_byte_timeout_s: Timeout = 120.0
    """From the request to the answer's head. Most engines send it at once, some only with the first token."""
    idle_timeout_s: Timeout = 60.0
    """Between two events of a stream (or its head and the first): a worker that is silent for longer hangs."""
    request_timeout_s: Timeout = 3600.0
    """One answer in all."""
    connections_max: Positive = 1024
    """Open at once, which is streams at once."""
    idle_connections_max: Count = 64
    keepalive_s: Seconds = 20.0
    """A connection that was idle for longer is not used again."""
    event_bytes_max: Positive = 1024 * 1024
    """One event of a stream."""
    response_bytes_max: Positive = 64 * 1024 * 1024
    """One whole answer."""
    error_bytes_max: Positive = 64 * 1024
    """An answer that is an error, of which little is shown."""
    ca_file: str = ""
    """Certificates (PEM) of authorities to trust for https beside the system's own."""


class BackendsConfig(Branch, frozen=True, kw_only=True):
    """Workers that are not ours: how they are asked for answers, for their health and for their load."""

    http: HttpConfig = HttpConfig()
    probe_s: Timeout = 2.0
    """A worker's health and metrics are read this often, give or take a tenth."""
    probe_timeout_s: Timeout = 5.0
    """One look may take so long; after that the worker counts as not ready."""
    stale_s: Timeout = 10.0
    """A load that was read longer ago is not believed any more: only what this gateway started there counts then."""
    metrics_bytes_max: Positive = 8 * 1024 * 1024
    """One page of metrics."""
