"""What differs from engine to engine: how a request is written down, and what an event of the answer says.

A dialect translates and decides nothing; streams (backends/http/stream.py), errors (worker_errors.py), health
and load (backends/http/backend.py) are the same for all.
"""

from typing import Protocol

import msgspec

from penstock.backends.base import GenerateRequest, TextLogprob, ToolCallPiece
from penstock.errors import Unsupported
from penstock.types import Capability, FinishReason, TokenLogprob


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
    """What one event says. Tokens come as ids or as text, never as both."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
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
    """What the worker calls the model; empty: this event does not say."""
    error: SaidError | None = None
    done: bool = False
    """Nothing more that matters will come."""


NOTHING = Piece()


class AnswerReader(Protocol):
    """Reads one answer's events in their order."""

    def read(self, event: bytes) -> Piece:
        """What this event says.

        Raises:
            msgspec.DecodeError: it is not of the shape that it should have.
            UnicodeDecodeError: it is not UTF-8.
        """
        ...

    def end(self) -> Piece:
        """The answer is over: what that says, for engines whose last event says nothing."""
        ...


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself."""

    models: tuple[str, ...] = ()
    """Names that it answers to; empty: it does not say."""
    max_model_len: int | None = None
    adapters: frozenset[str] = frozenset()
    """Of `models`, those that are adapters of the others."""


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
        """What this engine can do of what is no plain text, as far as this dialect can ask for it."""
        ...

    @property
    def has_adapters(self) -> bool:
        """Whether a request can name one of the adapters that `facts` tells of."""
        ...

    @property
    def expects_model(self) -> str:
        """The name that answers must bear; empty: any."""
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
