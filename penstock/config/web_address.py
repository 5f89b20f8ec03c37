"""Addresses to which something is posted: of a collector of traces, or a receiver of alerts."""

import re
from urllib.parse import urlsplit

_FORM = re.compile(r"https?://[^\s/?#@]+(/[!-~]*)?")
"""No user and password: they belong into a header. A host or path with other letters is written as browsers
send it (xn--, %C3%A4)."""


def is_address(url: str) -> bool:
    """Whether something can be posted there."""
    if not (url.isascii() and _FORM.fullmatch(url) and "#" not in url):
        return False
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # As sockets do: a part of a name has 1 to 63 letters.
    except ValueError:  # Also a port that is none, and brackets around what is no address.
        return False
    return bool(host) and port != 0
