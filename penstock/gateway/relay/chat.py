"""One choice of a streamed chat that is more than plain text: reasoning, tool calls, log-probabilities."""

from collections.abc import Sequence

from penstock.backends.base import Delta, Finish, ToolCallPiece
from penstock.gateway.relay.relay import StreamReply, TextSink, chat_logprobs
from penstock.protocol.openai import AnswerToolCall, CalledFunction
from penstock.protocol.stream import ChatChunks
from penstock.text.reasoning import AnswerParser
from penstock.text.tools import CallPiece, Text, Thought, ToolEvent
from penstock.types import FinishReason


class PassedSink(TextSink):
    """A chat choice that a provider may answer, which tells reasoning apart."""

    __slots__ = ("_chunks",)

    def __init__(self, reply: StreamReply, chunks: ChatChunks, index: int) -> None:
        super().__init__(reply, chunks, index, chunks.role())
        self._chunks = chunks

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        if delta.thought:
            if not self._began:
                self._begin()
            self.release()
            self._exchange.write(self._chunks.thought(delta.thought))
            self._reply.thought(len(delta.token_ids))
        super().on_delta(delta)


class ChatSink(TextSink):
    """A chat choice with log-probabilities, reasoning or tool calls."""

    __slots__ = ("_chunks", "_ids", "_logprobs", "_num_calls", "_parser")

    def __init__(
        self, reply: StreamReply, chunks: ChatChunks, index: int, *, logprobs: bool, parser: AnswerParser
    ) -> None:
        super().__init__(reply, chunks, index, chunks.role())
        self._chunks = chunks
        self._logprobs = logprobs
        self._parser = parser
        self._ids = reply.ids
        self._num_calls = 0

    def on_delta(self, delta: Delta) -> None:
        """More output. Log-probabilities travel with the text that is shown now, even if that is none."""
        if not self._began:
            self._begin()
        events = self._reply.guarded(self._parser.push, delta.text, delta.thought)
        if events is None:
            return
        self._reply.thought(self._parser.num_thoughts(delta.token_ids, delta.thought))
        if self._logprobs and delta.logprobs:
            at = next((i for i, item in enumerate(events) if isinstance(item, Text)), len(events))
            self._send(events[:at])
            text = "".join(item.text for item in events[at : at + 1] if isinstance(item, Text))
            self._exchange.write(self._chunks.text_with_logprobs(text, chat_logprobs(delta.logprobs)))
            events = events[at + 1 :]
        self._send(events)
        for piece in delta.tool_calls:
            self._exchange.write(self._chunks.tool_call(passed_call(piece)))
        self._reply.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end; a choice that called a tool says so."""
        finish = self._reply.ended(finish)
        if finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):
            if not self._began:
                self._begin()
            self._send(self._reply.guarded(self._parser.finish) or ())
            if self._num_calls and finish.reason is FinishReason.STOP:
                finish = Finish(reason=FinishReason.TOOL_CALLS, usage=finish.usage)
        super().on_finish(finish)

    def _send(self, events: Sequence[ToolEvent]) -> None:
        for item in events:
            match item:
                case Text(text):
                    self._exchange.write(self._chunks.text(text))
                case Thought(text):
                    self._exchange.write(self._chunks.thought(text))
                case CallPiece():
                    self._num_calls += bool(item.name)
                    self._exchange.write(self._chunks.tool_call(self._call(item)))

    def _call(self, piece: CallPiece) -> AnswerToolCall:
        """Id, type and name come first, then the arguments."""
        if not piece.name:
            return AnswerToolCall(index=piece.index, function=CalledFunction(arguments=piece.arguments))
        function = CalledFunction(name=piece.name, arguments=piece.arguments)
        return AnswerToolCall(
            index=piece.index, id=self._ids.take("call"), type="function", function=function
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
