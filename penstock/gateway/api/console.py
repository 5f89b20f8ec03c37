"""The console: a page for people at `/console`, and its feed.

The page's sources are in `console/` at the top of the repository; what is built of them is in `static/`
(docs/design/020-the-console.md). It takes no part from elsewhere and runs no script that is not a file of
this server, so whatever a worker or a client calls itself stays text.
"""

import asyncio
import gzip
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import NotFound
from penstock.gateway.api.admin import Admin
from penstock.gateway.api.feed import Feed
from penstock.gateway.api.inspect import Inspect
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import EVENTS, Exchange, Response
from penstock.gateway.identity.tenants import Caller

STATIC = Path(__file__).parent / "static"
PATH = "/console/"
_TYPES: Mapping[str, bytes] = {
    "index.html": b"text/html; charset=utf-8",
    "app.js": b"text/javascript; charset=utf-8",
    "app.css": b"text/css; charset=utf-8",
    "icon.svg": b"image/svg+xml",
    "runbook.md": b"text/markdown; charset=utf-8",
}
"""`runbook.md` is a link to docs/runbook.md, to which the alerts on the page lead."""
_CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
PAGE_HEADERS = (
    (b"content-security-policy", _CONTENT_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"vary", b"accept-encoding"),
)
# The page names its files with their hashes (`app.js?v=...`), so a browser may keep those for good.
_FOR_GOOD = (b"cache-control", b"public, max-age=31536000, immutable")
_ASK_AGAIN = (b"cache-control", b"no-cache")


class Console:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services, inspect: Inspect, admin: Admin) -> None:
        self._services = services
        self.watchers = Feed(
            admin.look,
            lambda caller: inspect.own_status(caller.tenant),
            services.all_requests,
            services.config.admission,
            clock=services.clock,
            log=services.log,
        )
        self._files = {name: (STATIC / name).read_bytes() for name in _TYPES}
        self._packed: dict[str, bytes] = {}

    async def landing(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /`: leads to the console."""
        exchange.respond(Response(status=302, body=b"", headers=((b"location", b"/console"), _ASK_AGAIN)))

    async def page(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /console`: a page for people: the fleet, its traffic and requests, a playground."""
        await self._send(exchange, "index.html")

    async def file(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /console/{name}`: the page's script, style and icon, and the runbook.

        Raises:
            NotFound: it has no such file.
        """
        name = exchange.path.removeprefix(PATH)
        if name not in self._files:
            raise NotFound("The console has no such file.", code="unknown_file")
        await self._send(exchange, name)

    async def feed(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /console/feed`: what changed in the last second, as server-sent events: the fleet and the
        requests that ended for admins, the fleet for scrapers, for a tenant its own.
        """
        if exchange.method == "HEAD":
            exchange.respond(Response(body=b"", content_type=EVENTS))
            return
        is_open = self._services.config.auth.disabled  # Then its callers are admins: see `Entrance`.
        self.watchers.watch(exchange, caller, sees_requests=caller.admin or is_open)

    def close(self) -> None:
        """The server is leaving: end every stream."""
        self.watchers.close()

    async def _send(self, exchange: Exchange, name: str) -> None:
        body, headers = self._files[name], PAGE_HEADERS
        if b"gzip" in exchange.head.headers.get(b"accept-encoding", b""):
            if name not in self._packed:
                self._packed[name] = await asyncio.to_thread(gzip.compress, body, mtime=0)
            body, headers = self._packed[name], (*headers, (b"content-encoding", b"gzip"))
        kept = _ASK_AGAIN if name in ("index.html", "runbook.md") else _FOR_GOOD
        exchange.respond(Response(body=body, content_type=_TYPES[name], headers=(*headers, kept)))
