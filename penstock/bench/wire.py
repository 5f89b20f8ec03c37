"""The little that a client reads of OpenAI's answers.

Lenient on purpose: `bench` and `chat` run against any server, so unknown fields are ignored and every
known one may be missing. Decoding is typed (msgspec), about a microsecond per chunk.
"""

import msgspec


class Delta(msgspec.Struct, frozen=True):
    """A piece of a chat answer."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk or of a whole answer, of chat (`delta`, `message`) or completions (`text`)."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The text in it, wherever this kind of answer keeps it."""
        piece = self.delta or self.message
        return (piece.content if piece else self.text) or ""

    @property
    def is_output(self) -> bool:
        """Whether the model generated something (role-only and closing chunks are not output)."""
        piece = self.delta or self.message
        if piece is None:
            return bool(self.text)
        return bool(piece.content or piece.reasoning_content or piece.tool_calls)


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int | None = None


class UsageReport(msgspec.Struct, frozen=True):
    """`usage` as the server counted it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in a cache; 0 where the server does not say."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str = ""
    type: str | None = None
    code: str | int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream, or a whole answer."""

    choices: tuple[Choice, ...] = ()
    usage: UsageReport | None = None
    error: ErrorBody | str | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of `GET /models`."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """`GET /models`."""

    data: tuple[ModelCard, ...] = ()


class _ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody | str | None = None
    message: str | None = None
    detail: msgspec.Raw | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_models = msgspec.json.Decoder(ModelList).decode
_decode_error = msgspec.json.Decoder(_ErrorAnswer).decode


def error_text(status: int, body: bytes) -> str:
    """What went wrong in one line, from an error answer of any server."""
    try:
        answer = _decode_error(body)
    except msgspec.DecodeError:
        return f"HTTP {status}: {body[:200].decode(errors='replace').strip()}".rstrip(": ")
    if isinstance(answer.error, ErrorBody):
        return answer.error.message or f"HTTP {status}"
    return answer.error or answer.message or f"HTTP {status}"
