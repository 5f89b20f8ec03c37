"""HTTP for the hub: only HTTP is fetched, keys go to the host that they are for, and trouble has a type."""

import contextlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from penstock.weight_cache.source import SourceError, SourceUnreachable

TIMEOUT_S = 30.0
"""Without a byte."""
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The hub sends to where the bytes lie: without the key, and never to a file or from HTTPS to HTTP."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: ANN401
        old, new = urlsplit(str(req.full_url)), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme != "https"):
            raise urllib.error.URLError(f"it redirects to {newurl[:128]}")
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None and old.netloc != new.netloc:
            found.remove_header("Authorization")
        return found


@contextlib.contextmanager
def get(url: str, headers: dict[str, str]) -> Generator[http.client.HTTPResponse]:
    """The answer to a GET.

    Raises:
        SourceError: the server says no.
        SourceUnreachable: no server answers, or the server asks to come back.
    """
    request = urllib.request.Request(url, headers=headers)
    try:
        response: http.client.HTTPResponse = urllib.request.build_opener(_Redirects).open(
            request, timeout=TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _LATER:
                raise SourceUnreachable(
                    f"HTTP {error.code} {error.reason}",
                    retry_after_s=_seconds(error.headers.get("Retry-After")),
                ) from error
            raise SourceError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SourceUnreachable(f"{urlsplit(url).netloc}: {reason}") from error
    with response:
        yield response


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0
