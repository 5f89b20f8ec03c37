"""Who may go where: the caller behind a request, by the route's access, its key and where it comes from.

    OPEN    everybody
    KEY     a tenant's key or token
    LOOK    the key of an admin or a scraper; of a tenant, which sees its own numbers; without a key a local
            caller, if `server.trust_local` says so
    ADMIN   an admin's key

Where authentication is off, everything is open to callers on this machine. A browser is on this machine too,
and opens pages of strangers: so wherever no key proves that a request is wanted, its Host must be a name of
this server (or a stranger's name that was pointed here, "DNS rebinding", would pass), and a page of another
origin is refused (Fetch standard: `Origin`, `Sec-Fetch-Site`). A request that shows a key needs no such
check: no browser adds keys by itself.
"""

import enum
from collections.abc import Mapping

from penstock.config.machine import is_loopback
from penstock.config.tree import ServerConfig
from penstock.errors import Forbidden
from penstock.gateway.http.exchange import RequestHead
from penstock.gateway.identity.auth import ANONYMOUS_CALLER, OPERATOR, SCRAPER, Caller
from penstock.gateway.identity.tenancy import Tenancy

WILDCARDS = ("0.0.0.0", "::", "")
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
"""What a proxy says of itself. One that says nothing cannot be told from a caller on this machine."""


class Access(enum.Enum):
    """Who may call a route."""

    OPEN = enum.auto()
    KEY = enum.auto()
    LOOK = enum.auto()
    ADMIN = enum.auto()


class Entrance:
    """The checks before a handler."""

    def __init__(self, tenancy: Tenancy, config: ServerConfig) -> None:
        self._tenancy, self._trusts_local = tenancy, config.trust_local
        listening = () if config.host in WILDCARDS else (config.host,)
        self._names = frozenset(name.lower().strip("[]") for name in (*listening, *config.hosts))
        self._origins = frozenset(name.lower() for name in config.hosts)
        self._cors_origins = frozenset(config.cors_origins)

    def caller(self, access: Access, head: RequestHead, client: str) -> Caller | None:
        """The caller of a request, or None if only `Tenancy.identify_later` can say; `client` is the socket's
        other end.

        Raises:
            Unauthenticated: no key, or not one that is accepted.
            Forbidden: this caller may not go there.
        """
        if access is Access.OPEN:
            return ANONYMOUS_CALLER
        if self._tenancy.is_open:
            self._check_same_origin(head, self._cors_origins if access is Access.KEY else frozenset())
            if access is Access.KEY:
                return ANONYMOUS_CALLER
            _check_local(head, client)
            return OPERATOR if access is Access.ADMIN else SCRAPER
        if access is Access.KEY:
            return self._tenancy.identify(head)
        if access is Access.ADMIN:
            return self._tenancy.identify_admin(head)
        if self._trusts_local and b"authorization" not in head.headers and is_local(client, head.headers):
            self._check_same_origin(head, frozenset())
            return SCRAPER
        return self._tenancy.identify_viewer(head)

    def _check_same_origin(self, head: RequestHead, invited: frozenset[str]) -> None:
        """No key shows that the sender means it, so nothing in the request may say that another site does.

        `invited`: origins that may all the same (`server.cors_origins`, for the API).

        Raises:
            Forbidden: the request is for another host, or from a page of another origin.
        """
        headers = head.headers
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and not self._is_ours(host):  # Only HTTP/1.0 may leave it out, which no browser speaks.
            raise Forbidden(
                f"This server is not called {host[:128]!r}: without a key it answers to loopback names, its "
                f"own address "
                "and the names of server.hosts.",
                code="foreign_host",
            )
        origin = headers.get(b"origin")
        if invited and origin is not None and ("*" in invited or origin.decode("latin-1") in invited):
            return
        is_foreign = headers.get(b"sec-fetch-site", b"").lower() == b"cross-site"
        if origin is not None:
            authority = origin.decode("latin-1").lower().partition("://")[2]
            ours = authority == host or _name_of(authority) in self._origins
            is_foreign = not authority or not ours
        if is_foreign:
            raise Forbidden(
                "This request comes from a page of another site. Without a key only this server's own pages "
                "may send requests; server.hosts adds names.",
                code="foreign_origin",
            )

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        return name in self._names or is_loopback(name)


def is_local(client: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the socket's other end is on this machine, and does not say that it speaks for another."""
    if any(name in headers for name in _FORWARDED):
        return False
    return client == "local" or is_loopback(client)  # "local": a Unix socket.


def _check_local(head: RequestHead, client: str) -> None:
    if not is_local(client, head.headers):
        raise Forbidden(
            "Without authentication this is for callers on this machine; a request that a proxy passes on is "
            "none. Set auth.keys or auth.keys_file, and auth.admin_keys.",
            code="not_local",
        )


def _name_of(authority: str) -> str:
    """The host of `host[:port]`, without the brackets of an IPv6 address."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
