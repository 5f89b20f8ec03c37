"""Answers that are more than plain text as it comes: those that are not streamed, whose choices' output is
collected and answered once; and choices of a streamed chat with reasoning, tool calls or log-probabilities.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.backends.base import Delta, Finish, Sink, TextLogprob, ToolCallPiece
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.exchange import Response
from penstock.gateway.relay.relay import (
    Echo,
    StreamReply,
    TextSink,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from penstock.gateway.relay.reply import Context, Reply
from penstock.protocol.openai import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    CompletionAnswer,
    CompletionChoice,
    PromptLogprobs,
)
from penstock.protocol.stream import ChatChunks
from penstock.text.reasoning import PROSE, AnswerParser
from penstock.text.tools import CallPiece, ParsedToolCall, Text, Thought, ToolEvent, joined
from penstock.types import FinishReason


class PassedSink(TextSink):
    """A chat choice that a provider may answer, which tells reasoning apart."""

    __slots__ = ("_chunks",)

    def __init__(self, reply: StreamReply, chunks: ChatChunks, index: int) -> None:
        super().__init__(reply, chunks, index, chunks.role())
        self._chunks = chunks

    def _think(self, delta: Delta) -> None:
        """Reasoning is sent before its text."""
        if not self._began:
            self._begin()
        self.release()
        self._exchange.write(self._chunks.thought(delta.thought))
        self._reply.thought(len(delta.token_ids))


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


class PassedCall:
    """A tool call that comes in parts from a provider."""

    __slots__ = ("_arguments", "_id", "_name")

    def __init__(self) -> None:
        self._id = self._name = ""
        self._arguments: list[str] = []

    def add(self, piece: ToolCallPiece) -> None:
        """The next part."""
        self._id, self._name = self._id or piece.id, self._name or piece.name
        self._arguments.append(piece.arguments)

    def whole(self) -> AnswerToolCall:
        """As it is answered."""
        function = CalledFunction(name=self._name, arguments="".join(self._arguments))
        return AnswerToolCall(id=self._id, type="function", function=function)


class CollectSink:
    """Keeps one choice's output. Bounded by the request's max_tokens."""

    __slots__ = (
        "_began", "_index", "_parser", "_prose", "_reply", "events", "logprobs", "passed_calls",
        "prompt_logprobs", "reason", "token_ids",
    )  # fmt: skip

    def __init__(self, reply: Reply, index: int, parser: AnswerParser, *, keeps_ids: bool = False) -> None:
        self._reply = reply
        self._index = index
        self._parser: AnswerParser | None = None if parser.passes_on else parser
        self._prose: list[str] = []
        """The text, where there is nothing to look for in it."""
        self._began = False
        self.events: list[ToolEvent] = []
        self.logprobs: list[TextLogprob] = []
        self.prompt_logprobs: list[TextLogprob] = []
        self.passed_calls: dict[int, PassedCall] = {}
        """Tool calls that a provider has parsed, by index."""
        self.reason = FinishReason.ABORT
        self.token_ids: list[int] | None = [] if keeps_ids else None
        """Of the answer, if they are asked for."""

    @property
    def text(self) -> str:
        """The text so far."""
        if self._parser is None:
            return "".join(self._prose)
        return "".join(item.text for item in self.events if isinstance(item, Text))

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        if delta.prompt_logprobs:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
            return
        if not self._began:
            self._began = True
            self._reply.first_output()
        if self._parser is None:
            self._prose.append(delta.text)
            if delta.thought:
                self.events.append(Thought(delta.thought))
                self._reply.thought(len(delta.token_ids))
        elif (events := self._reply.guarded(self._parser.push, delta.text, delta.thought)) is not None:
            self.events += events
            self._reply.thought(self._parser.num_thoughts(delta.token_ids, delta.thought))
        else:
            return
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if self.token_ids is not None:
            self.token_ids += delta.token_ids
        for piece in delta.tool_calls:
            self.passed_calls.setdefault(piece.index, PassedCall()).add(piece)
        self._reply.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        finish = self._reply.ended(finish)
        self.reason = finish.reason
        if finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):  # Another attempt may continue.
            if self._parser is not None:
                self.events += self._reply.guarded(self._parser.finish) or ()
        elif not self._began:
            self.prompt_logprobs.clear()  # Another attempt tells them again.
        self._reply.choice_finished(self._index, finish)


class ScoringSink:
    """Passes on the log-probabilities of a prompt, and drops the token that a worker has to draw for them."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        self._sink.on_delta(delta if delta.prompt_logprobs else Delta("", ()))

    def on_finish(self, finish: Finish) -> None:
        """The end: of as many tokens as were asked for, whatever was drawn."""
        reason = FinishReason.LENGTH if finish.reason is FinishReason.STOP else finish.reason
        usage = replace(finish.usage, completion_tokens=0)
        self._sink.on_finish(replace(finish, reason=reason, usage=usage, stop=None))


