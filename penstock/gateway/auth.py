"""Who is calling. Keys are hashed at start, so that no later memory dump or log line can show one."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import Unauthenticated
from penstock.gateway.exchange import RequestHead

SALT_BYTES = 16


@dataclass(slots=True, frozen=True, kw_only=True)
class Caller:
    """An authenticated caller. Its salt keeps its prefix cache apart from everybody else's."""

    cache_salt: bytes
    fairness_key: str


ANYBODY = Caller(cache_salt=b"", fairness_key="")
"""The caller where authentication is off."""


class KeyRing:
    """The keys that are accepted; empty accepts everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._callers = {_digest(key.encode()): _caller(key) for key in keys}

    def check(self, head: RequestHead) -> Caller:
        """The caller behind an `Authorization: Bearer` header.

        Raises:
            Unauthenticated: there is none, or its key is not one of ours.
        """
        if not self._callers:
            return ANYBODY
        scheme, _, key = head.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthenticated(
                "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
            )
        digest, found = _digest(key.strip()), None
        # Every key is compared in full, so that the time taken tells nothing about any of them.
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthenticated("Incorrect API key provided.")
        return found


def is_local(client: str, head: RequestHead) -> bool:
    """Whether the caller is on this machine. Behind a proxy everybody seems to be, so a proxy's header says no."""
    if b"x-forwarded-for" in head.headers or b"forwarded" in head.headers:
        return False
    try:
        return ipaddress.ip_address(client).is_loopback
    except ValueError:
        return client == "local"  # A Unix socket.


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, person=b"penstock-key").digest()


def _caller(key: str) -> Caller:
    salt = hashlib.blake2b(key.encode(), digest_size=SALT_BYTES, person=b"penstock-salt").digest()
    return Caller(cache_salt=salt, fairness_key=salt.hex()[:8])
