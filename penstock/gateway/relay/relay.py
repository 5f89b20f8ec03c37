"""The hot path: from a worker's output to bytes on the client's connection, as server-sent events.

One sink per choice writes straight to the transport from `on_delta`, or holds text back for a moment where
flush.py says so. There is no queue, task or timer per stream: what the client has not read is in the
transport's buffer, whose bound is checked at every write (exchange.py). docs/design/002 has the measurements.

The response's head is held back until the first output, so that a worker which fails before it is an honest
503 and not a broken 200. A heartbeat sends it too, if the first output takes long.
"""

from collections.abc import Sequence

import msgspec

from penstock.backends.base import Delta, Finish, TextLogprob, ToolCallPiece
from penstock.gateway.http.errors import error_body, error_response
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.relay.logprobs import Echo, chat_logprobs, completion_logprobs, echoed_logprobs
from penstock.gateway.relay.reply import Context, Reply
from penstock.protocol.openai import AnswerToolCall, CalledFunction
from penstock.protocol.sse import DONE, HEARTBEAT, event
from penstock.protocol.stream import ChatChunks, CompletionChunks
from penstock.rng import IdSource
from penstock.text.tools import ParsedToolCall, ToolEvent, ToolParser
from penstock.types import FinishReason

_encode = msgspec.json.Encoder().encode


class StreamReply(Reply):
    """A reply that streams."""

    __slots__ = ("_holding", "_is_held", "_kind")

    def __init__(self, context: Context, kind: str) -> None:
        """`kind` is the chunks' `object`."""
        super().__init__(context)
        self._kind = kind
        self._holding: list[TextSink] = []
        """Choices whose text is held back."""
        self._is_held = False
        """Its workers are not read: the client has too much already."""
        self.exchange.on_caught_up = self._caught_up
        self.exchange.on_full = self._hold_workers

    def begin(self) -> None:
        """A choice has its first output: the response must have begun."""
        self.first_output()
        if not self.exchange.streaming:
            self.exchange.begin_stream()

    def holding(self, sink: "TextSink") -> None:
        """A choice holds text back from now on."""
        self._holding.append(sink)
        if len(self._holding) == 1 and (flusher := self.exchange.terms.flusher) is not None:
            flusher.soon(self)

    def release(self) -> None:
        """Write what is held back; if the client must be waited for, once it has caught up."""
        if not self.exchange.waits:
            self._release_all()

    def _hold_workers(self) -> bool:
        """More waits for the client than may. Whether every stream's worker can be made to wait."""
        self._is_held = self.pause_reading()
        return self._is_held

    def _caught_up(self) -> None:
        """The client took what was written. Workers go on when it has taken what was held back, too."""
        self._release_all()
        if self._is_held and not self.exchange.is_behind:
            self._is_held = False
            self.resume_reading()

    def _release_all(self) -> None:
        holding, self._holding = self._holding, []
        self.exchange.let_go()
        for sink in holding:
            sink.release()

    def heartbeat(self, ticks: int) -> None:
        """Send a comment if nothing was sent for `ticks` calls."""
        exchange = self.exchange
        exchange.idle_ticks += 1
        if exchange.idle_ticks >= ticks and not self._is_over:
            if not exchange.streaming:
                exchange.begin_stream()
            exchange.write(HEARTBEAT)

    def complete(self) -> None:
        """The end of a stream that went well."""
        usage = b""
        if self.context.head.include_usage:
            facts = self.exchange.served.facts() if self.exchange.served is not None else b""
            usage = self.context.head.usage_event(self._kind, self.tally.usage(), facts)
        self.exchange.end(usage + DONE)

    def send_error(self, error: Exception) -> None:
        """A status if there is still time for one, else a last event and a closed connection."""
        if self.exchange.streaming:
            self._release_all()
            self.exchange.end_broken(event(error_body(error)))
        else:
            self.exchange.respond(error_response(error))


class TextSink:
    """Plain text of one choice: the case that is nearly all of the traffic."""

    __slots__ = (
        "_began",
        "_exchange",
        "_finish",
        "_held",
        "_index",
        "_opening",
        "_prefix",
        "_reply",
        "_suffix",
    )

    def __init__(
        self, reply: StreamReply, chunks: ChatChunks | CompletionChunks, index: int, opening: bytes
    ) -> None:
        """`opening` goes out before the first output: the role, or an echo of the prompt."""
        self._reply = reply
        self._exchange = reply.exchange
        self._index = index
        self._opening = opening
        self._prefix, self._suffix = chunks.prefix, chunks.suffix
        self._finish = chunks.finish
        self._began = False
        self._held = bytearray()
        """Text that is held back, as the inside of a JSON string: such insides can be joined."""

    def write_to(self, exchange: Exchange) -> None:
        """Write to this one, which stands before the reply's own."""
        self._exchange = exchange

    def on_delta(self, delta: Delta) -> None:
        """More output. The first leaves at once."""
        if not self._began:
            self._begin()
            if delta.text:
                self._exchange.write(self._prefix + _encode(delta.text) + self._suffix)
        elif delta.text:
            if self._exchange.holds:
                self._hold(_encode(delta.text)[1:-1])
            else:
                self._exchange.write(self._prefix + _encode(delta.text) + self._suffix)
        self._reply.count(len(delta.token_ids))

    def release(self) -> None:
        """Write what is held back, as one event."""
        if self._held:
            held, self._held = self._held, bytearray()
            self._exchange.write(b'%b"%b"%b' % (self._prefix, held, self._suffix))

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        finish = self._reply.ended(finish)
        if finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):
            if not self._began:
                self._begin()
            self.release()
            self._exchange.write(self._finish(finish.reason.value))
        self._reply.choice_finished(self._index, finish)

    def _hold(self, piece: bytes) -> None:
        if not self._held:
            self._reply.holding(self)
        self._held += piece
        self._exchange.hold(len(piece))

    def _begin(self) -> None:
        self._began = True
        self._reply.begin()
        if self._opening:
            self._exchange.write(self._opening)


