"""The one place where error types become HTTP statuses and OpenAI's error object.

    type                  status  OpenAI's type            retry
    InvalidRequest        400     invalid_request_error    no
    Unauthenticated       401     invalid_request_error    no, WWW-Authenticate
    Forbidden             403     permission_error         no
    NotFound              404     invalid_request_error    no
    MethodNotAllowed      405     invalid_request_error    no, Allow
    ModelBusy             409     invalid_request_error    no
    TooLarge              413     invalid_request_error    no
    CrashingRequest         422     invalid_request_error    no
    HttpFault             its own invalid_request_error    no
    BudgetExhausted       429     insufficient_quota       Retry-After
    Draining, Evicted     503     service_unavailable      Retry-After
    IdentityUnavailable   503     service_unavailable      Retry-After
    WorkerEjected         503     service_unavailable      Retry-After
    Overloaded            429     rate_limit_exceeded      Retry-After
    WorkerUnavailable     503     service_unavailable      Retry-After; NoMemory is one
    StreamBroken          502     api_error                no
    any other             500     api_error                no

429 and 503 are both retried by OpenAI's clients; 429 says "you may come back", 503 "this server is not
well", which is what load balancers eject on. Messages of errors that are not ours never leave the process.
"""

import math

import msgspec

from penstock.errors import (
    BudgetExhausted,
    ClientError,
    CrashingRequest,
    Draining,
    EnsembleFailed,
    Evicted,
    Forbidden,
    IdentityUnavailable,
    InvalidRequest,
    MethodNotAllowed,
    ModelBusy,
    NoMemory,
    NotFound,
    Overloaded,
    PenstockError,
    StreamBroken,
    TooLarge,
    Unauthenticated,
    WorkerEjected,
    WorkerError,
    WorkerUnavailable,
)
from penstock.gateway.http.exchange import Response
from penstock.protocol.openai import ErrorAnswer, ErrorBody
from penstock.telemetry.decision_files import Failure

RETRY_AFTER_S = 1.0
"""A client's wait where no better one is known."""


class HttpFault(ClientError):
    """The request is not acceptable as HTTP, whatever it is about: 400, 408, 415, 417, 431."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


# The first match counts, so a type stands before its parents.
_STATUS: tuple[tuple[type[PenstockError], int, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error"),
    (Unauthenticated, 401, "invalid_request_error"),
    (Forbidden, 403, "permission_error"),
    (NotFound, 404, "invalid_request_error"),
    (MethodNotAllowed, 405, "invalid_request_error"),
    (ModelBusy, 409, "invalid_request_error"),
    (TooLarge, 413, "invalid_request_error"),
    (CrashingRequest, 422, "invalid_request_error"),
    (BudgetExhausted, 429, "insufficient_quota"),
    (Draining, 503, "service_unavailable"),
    (Evicted, 503, "service_unavailable"),
    (IdentityUnavailable, 503, "service_unavailable"),
    (WorkerEjected, 503, "service_unavailable"),
    (Overloaded, 429, "rate_limit_exceeded"),
    (WorkerUnavailable, 503, "service_unavailable"),
    (StreamBroken, 502, "api_error"),
)
_FALLBACK_CODES: tuple[tuple[type[PenstockError], str], ...] = (
    (Unauthenticated, "invalid_api_key"),
    (Forbidden, "permission_denied"),
    (MethodNotAllowed, "method_not_allowed"),
    (TooLarge, "request_too_large"),
    (BudgetExhausted, "insufficient_quota"),
    (Draining, "draining"),
    (Evicted, "evicted"),
    (IdentityUnavailable, "identity_unavailable"),
    (WorkerEjected, "worker_unavailable"),
    (Overloaded, "overloaded"),
    (NoMemory, "no_memory"),
    (WorkerUnavailable, "worker_unavailable"),
    (StreamBroken, "stream_broken"),
    (EnsembleFailed, "ensemble_failed"),
)


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for an unexpected error."""
    if isinstance(error, HttpFault):
        return error.status
    return next((status for kind, status, _ in _STATUS if isinstance(error, kind)), 500)


def error_body(error: Exception) -> bytes:
    """OpenAI's error object as JSON, for a response or for the last event of a stream."""
    return msgspec.json.encode(ErrorAnswer(error_answer(error)))


def error_answer(error: Exception) -> ErrorBody:
    """The error as its client sees it; a bug shows no details."""
    if not isinstance(error, ClientError | Overloaded | WorkerError):
        message = "The server had an error while processing your request. Sorry about that!"
        return ErrorBody(message=message, type="server_error", code="internal_error")
    kind = next((name for type_, _, name in _STATUS if isinstance(error, type_)), "api_error")
    if isinstance(error, HttpFault):
        kind = "invalid_request_error"
    code = error.code if isinstance(error, ClientError) else None
    if code is None:
        code = next((fallback for type_, fallback in _FALLBACK_CODES if isinstance(error, type_)), None)
    param = error.param if isinstance(error, ClientError) else None
    return ErrorBody(message=str(error), type=kind, param=param, code=code)


def failure_of(error: Exception) -> Failure:
    """The same to be kept, without what the client wrote."""
    answer = error_answer(error)
    message = "" if isinstance(error, InvalidRequest) else answer.message or ""
    return Failure(status_of(error), str(answer.code or answer.type), message)


def error_response(error: Exception) -> Response:
    """The whole response to a request that failed before its first byte."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b'Bearer realm="penstock"'))
    elif isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    elif isinstance(error, Overloaded):
        wait_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
    elif isinstance(error, WorkerUnavailable):
        headers.append((b"retry-after", b"%d" % math.ceil(RETRY_AFTER_S)))
    return Response(status=status_of(error), body=error_body(error), headers=tuple(headers))