class WholeReply(Reply):
    """A reply that is one JSON body."""

    __slots__ = ("_prompt_ids", "sinks")

    def __init__(
        self, context: Context, parsers: Sequence[AnswerParser], prompt_ids: Sequence[Sequence[int]] = ()
    ) -> None:
        """`prompt_ids`: by choice, where ids of tokens are asked for."""
        super().__init__(context)
        self._prompt_ids = prompt_ids
        self.sinks: Sequence[CollectSink] = [
            CollectSink(self, i, parser, keeps_ids=bool(prompt_ids)) for i, parser in enumerate(parsers)
        ]

    def complete(self) -> None:
        """Every choice is there: answer."""
        self.exchange.respond(Response(body=msgspec.json.encode(self.answer())))
        self.sinks = ()  # They lead back here.

    def send_error(self, error: Exception) -> None:
        """Nothing was sent yet, so the status can tell."""
        self.exchange.respond(error_response(error))
        self.sinks = ()

    def answer(self) -> ChatAnswer | CompletionAnswer:
        """The body."""
        raise NotImplementedError


class WholeChat(WholeReply):
    """A chat completion in one piece."""

    __slots__ = ("_num_prompt_top", "_with_logprobs")

    def __init__(
        self,
        context: Context,
        *,
        parsers: Sequence[AnswerParser],
        with_logprobs: bool,
        num_prompt_top: int | None = None,
        prompt_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(context, parsers, prompt_ids)
        self._with_logprobs = with_logprobs
        self._num_prompt_top = num_prompt_top

    def answer(self) -> ChatAnswer:
        """The body."""
        return ChatAnswer(
            id=self.head.id,
            object="chat.completion",
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[self._choice(i, sink) for i, sink in enumerate(self.sinks)],
            usage=self.exchange.usage(),
            prompt_logprobs=_shown_prompt(self.sinks[0], self._num_prompt_top),
            prompt_token_ids=self._prompt_ids[0] if self._prompt_ids else None,
        )

    def _choice(self, index: int, sink: CollectSink) -> ChatChoice:
        text, thought = sink.text, None
        calls: list[AnswerToolCall] = []
        if sink.events:
            events = joined(sink.events)
            thought = "".join([item.text for item in events if isinstance(item, Thought)]) or None
            calls = [
                AnswerToolCall(
                    id=self.ids.take("call"),
                    type="function",
                    function=CalledFunction(name=item.name, arguments=item.arguments_json),
                )
                for item in events
                if isinstance(item, ParsedToolCall)
            ]
        if sink.passed_calls:
            calls += [call.whole() for _, call in sorted(sink.passed_calls.items())]
        called = bool(calls) and sink.reason is FinishReason.STOP
        return ChatChoice(
            index=index,
            message=AnswerMessage(
                content=text or (None if calls else ""),
                refusal=None,
                tool_calls=calls or None,
                reasoning_content=thought,
                reasoning=thought,
            ),
            logprobs=chat_logprobs(sink.logprobs) if self._with_logprobs else None,
            finish_reason=FinishReason.TOOL_CALLS if called else sink.reason,
            token_ids=sink.token_ids,
        )


class WholeCompletion(WholeReply):
    """Plain completions in one piece."""

    __slots__ = ("_echoes", "_num_prompt_top", "_with_logprobs")

    def __init__(
        self,
        context: Context,
        *,
        echoes: Sequence[Echo],
        with_logprobs: bool,
        num_prompt_top: int | None = None,
        prompt_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(context, [PROSE for _ in echoes], prompt_ids)
        self._echoes = echoes
        self._with_logprobs = with_logprobs
        self._num_prompt_top = num_prompt_top

    def answer(self) -> CompletionAnswer:
        """The body."""
        return CompletionAnswer(
            id=self.head.id,
            object="text_completion",
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[self._choice(i, sink) for i, sink in enumerate(self.sinks)],
            usage=self.exchange.usage(),
        )

    def _choice(self, index: int, sink: CollectSink) -> CompletionChoice:
        echo = self._echoes[index]
        shown = [*echoed_logprobs(echo, sink.prompt_logprobs), *sink.logprobs]
        return CompletionChoice(
            index=index,
            text=echo.text + sink.text,
            logprobs=completion_logprobs(shown, 0) if self._with_logprobs else None,
            finish_reason=sink.reason,
            prompt_logprobs=_shown_prompt(sink, self._num_prompt_top),
            token_ids=sink.token_ids,
            prompt_token_ids=self._prompt_ids[index] if self._prompt_ids else None,
        )


def _shown_prompt(sink: CollectSink, num_top: int | None) -> PromptLogprobs | None:
    return None if num_top is None else prompt_logprobs(sink.prompt_logprobs, num_top)
