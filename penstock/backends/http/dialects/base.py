"""The differences between engines: how a request is written down, and what an event of the answer says.

A dialect translates and decides nothing; streams (backends/http/stream.py), errors (below), health
and load (backends/http/backend.py) are the same for all.

From what a worker answers, instead of text, to the error that says whose fault it is and what may be
tried.

    status            error                     why
    400, 422          InvalidRequest            the request itself; no other worker would take it, and none is
                                                to blame
    413               TooLarge                  the same
    429               WorkerBusy                it has no room: retry, after Retry-After
    503 + Retry-After WorkerBusy                the same
    3xx               WorkerUnavailable         redirects are never followed: the prompt must not go elsewhere
    401, 403          KeyRejected               our key is wrong: the operator's
    404               WorkerUnavailable         our address or our name for the model is wrong: the operator's
    any other         WorkerUnavailable         another worker may do better

Once output has come every error but the request's own is a `StreamBroken`: the stream may migrate.
"""

import re
from collections.abc import Callable, Mapping
from email.utils import mktime_tz, parsedate_tz
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from penstock.backends.base import GenerateRequest, TextLogprob, ToolCallPiece
from penstock.errors import (
    ContextTooLong,
    InvalidRequest,
    KeyRejected,
    PenstockError,
    StreamBroken,
    TooLarge,
    Unsupported,
    WorkerBusy,
    WorkerUnavailable,
)
from penstock.protocol.needs import Constraint
from penstock.protocol.openai import ErrorBody
from penstock.protocol.server_answers import ErrorEvent, decode_error
from penstock.types import Capability, FinishReason, TokenLogprob

_SEED_MAX, _SEED_STRIDE = 2**63 - 1, 0x9E3779B97F4A7C15


class HttpSubmission(msgspec.Struct, frozen=True):
    """A request on the wire."""

    path: str
    body: bytes


class ReportedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the worker gives them; None: it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class SaidError(msgspec.Struct, frozen=True, kw_only=True):
    """An error that a worker tells, in an answer or in an event."""

    message: str = ""
    kind: str = ""
    """Its own word for it."""
    status: int | None = None
    param: str | None = None


class Piece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The content of one event or of several that say nothing but tokens; as ids or text, never both."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    parts: tuple[str, ...] = ()
    """`text` by events, where it is that of several."""
    thought: str = ""
    """Reasoning, of a server that tells it apart."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of `token_ids`."""
    text_logprobs: tuple[TextLogprob, ...] = ()
    """Of tokens that have no ids here; one for each token, which makes them a count."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallPiece, ...] = ()
    finish: FinishReason | None = None
    ends: bool = False
    """The answer ends here, and why is not said: it is as long as it may be, or it stopped."""
    stop: str | int | None = None
    usage: ReportedUsage | None = None
    model: str = ""
    """The worker's name for the model; empty: this event does not say."""
    error: SaidError | None = None
    done: bool = False
    """Nothing more that matters will come."""


NOTHING = Piece()
_JOINED_MAX = 256
"""Events' texts, or ids, to which no more are joined: each time all of them are copied."""


def joined(first: Piece, second: Piece) -> Piece | None:
    """Two pieces that follow each other as one; None: one of them says more than tokens, usage and how the
    answer ended, or text follows ids.
    """
    for each in (first, second):
        if each.thought or each.tool_calls or each.logprobs or each.text_logprobs or each.prompt_logprobs:
            return None
        if each.error is not None or each.ends:
            return None
    if first.done:
        return None
    if second.text or second.token_ids:
        if first.finish is not None or (first.token_ids if second.text else first.text):
            return None
        if len(first.parts or first.token_ids) >= _JOINED_MAX:
            return None
    elif second.finish is not None and first.finish is not None:
        return None
    parts = first.parts
    if second.text:
        parts = (*(parts or (first.text,)), *(second.parts or (second.text,))) if first.text else second.parts
    return Piece(
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        parts=parts,
        finish=first.finish or second.finish,
        stop=second.stop if first.finish is None else first.stop,
        usage=second.usage or first.usage,
        model=first.model or second.model,
        done=second.done,
    )


