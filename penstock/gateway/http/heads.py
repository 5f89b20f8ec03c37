"""Heads of requests: what is wrong with one, and the one that a connection had last.

Clients send the same head again and again, but for the length of the body. A head that was read, found well
formed and let in need not be read again, byte for byte the same: the request is what stands behind it. Kept
are a keyed digest of its bytes and what was made of them, with only the fields that are still read then.
"""

import hashlib
import re
from collections.abc import Callable, Mapping

import msgspec

from penstock.gateway.http.errors import HttpFault
from penstock.gateway.http.exchange import Exchange, RequestHead
from penstock.rng import fresh_key

_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
"""`host [":" port]` of RFC 9112, section 3.2. Repeated Host fields are joined by ", " and so do not match."""


def shape_fault(version: str, url: bytes, headers: Mapping[bytes, bytes]) -> HttpFault | None:
    """A head that the parser lets pass and a proxy in front might read in another way than we."""
    if version not in ("1.1", "1.0"):
        return HttpFault(400, "This server speaks HTTP/1.1.")
    if version == "1.1" and b"host" not in headers:
        return HttpFault(400, "An HTTP/1.1 request needs a Host header.")
    if not _HOST.fullmatch(headers.get(b"host", b"")):
        return HttpFault(400, "A request needs one Host header with one valid name.")
    if not url.startswith(b"/") and url != b"*":
        return HttpFault(400, "The request target must be a path: this server is not a proxy.")
    if coding := headers.get(b"transfer-encoding"):
        if coding.lower() != b"chunked":
            return HttpFault(400, "The only transfer coding that is understood is chunked.")
        if version == "1.0":
            return HttpFault(400, "HTTP/1.0 has no Transfer-Encoding.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        return HttpFault(415, "Compressed bodies are not accepted. Send the body without Content-Encoding.")
    return None


BYTES_MAX = 4096
"""Of a head that is kept."""
MISSES_MAX = 4
"""A client whose heads differ so often in a row (by a trace's id, say) is not remembered any more."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)(?=\r\n)", re.IGNORECASE)
_READ = frozenset({b"accept-encoding", b"origin", b"traceparent", b"tracestate"})
_HINTS = b"x-penstock-"
"""The beginning of the names of the other fields that are read once a request was let in. All else, keys and
cookies of whatever name too, is forgotten."""
_OTHER = (b"transfer-encoding", b"expect", b"upgrade")
"""Requests with these are not as plain as others."""
_DIGITS_MAX = 9
_SECRET_KEY = fresh_key()


def is_kept(name: bytes) -> bool:
    """Whether a field of this name (in lower case) is kept of a head."""
    return name in _READ or name.startswith(_HINTS)


class LastHead:
    """See the module. One for each connection."""

    __slots__ = ("_digest", "_head", "_misses", "_split")

    def __init__(self) -> None:
        self._head: RequestHead | None = None
        self._digest, self._split, self._misses = b"", 0, 0

    def again(self, data: bytes) -> tuple[RequestHead, bytes] | None:
        """The head and the body, if this is one whole request with the same head; else None."""
        head, split = self._head, self._split
        if head is None:
            return None
        behind = data.find(b"\r", split)
        end = data.find(b"\r\n\r\n", behind)
        digits = data[split:behind]
        if (
            end < 0 or not digits.isdigit() or len(digits) > _DIGITS_MAX
            or len(data) != end + 4 + int(digits)
            or _digest(data[:split], data[behind:end]) != self._digest
        ):  # fmt: skip
            self._head, self._misses = None, self._misses + 1
            return None
        self._misses = 0
        return head, data[end + 4 :]

    def learn(self, data: bytes, exchange: Exchange, knows: Callable[[RequestHead], bool]) -> None:
        """Keep the head of a request that came in one piece, if `knows` says that it will be let in again."""
        head, end = exchange.head, len(data) - len(exchange.body)
        if (
            self._misses > MISSES_MAX or not 0 < end <= BYTES_MAX or not exchange.keep_alive
            or head.version != "1.1" or not knows(head) or any(name in head.headers for name in _OTHER)
            or data.find(b"\r\n\r\n") != end - 4
        ):  # fmt: skip
            return
        lengths = list(_LENGTH.finditer(data, 0, end))
        if len(lengths) != 1 or int(lengths[0][1]) != len(exchange.body):
            return
        start, behind = lengths[0].span(1)
        self._head = msgspec.structs.replace(
            head, headers={name: value for name, value in head.headers.items() if is_kept(name)}
        )
        self._digest, self._split = _digest(data[:start], data[behind : end - 4]), start


def _digest(before: bytes, behind: bytes) -> bytes:
    """Of a head, but for the length of its body."""
    return hashlib.blake2b(before + behind, key=_SECRET_KEY, digest_size=16).digest()
