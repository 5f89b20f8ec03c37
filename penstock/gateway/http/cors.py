"""Which pages of other origins may call the API from a browser (the Fetch standard's CORS protocol), and what
they may read.

Only what is under /v1 and its two neighbours outside: never the page, the numbers or /admin. Keys travel in a
header that a page sets itself, so no answer ever allows credentials (cookies), and an origin that is listed
gains no more than any other program.
"""

import re
from collections.abc import Sequence

from penstock.gateway.http.exchange import Headers, RequestHead

MAX_AGE_S = 600
"""Browsers remember the answer to a preflight for so long."""
EXPOSED = (
    b"retry-after, x-request-id, x-penstock-downgrade, x-penstock-migrated, x-penstock-migration, "
    b"x-penstock-model, x-penstock-queue-ms, x-penstock-requested-model, x-penstock-route, "
    b"x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
"""The headers that a page may read beside the body and the few that it always may."""
_OUTSIDE_V1 = frozenset({"/tokenize", "/detokenize"})
_VERB = re.compile(rb"[A-Z]{1,16}")
_FIELDS = re.compile(rb"[A-Za-z0-9_, -]{1,1024}")


class Cors:
    """The origins of `server.cors_origins`."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, head: RequestHead) -> Headers:
        """The headers of the answer to a request, whatever the answer is."""
        if not (head.path.startswith("/v1/") or head.path in _OUTSIDE_V1):
            return ()
        # Without `*` the answer depends on the origin, and a cache between must know it, of refused origins
        # too.
        found = [] if self._any else [(b"vary", b"Origin")]
        origin = head.headers.get(b"origin")
        if origin is None or not (self._any or origin in self._origins):
            return tuple(found)
        found.append((b"access-control-allow-origin", b"*" if self._any else origin))
        asked = head.headers.get(b"access-control-request-method", b"")
        if head.method == "OPTIONS" and _VERB.fullmatch(asked):
            found += [
                (b"access-control-allow-methods", asked),
                (b"access-control-max-age", b"%d" % MAX_AGE_S),
            ]
            fields = head.headers.get(b"access-control-request-headers", b"")
            if _FIELDS.fullmatch(fields):
                # A program outside of a browser may send any such header too. `*` would leave out
                # Authorization.
                found.append((b"access-control-allow-headers", fields))
        else:
            found.append((b"access-control-expose-headers", EXPOSED))
        return tuple(found)