class AtOnce(NamedTuple):
    """How the last events of an answer are decoded as one."""

    events_max: int
    """With the one that says `[DONE]`."""
    read: Callable[[bytes, int], Piece | None]
    """Decode so many events, one on each line, without that one. None: they are to be read one by one, for
    they say more than tokens, usage and how the answer ended.

    Raises:
        msgspec.DecodeError: they are to be read one by one, for one of them cannot be read.
        UnicodeDecodeError: the same.
    """


class AnswerReader(Protocol):
    """Reads one answer's events in their order."""

    is_steady: bool
    """Whether an event that says nothing but text, or ids, says the same wherever it stands."""

    @property
    def at_once(self) -> AtOnce | None:
        """How it reads an answer that has come whole; None: event by event, as any other."""
        ...

    def read(self, event: bytes) -> Piece:
        """Decode this event.

        Raises:
            msgspec.DecodeError: it is not of the shape that it should have.
            UnicodeDecodeError: it is not UTF-8.
        """
        ...

    def end(self) -> Piece:
        """The answer is over: what that says, for engines whose last event says nothing."""
        ...


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a worker reports about itself."""

    models: tuple[str, ...] = ()
    """Names that it answers to; empty: it does not say."""
    max_model_len: int | None = None
    adapters: Mapping[str, str] = {}
    """Of `models`, those that are adapters of the others, and where they are from, if it tells."""


class Dialect(Protocol):
    """One engine's HTTP API."""

    @property
    def health_path(self) -> str:
        """GET it: 200 means that the worker takes requests. Empty: there is no such thing."""
        ...

    @property
    def facts_path(self) -> str:
        """GET it for `facts`. Empty: it cannot be asked."""
        ...

    @property
    def sends_chats(self) -> bool:
        """Whether conversations go to it as they are, to be put through a template and tokenized over
        there.
        """
        ...

    @property
    def needs_facts(self) -> bool:
        """Whether a worker without `facts_path` is no worker."""
        ...

    @property
    def listed_model(self) -> str:
        """The name that `facts` must list; empty: any."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Capabilities of this engine beyond plain text, as far as this dialect can ask for them."""
        ...

    @property
    def has_adapters(self) -> bool:
        """Whether a request can name one of the adapters that `facts` tells of."""
        ...

    @property
    def expects_model(self) -> str:
        """The name that answers must bear; empty: any."""
        ...

    @property
    def resumes(self) -> bool:
        """Whether answers come as token ids, so that they can be continued elsewhere, and others here."""
        ...

    def facts(self, body: bytes) -> ServerFacts:
        """Read what `facts_path` answered.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        ...

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """Write a request down.

        Raises:
            InvalidRequest: this engine cannot do what the request asks for; names the parameter.
        """
        ...

    def reader(self, request: GenerateRequest) -> AnswerReader:
        """For one answer."""
        ...


def rest_of(request: GenerateRequest, *, keeps_seed: bool = False) -> GenerateRequest:
    """The rest of a request of which another worker gave a part, as a request of its own.

    `keeps_seed`: the engine draws by seed and position. One that draws in turn would use its first draws
    again, so that it gets a derived seed.
    """
    num_given, sampling = len(request.resumed), request.sampling
    if not num_given:
        return request
    seed = sampling.seed
    if not keeps_seed and sampling.temperature > 0:
        seed = (seed + num_given * _SEED_STRIDE) & _SEED_MAX
    return msgspec.structs.replace(
        request,
        prompt_token_ids=request.prompt_token_ids + request.resumed,
        resumed=(),
        sampling=msgspec.structs.replace(
            sampling,
            seed=seed,
            max_tokens=sampling.max_tokens - num_given,
            min_tokens=max(0, sampling.min_tokens - num_given),
        ),
    )


def refuse(engine: str, **asked: bool) -> None:
    """Refuse what this engine cannot do, by the parameter's name: the last look, since placement goes by
    `capabilities`.

    Raises:
        Unsupported: one of them is asked for.
    """
    for param, is_asked in asked.items():
        if is_asked:
            raise Unsupported(
                f"'{param}' is not supported by the engine that serves this model ({engine}).",
                param=param,
                code="unsupported_by_model",
            )


FORMS = ("json", "json_object", "regex", "choice", "grammar")
"""vLLM's words for what an answer must look like."""
_IN_PATTERNS = re.compile(r"[\\^$.*+?()\[\]{}|/]")


