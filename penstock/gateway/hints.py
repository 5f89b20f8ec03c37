"""What a client says in headers about how its request may be treated.

x-penstock-degrade: never | allow | prefer      whether a smaller model may answer
x-penstock-max-wait-ms: 2000                    the longest that it waits for its first token
x-penstock-session: 7f3a                        the conversation it belongs to, whose worker it goes to among equals
"""

from collections.abc import Mapping
from typing import get_args

import msgspec

from penstock.clock import NS_PER_MS
from penstock.config.routing import AdmissionConfig
from penstock.errors import InvalidRequest
from penstock.policy.tenant import Degrade

_DEGRADE: Mapping[bytes, Degrade] = {word.encode(): word for word in get_args(Degrade)}
_DIGITS_MAX = 12
SESSION_BYTES_MAX = 256


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """The headers' words; without them the tenant's defaults count."""

    degrade: Degrade | None = None
    max_wait_ns: int = 0
    """0: it does not say."""
    session: str = ""


NO_HINTS = Hints()


def read_hints(headers: Mapping[bytes, bytes], config: AdmissionConfig) -> Hints:
    """Read the headers (names in lower case).

    Raises:
        InvalidRequest: one of them says what it cannot say.
    """
    degrade, max_wait = headers.get(b"x-penstock-degrade"), headers.get(b"x-penstock-max-wait-ms")
    session = headers.get(b"x-penstock-session")
    if degrade is None and max_wait is None and session is None:
        return NO_HINTS
    return Hints(
        degrade=None if degrade is None else _degrade(degrade),
        session="" if session is None else _session(session),
        max_wait_ns=0 if max_wait is None else _max_wait_ns(max_wait, config.max_wait_ms_max),
    )


def _degrade(value: bytes) -> Degrade:
    found = _DEGRADE.get(value.strip().lower())
    if found is None:
        raise _wrong("x-penstock-degrade", "one of never, allow, prefer", value)
    return found


def _session(value: bytes) -> str:
    name = value.strip()
    if not 0 < len(name) <= SESSION_BYTES_MAX:
        raise _wrong("x-penstock-session", f"1 to {SESSION_BYTES_MAX} characters", value)
    return name.decode("latin-1")


def _max_wait_ns(value: bytes, most_ms: int) -> int:
    digits = value.strip()
    if not digits.isdigit() or len(digits) > _DIGITS_MAX or not 0 < int(digits) <= most_ms:
        raise _wrong("x-penstock-max-wait-ms", f"a whole number from 1 to {most_ms}", value)
    return int(digits) * NS_PER_MS


def _wrong(header: str, expected: str, value: bytes) -> InvalidRequest:
    shown = value[:32].decode("latin-1")
    return InvalidRequest(
        f"Invalid header '{header}': expected {expected}, but got {shown!r}.",
        param=header,
        code="invalid_value",
    )
