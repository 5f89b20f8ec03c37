"""How workers that are reached over HTTP are waited for and trusted: the section `backends`. docs/backends.md
has the story.
"""

from typing import Annotated

from msgspec import Meta

from penstock.config.branch import Branch

Timeout = Annotated[float, Meta(gt=0, le=86_400)]


class BackendsConfig(Branch, frozen=True, kw_only=True):
    """Workers that run another engine, and providers."""

    first_byte_timeout_s: Timeout = 120.0
    """From the request to the answer's head. Most engines send it at once, some only with the first token."""
    idle_timeout_s: Timeout = 60.0
    """Between two events of a stream (or its head and the first): a worker that is silent for longer
    hangs."""
    ca_file: str = ""
    """Certificates (PEM) of authorities to trust for https beside the system's own."""