def form_of(constraint: Constraint) -> tuple[str, Any]:
    """The required form of the answer, for engines that have one field for each kind: one of `FORMS`, and its
    value. A schema is an object, and a choice has become a `regex`.

    Raises:
        InvalidRequest: it is not just one of them, or of another type.
    """
    given = {name: value for name, value in constraint.structured.items() if value not in (None, False)}
    if len(given) != 1 or not given.keys() <= set(FORMS):
        said = " and ".join(name[:64] for name in given) or "none of them"
        raise _bad_form(constraint, f"expected one of {', '.join(FORMS)}, but got {said}")
    ((kind, value),) = given.items()
    if kind == "json_object":
        return "json", {"type": "object"}
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast(list[Any], value)):
            raise _bad_form(constraint, "expected an array of strings")
        return "regex", "|".join(_IN_PATTERNS.sub(r"\\\g<0>", each) for each in cast(list[str], value))
    if kind == "json" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise _bad_form(constraint, "the schema is not JSON") from None
    if not isinstance(value, dict if kind == "json" else str):
        raise _bad_form(constraint, f"expected {'an object' if kind == 'json' else 'a string'}")
    return kind, cast(Any, value)


def _bad_form(constraint: Constraint, message: str) -> InvalidRequest:
    param = constraint.param
    return InvalidRequest(f"Invalid '{param}': {message}.", param=param, code="invalid_value")


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
    """The message of an error answer's body; of pages that are not JSON nothing is shown."""
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
    wait_s = retry_after_s(headers)
    if (
        status == 429
        or (status == 503 and wait_s is not None)
        or (status is None and said.kind in _OVERLOADED)
    ):
        return WorkerBusy(f"The model's worker has no room: {shown or status}", retry_after_s=wait_s)
    if status is not None and 300 <= status < 400:
        return WorkerUnavailable(f"the worker answered with a redirect ({status}), which is not followed")
    if status in _OPERATOR:
        kind = KeyRejected if status in (401, 403) else WorkerUnavailable
        return kind(f"{_OPERATOR[status]} ({status}){': ' if shown else ''}{shown}")
    return WorkerUnavailable(
        f"the worker failed the request ({status or said.kind or 'an error'}): {shown or 'no reason given'}"
    )


def retry_after_s(headers: Mapping[bytes, bytes]) -> float | None:
    """How long a worker asks to be left alone: OpenAI's `retry-after-ms`, or `Retry-After` in seconds or as a
    date (RFC 9110, section 10.2.3), which counts from the answer's own `Date`: its clock is not ours.
    """
    value = headers.get(b"retry-after", b"").strip()
    wait_s = _number(headers.get(b"retry-after-ms", b""))
    if wait_s is not None:
        wait_s /= 1e3
    elif (wait_s := _number(value)) is None:
        until_s, now_s = _date_s(value), _date_s(headers.get(b"date", b""))
        wait_s = max(0.0, until_s - now_s) if until_s is not None and now_s is not None else None
    return min(wait_s, RETRY_AFTER_MAX_S) if wait_s is not None else None


def _number(value: bytes) -> float | None:
    text = value.strip()
    try:
        return float(text) if text[:1].isdigit() and len(text) <= 12 else None
    except ValueError:
        return None


def _date_s(value: bytes) -> float | None:
    """Seconds since 1970; None: it is no date of HTTP."""
    found = parsedate_tz(value.decode("latin-1")) if len(value) <= 40 else None
    try:
        return mktime_tz(found) if found is not None else None
    except (ValueError, OverflowError):
        return None


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