class ChatSink(TextSink):
    """A chat choice with log-probabilities, tool calls or both."""

    __slots__ = ("_chunks", "_ids", "_logprobs", "_num_calls", "_parser")

    def __init__(
        self,
        reply: StreamReply,
        chunks: ChatChunks,
        index: int,
        *,
        logprobs: bool,
        parser: ToolParser | None,
    ) -> None:
        super().__init__(reply, chunks, index, chunks.role())
        self._chunks = chunks
        self._logprobs = logprobs
        self._parser = parser
        self._ids = reply.context.ids
        self._num_calls = 0

    def on_delta(self, delta: Delta) -> None:
        """More output. Log-probabilities travel with the text that is shown now, even if that is none."""
        if not self._began:
            self._begin()
        events = [delta.text] if self._parser is None else self._parser.push(delta.text)
        text = "".join(_prose(item) for item in events)
        if self._logprobs and delta.logprobs:
            self._exchange.write(self._chunks.text_with_logprobs(text, chat_logprobs(delta.logprobs)))
        elif text:
            self._exchange.write(self._chunks.text(text))
        self._send_calls(events)
        for piece in delta.tool_calls:
            self._exchange.write(self._chunks.tool_call(passed_call(piece)))
        self._reply.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end; a choice that called a tool says so."""
        finish = self._reply.ended(finish)
        if self._parser is not None and finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):
            if not self._began:
                self._begin()
            events = self._parser.finish()
            if text := "".join(_prose(item) for item in events):
                self._exchange.write(self._chunks.text(text))
            self._send_calls(events)
            if self._num_calls and finish.reason is FinishReason.STOP:
                finish = Finish(reason=FinishReason.TOOL_CALLS, usage=finish.usage)
        super().on_finish(finish)

    def _send_calls(self, events: "list[ToolEvent] | list[str]") -> None:
        for item in events:
            if isinstance(item, ParsedToolCall):
                self._num_calls += 1
                self._exchange.write(self._chunks.tool_call(streamed_call(item, self._ids)))


class CompletionLogprobsSink(TextSink):
    """A plain completion's choice with log-probabilities; an echoed prompt's are one chunk, the first."""

    __slots__ = ("_chunks", "_echo", "_offset", "_prompt")

    def __init__(self, reply: StreamReply, chunks: CompletionChunks, index: int, echo: Echo) -> None:
        super().__init__(reply, chunks, index, b"")
        self._chunks, self._echo = chunks, echo
        self._offset = 0
        self._prompt: list[TextLogprob] = []  # Bounded by the model's context.

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        if delta.prompt_logprobs:
            self._prompt.extend(delta.prompt_logprobs)
            return
        if not self._began:
            self._begin()
        self._write(delta.text, delta.logprobs)
        self._reply.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        if not self._began and finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._prompt.clear()  # Another attempt tells them again.
        super().on_finish(finish)

    def _begin(self) -> None:
        super()._begin()
        if self._echo.first is not None:
            self._write(self._echo.text, echoed_logprobs(self._echo, self._prompt))

    def _write(self, text: str, logprobs: Sequence[TextLogprob]) -> None:
        shown = completion_logprobs(logprobs, self._offset)
        self._offset += sum(len(token) for token in shown.tokens)
        self._exchange.write(self._chunks.text_with_logprobs(text, shown))


def streamed_call(call: ParsedToolCall, ids: IdSource) -> AnswerToolCall:
    """A whole call in one chunk: the parser gives calls only once they are valid."""
    return AnswerToolCall(
        index=call.index,
        id=ids.take("call"),
        type="function",
        function=CalledFunction(name=call.name, arguments=call.arguments_json),
    )


def passed_call(piece: ToolCallPiece) -> AnswerToolCall:
    """Part of a call that a provider made: its own id, for the call's answer goes back to it."""
    is_start = bool(piece.id or piece.name)
    return AnswerToolCall(
        index=piece.index,
        id=piece.id or None,
        type="function" if is_start else None,
        function=CalledFunction(name=piece.name or None, arguments=piece.arguments),
    )


def _prose(item: ToolEvent | str) -> str:
    if isinstance(item, str):
        return item
    return "" if isinstance(item, ParsedToolCall) else item.text
