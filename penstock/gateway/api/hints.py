"""What a client says about how its request may be treated: in headers, and the session also by the body's
`prompt_cache_key` or `user`.

x-penstock-degrade: never | allow | prefer      whether a smaller model may answer
x-penstock-max-wait-ms: 2000                    the longest that it waits for its first token
x-penstock-session: 7f3a                        the conversation it belongs to, whose worker it goes to among
                                                equals
"""

from collections.abc import Mapping
from typing import get_args

import msgspec

from penstock.clock import NS_PER_MS
from penstock.errors import InvalidRequest
from penstock.policy.tenant import Degrade

_DEGRADE: Mapping[bytes, Degrade] = {word.encode(): word for word in get_args(Degrade)}
_DIGITS_MAX = 12
SESSION_BYTES_MAX = 256
"""Of `x-penstock-session`; of a longer `user`, that many characters name the session."""
MAX_WAIT_MS_MAX = 600_000


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """The client's words; without them the tenant's defaults count."""

    degrade: Degrade | None = None
    max_wait_ns: int = 0
    """0: it does not say."""
    session: str = ""
    """The conversation: the header's, else `user`; empty: neither."""


NO_HINTS = Hints()


def read_hints(headers: Mapping[bytes, bytes], user: object) -> Hints:
    """Read the headers (names in lower case) beside the body's `user`, which may be anything.

    Raises:
        InvalidRequest: one of them says what it cannot say.
    """
    degrade, max_wait = headers.get(b"x-penstock-degrade"), headers.get(b"x-penstock-max-wait-ms")
    session = headers.get(b"x-penstock-session")
    named = user[:SESSION_BYTES_MAX] if isinstance(user, str) else ""
    if degrade is None and max_wait is None and session is None and not named:
        return NO_HINTS
    return Hints(
        degrade=None if degrade is None else _degrade(degrade),
        session=named if session is None else _session(session, SESSION_BYTES_MAX),
        max_wait_ns=0 if max_wait is None else _max_wait_ns(max_wait, MAX_WAIT_MS_MAX),
    )


def _degrade(value: bytes) -> Degrade:
    found = _DEGRADE.get(value.strip().lower())
    if found is None:
        raise _wrong("x-penstock-degrade", "one of never, allow, prefer", value)
    return found


def _session(value: bytes, len_max: int) -> str:
    name = value.strip()
    if not 0 < len(name) <= len_max:
        raise _wrong("x-penstock-session", f"1 to {len_max} characters", value)
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
