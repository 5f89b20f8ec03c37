"""From what a worker answers, instead of text, to the error that says whose fault it is and what may be
tried.

    status            error                     why
    400, 422          InvalidRequest            the request itself; no other worker would take it, and none is
                                                to blame
    413               TooLarge                  the same
    429               Overloaded                it has no room: retry, after Retry-After
    503 + Retry-After Overloaded                the same
    3xx               WorkerUnavailable         redirects are never followed: the prompt must not go elsewhere
    401, 403, 404     WorkerUnavailable         our key, our address or our name for the model is wrong: the
                                                operator's
    any other         WorkerUnavailable         another worker may do better

Once output has come every error but the request's own is a `StreamBroken`: the stream may migrate.
"""

from collections.abc import Mapping

import msgspec

from penstock.backends.http.dialects.base import SaidError
from penstock.errors import (
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    PenstockError,
    StreamBroken,
    TooLarge,
    WorkerUnavailable,
)
from penstock.protocol.openai import ErrorBody, ErrorEvent, decode_error

SHOWN_CHARS = 300
"""Shown of what a worker says."""
RETRY_AFTER_MAX_S = 3600.0
_CLIENT = frozenset({400, 422})
_OPERATOR = {
    401: "the worker does not accept the key that it is given",
    403: "the worker does not let this key use the model",
    404: "the worker does not know the path or the model",
}
_OVERLOADED = frozenset(
    {"overloaded", "rate_limit_exceeded", "rate_limit_error", "RateLimitError", "TooManyRequests"}
)
_INVALID = frozenset(
    {"validation", "BadRequestError", "invalid_request_error", "template_error", "tool_error", "BadRequest"}
)
_TOO_LONG = (
    "maximum context length",
    "context length",
    "longer than",
    "max_total_tokens",
    "max_input_tokens",
)


def said_by(event: ErrorEvent) -> SaidError | None:
    """The error in an event, if there is one."""
    error = event.error
    if isinstance(error, ErrorBody):
        return SaidError(
            message=error.message or "", kind=error.type or "", status=_status(error.code), param=error.param
        )
    if error is not None:
        return SaidError(message=error, kind=event.error_type or "")
    if event.object == "error":
        return SaidError(message=event.message or "", status=_status(event.code))
    return None


def said_in(body: bytes) -> SaidError:
    """What an error answer's body says; of pages that are not JSON nothing is shown."""
    try:
        found = decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SaidError(message="")
    said = said_by(found)
    if said is not None:
        return said
    detail = bytes(found.detail).decode(errors="replace") if found.detail is not None else ""
    return SaidError(message=found.message or detail)


def error_of(said: SaidError, *, headers: Mapping[bytes, bytes], has_output: bool) -> PenstockError:
    """The error for what a worker said, by its status if it has one."""
    status, shown = said.status, shown_of(said.message)
    if status in _CLIENT or (status is None and said.kind in _INVALID):
        kind = ContextTooLong if any(words in said.message for words in _TOO_LONG) else InvalidRequest
        return kind(
            f"The model's worker refused the request: {shown or 'it gave no reason'}", param=said.param
        )
    if status == 413:
        return TooLarge("The request is larger than the model's worker takes.")
    if has_output:
        return StreamBroken(f"the worker broke off: {shown or status}")
    wait_s = retry_after_s(headers.get(b"retry-after", b""))
    if (
        status == 429
        or (status == 503 and wait_s is not None)
        or (status is None and said.kind in _OVERLOADED)
    ):
        return Overloaded(f"The model's worker has no room: {shown or status}", retry_after_s=wait_s)
    if status is not None and 300 <= status < 400:
        return WorkerUnavailable(f"the worker answered with a redirect ({status}), which is not followed")
    if status in _OPERATOR:
        return WorkerUnavailable(f"{_OPERATOR[status]} ({status}){': ' if shown else ''}{shown}")
    return WorkerUnavailable(
        f"the worker failed the request ({status or said.kind or 'an error'}): {shown or 'no reason given'}"
    )


def retry_after_s(value: bytes) -> float | None:
    """Seconds of a `Retry-After` header; dates are not read (RFC 9110, section 10.2.3)."""
    text = value.strip()
    if not text or len(text) > 12:
        return None
    try:
        wait_s = float(text)
    except ValueError:
        return None
    return min(wait_s, RETRY_AFTER_MAX_S) if wait_s >= 0 else None


def shown_of(message: str) -> str:
    """A message of another server, made fit to show: one short line."""
    line = " ".join(
        "".join(char if char.isprintable() else " " for char in message[: 4 * SHOWN_CHARS]).split()
    )
    return line if len(line) <= SHOWN_CHARS else line[:SHOWN_CHARS] + "..."


def _status(code: str | int | None) -> int | None:
    if isinstance(code, int):
        return code if 100 <= code <= 599 else None
    return int(code) if code is not None and len(code) == 3 and code.isdigit() else None
