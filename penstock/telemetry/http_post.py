"""Posting to an address: of a collector of traces, or a receiver of alerts. It blocks, so threads call it."""

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

TIMEOUT_S = 5.0
"""For an answer."""
TRY_AGAIN = frozenset((429, 502, 503, 504))
"""Statuses after which the same may be posted again."""


class Posted(NamedTuple):
    """The result of posting."""

    why: str
    """It was not taken; empty: it was."""
    status: int = 0
    """Of an answer that said no; 0: there was none."""
    is_late: bool = False
    """There was none in time, so it may have been taken."""


class Poster:
    """`post` to it."""

    def __init__(self, url: str, headers: Mapping[str, str], *, authorities: str | None = None) -> None:
        """`authorities`: a file of those that are trusted, for https; None: the machine's.

        Raises:
            OSError: that file cannot be used.
        """
        self._url, self._headers = url, dict(headers)
        tls = ssl.create_default_context(cafile=authorities) if url.startswith("https") else None
        handlers = [urllib.request.HTTPSHandler(context=tls)] if tls is not None else []
        self._opener = urllib.request.build_opener(_NoRedirects, *handlers)

    def post(self, body: bytes) -> Posted:
        """The result of it."""
        request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return Posted("")
        except urllib.error.HTTPError as error:
            error.close()
            return Posted(f"status {error.code}: {error.reason}", status=error.code)
        except (http.client.InvalidURL, ValueError, OverflowError) as error:
            return Posted(f"it is no address ({type(error).__name__})")  # Their text may be its secret.
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            return Posted(f"{type(error).__name__}: {reason}", is_late=isinstance(reason, TimeoutError))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The library would make a GET of what is sent, and call that a success."""

    def redirect_request(self, *_: object, **__: object) -> None:
        """See `urllib.request.HTTPRedirectHandler`."""
