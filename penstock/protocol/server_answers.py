"""Answers of OpenAI's HTTP API as any server sends them: for the clients of other servers and for
the load generator.

Lenient: unknown fields are ignored and each known one may be missing.
"""

import msgspec

from penstock.protocol.openai import (
    AnswerToolCall,
    ChatLogprobs,
    CompletionLogprobs,
    ErrorBody,
    TokenId,
    UsageBody,
)


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Every form in which servers report an error: an object under `error`, a string there, or the object
    itself.
    """

    error: ErrorBody | str | None = None
    error_type: str | None = None
    message: str | None = None
    detail: msgspec.Raw | None = None
    object: str | None = None
    code: str | int | None = None


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`choices[].delta` of a stream, or `choices[].message`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name for it, and OpenRouter's."""
    tool_calls: list[AnswerToolCall] | None = None


class ChatEventChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`choices[]` of a chat event or of a whole chat answer."""

    delta: AnswerDelta | None = None
    message: AnswerDelta | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """Its text."""
        piece = self.delta or self.message
        return (piece.content if piece else None) or ""

    @property
    def is_output(self) -> bool:
        """Whether the model generated something (chunks with only a role or a finish reason are not
        output).
        """
        piece = self.delta or self.message
        return piece is not None and bool(
            piece.content or piece.reasoning_content or piece.reasoning or piece.tool_calls
        )


class ChatEvent(ErrorEvent, frozen=True, kw_only=True, gc=False):
    """One event of `/v1/chat/completions`, or the whole answer."""

    model: str | None = None
    choices: tuple[ChatEventChoice, ...] = ()
    usage: UsageBody | None = None


class CompletionEventChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`choices[]` of a plain completion's event, with the extensions of vLLM and TensorRT-LLM."""

    text: str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | TokenId | None = None


class CompletionEvent(ErrorEvent, frozen=True, kw_only=True, gc=False):
    """One event of `/v1/completions`."""

    model: str | None = None
    choices: tuple[CompletionEventChoice, ...] = ()
    usage: UsageBody | None = None


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a server's `/v1/models`."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None
    root: str | None = None
    """Of vLLM's adapters, the path."""


class ListedModels(msgspec.Struct, frozen=True, kw_only=True):
    """A server's `/v1/models`."""

    data: tuple[ListedModel, ...] = ()


decode_chat_event = msgspec.json.Decoder(ChatEvent).decode
decode_chat_events = msgspec.json.Decoder(ChatEvent).decode_lines
decode_completion_event = msgspec.json.Decoder(CompletionEvent).decode
decode_completion_events = msgspec.json.Decoder(CompletionEvent).decode_lines
decode_models = msgspec.json.Decoder(ListedModels).decode
decode_error = msgspec.json.Decoder(ErrorEvent).decode


def error_text(error: ErrorBody | str | None) -> str:
    """The message of an error object; empty if it has none."""
    return (error.message if isinstance(error, ErrorBody) else error) or ""


def refusal_text(status: int, body: bytes) -> str:
    """One line that says why a server refused a request, from the body of any server's error answer."""
    try:
        answer = decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace').strip()}".rstrip(": ")
    return error_text(answer.error) or answer.message or f"HTTP {status}"
