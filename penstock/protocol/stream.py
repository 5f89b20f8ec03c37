"""Chunks of a streamed answer, as bytes.

A relayed token must not cost a dictionary and a JSON encoder's walk through it: of a chunk's 250 bytes only
the text changes. So the bytes around it are made once per choice, and a token costs one encoded
string between two constants. Rare chunks (log-probabilities, tool calls, the end) are encoded in full.
The shapes are OpenAI's, byte for byte stable: tests/protocol/golden holds them.

Server-sent events as bytes (WHATWG HTML, section 9.2), the little of them that OpenAI streams use:
written, and read.
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
    """The common fields of all chunks of one answer."""

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
        """The bytes before the JSON string of a plain piece of text, and `suffix` those after it."""
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

    def thought(self, text: str) -> bytes:
        """A piece of the reasoning, under both of its names."""
        return self._event(
            b'{"reasoning_content":%b,"reasoning":%b}' % (_encode(text), _encode(text)), b"null", b"null"
        )

    def tool_call(self, call: AnswerToolCall) -> bytes:
        """A tool call, or the next piece of one."""
        return self._event(b'{"tool_calls":[%b]}' % _encode(call), b"null", b"null")

    def finish(self) -> tuple[bytes, bytes]:
        """The last chunk of a choice: what stands before the reason and after it."""
        return b'%b{},"logprobs":null,"finish_reason":' % self._delta_head, b"}%b" % self._end

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
        """The bytes before the JSON string of a plain piece of text, and `suffix` those after it."""
        self.suffix = b',"logprobs":null,"finish_reason":null}%b' % self._end

    def text(self, text: str) -> bytes:
        """A piece of the answer."""
        return b"%b%b%b" % (self.prefix, _encode(text), self.suffix)

    def text_with_logprobs(self, text: str, logprobs: CompletionLogprobs) -> bytes:
        """A piece of the answer and its tokens' log-probabilities."""
        return self._event(text, _encode(logprobs), b"null")

    def finish(self) -> tuple[bytes, bytes]:
        """The last chunk of a choice: what stands before the reason and after it."""
        return b'%b"","logprobs":null,"finish_reason":' % self.prefix, b"}%b" % self._end

    def _event(self, text: str, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self.prefix,
            _encode(text),
            logprobs,
            reason,
            self._end,
        )


DONE = b"data: [DONE]\n\n"
"""The last event of a stream that went well."""
HEARTBEAT = b": still here\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""


def event(data: bytes) -> bytes:
    r"""One event. `data` must hold no newline; JSON as msgspec writes it never does."""
    return b"data: %b\n\n" % data


class EventTooLong(ValueError):
    """An event is over the reader's bound."""


class EventReader:
    r"""Cuts a stream of bytes, as it comes, into the data of its events.

    Comments, event names and ids are dropped; several `data:` lines of one event are joined by newlines.
    Lines may end in LF, CR LF or CR. Bytes that were looked through once are not looked through again,
    however small the pieces are.
    """

    __slots__ = ("_after_cr", "_events_max_bytes", "_rest", "_seen")

    def __init__(self, event_bytes_max: int = 4 * 1024 * 1024) -> None:
        self._events_max_bytes = event_bytes_max
        self._rest = bytearray()
        self._seen = 0
        """Bytes of `_rest` that hold no end of an event."""
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now.

        Raises:
            EventTooLong: one is over `event_bytes_max`; there is no going on after that.
        """
        block = self.whole(data)
        return [value for each in block[:-2].split(b"\n\n") if (value := data_of(each)) is not None]

    def whole(self, data: bytes) -> bytes:
        r"""The events that are complete now, as they came but for line ends: each ends in a blank line.

        Raises:
            EventTooLong: as `feed`.
        """
        if self._after_cr or b"\r" in data:
            data = self._with_plain_line_ends(data)
        rest = self._rest
        if not rest and data.endswith(b"\n\n") and len(data) <= self._events_max_bytes:
            return data  # Whole events, as they come nearly always.
        rest += data
        end = rest.rfind(b"\n\n", max(0, self._seen - 1)) + 2
        block = b""
        if end >= 2:
            block = bytes(memoryview(rest)[:end])
            if end > self._events_max_bytes:
                for each in block.split(b"\n\n"):
                    self._check(len(each))
            del rest[:end]
        self._seen = len(rest)
        self._check(self._seen)
        return block

    def _check(self, size: int) -> None:
        if size > self._events_max_bytes:
            raise EventTooLong(f"a server-sent event is over {self._events_max_bytes} bytes")

    def _with_plain_line_ends(self, data: bytes) -> bytes:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # The other half of a CR LF.
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(block: bytes) -> bytes | None:
    """The data of one event, which is given without its blank line; None if it has none."""
    if block.startswith(b"data:") and b"\n" not in block:
        return block[6:] if block.startswith(b"data: ") else block[5:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
