"""Who is calling: what a handler is told of it, and where in a request it stands."""

from dataclasses import dataclass

from penstock.errors import Unauthenticated
from penstock.gateway.http.exchange import RequestHead
from penstock.policy.tenant import ANONYMOUS, Tenant


@dataclass(slots=True, frozen=True, kw_only=True)
class Caller:
    """An authenticated caller.

    Everything about it comes from its key or token, nothing from other headers.
    """

    tenant: Tenant
    key_prefix: str = ""
    """The shown part of its API key, or the subject of its token."""
    admin: bool = False
    """It may look at the fleet and change it (`/admin`)."""
    scrape: bool = False
    """It may read the numbers of all tenants (`/metrics`, `/status.json`), and with a key that is all it may
    do."""

    @property
    def sees_all(self) -> bool:
        """Whether the numbers of all tenants are for its eyes."""
        return self.admin or self.scrape

    @property
    def cache_salt(self) -> bytes:
        """Keeps its tenant's prefix cache apart from everybody else's."""
        return self.tenant.cache_salt

    @property
    def fairness_key(self) -> str:
        """Names its tenant to the engines."""
        return self.tenant.fairness_key


ANONYMOUS_CALLER = Caller(tenant=ANONYMOUS)
"""The caller where authentication is off, or does not matter."""
OPERATOR = Caller(tenant=ANONYMOUS, key_prefix="admin", admin=True)
"""The holder of a key that is for `/admin` alone."""
SCRAPER = Caller(tenant=ANONYMOUS, key_prefix="scrape", scrape=True)
"""The holder of a key that is for `/metrics` and `/status.json` alone, or a caller that needs none for
them."""


def credential(head: RequestHead) -> bytes:
    """The key or token of an `Authorization: Bearer` header.

    Raises:
        Unauthenticated: there is none.
    """
    scheme, _, found = head.headers.get(b"authorization", b"").partition(b" ")
    found = found.strip()
    if scheme.lower() != b"bearer" or not found:
        raise Unauthenticated(
            "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer "
            "YOUR_KEY'."
        )
    return found
