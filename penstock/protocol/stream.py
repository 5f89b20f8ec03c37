"""Chunks of a streamed answer, as bytes.

A relayed token must not cost a dictionary and a JSON encoder's walk through it: of a chunk's 250 bytes only
the text changes. So the bytes around it are made once per choice, and a token costs one encoded
string between two constants. Rare chunks (log-probabilities, tool calls, the end) are encoded in full.
The shapes are OpenAI's, byte for byte stable: tests/protocol/golden holds them.
"""

import msgspec

from penstock.protocol.openai import (
    AnswerToolCall,
    ChatLogprobs,
    CompletionLogprobs,
    UsageBody,
)

_encode = msgspec.json.Encoder().encode


class StreamHead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What all chunks of one answer have in common."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    fingerprint: str
    include_usage: bool
    """Every chunk but the last then says `"usage":null`, as OpenAI's do."""

    def opening(self, kind: str) -> bytes:
        """From `data: {` to the colon after `"choices"`."""
        return b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":' % (
            _encode(self.id),
            _encode(kind),
            self.created,
            _encode(self.model),
            _encode(self.fingerprint),
        )

    @property
    def closing(self) -> bytes:
        """From after the array of choices to the end of the event."""
        return b',"usage":null}\n\n' if self.include_usage else b"}\n\n"

    def usage_event(self, kind: str, usage: UsageBody, facts: bytes = b"") -> bytes:
        """The last chunk when usage was asked for: no choices, only the count, and JSON `facts` of who
        answered.
        """
        ours = b',"penstock":' + facts if facts else b""
        return b'%b[],"usage":%b%b}\n\n' % (self.opening(kind), _encode(usage), ours)


class ChatChunks:
    """Makes the events of one choice of a streamed chat completion."""

    KIND = "chat.completion.chunk"
    __slots__ = ("_delta_head", "_end", "prefix", "suffix")

    def __init__(self, head: StreamHead, index: int) -> None:
        self._delta_head = b'%b[{"index":%d,"delta":' % (head.opening(self.KIND), index)
        self._end = b"]%b" % head.closing
        self.prefix = b'%b{"content":' % self._delta_head
        """What goes before the JSON string of a plain piece of text, and `suffix` after it."""
        self.suffix = b'},"logprobs":null,"finish_reason":null}%b' % self._end

    def role(self) -> bytes:
        """The first chunk of a choice: who speaks."""
        return self._event(b'{"role":"assistant","content":"","refusal":null}', b"null", b"null")

    def text(self, text: str) -> bytes:
        """A piece of the answer."""
        return b"%b%b%b" % (self.prefix, _encode(text), self.suffix)

    def text_with_logprobs(self, text: str, logprobs: ChatLogprobs) -> bytes:
        """A piece of the answer and its tokens' log-probabilities."""
        return self._event(b'{"content":%b}' % _encode(text), _encode(logprobs), b"null")

    def tool_call(self, call: AnswerToolCall) -> bytes:
        """A tool call, or the next piece of one."""
        return self._event(b'{"tool_calls":[%b]}' % _encode(call), b"null", b"null")

    def finish(self, reason: str) -> bytes:
        """The last chunk of a choice."""
        return self._event(b"{}", b"null", _encode(reason))

    def _event(self, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._delta_head,
            delta,
            logprobs,
            reason,
            self._end,
        )


class CompletionChunks:
    """Makes the events of one choice of a streamed plain completion."""

    KIND = "text_completion"
    __slots__ = ("_end", "prefix", "suffix")

    def __init__(self, head: StreamHead, index: int) -> None:
        self._end = b"]%b" % head.closing
        self.prefix = b'%b[{"index":%d,"text":' % (head.opening(self.KIND), index)
        """What goes before the JSON string of a plain piece of text, and `suffix` after it."""
        self.suffix = b',"logprobs":null,"finish_reason":null}%b' % self._end

    def text(self, text: str) -> bytes:
        """A piece of the answer."""
        return b"%b%b%b" % (self.prefix, _encode(text), self.suffix)

    def text_with_logprobs(self, text: str, logprobs: CompletionLogprobs) -> bytes:
        """A piece of the answer and its tokens' log-probabilities."""
        return self._event(text, _encode(logprobs), b"null")

    def finish(self, reason: str) -> bytes:
        """The last chunk of a choice."""
        return self._event("", b"null", _encode(reason))

    def _event(self, text: str, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self.prefix,
            _encode(text),
            logprobs,
            reason,
            self._end,
        )
