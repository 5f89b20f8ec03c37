"""The hot path: from a worker's output to bytes on the client's connection, as server-sent events.

One sink per choice writes straight to the transport from `on_delta`, or holds text back for a moment where
terms.py says so. There is no queue, task or timer per stream: what the client has not read is in the
transport's buffer, whose bound is checked at every write (exchange.py). docs/design/002 has the measurements.

The response's head is held back until the first output, so that a worker which fails before it is an honest
503 and not a broken 200. A heartbeat sends it too, if the first output takes long.

vLLM's `stream_options.continuous_usage_stats`: every chunk of a stream has the usage until there.

The chunks of the other sinks are written as they are; only their last field is put in. Rare, so it may cost
more.

Log-probabilities in OpenAI's two shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from penstock.backends.base import Delta, Finish, Sink, TextLogprob
from penstock.gateway.http.errors import error_body, error_response
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.relay.reply import Context, Reply
from penstock.protocol.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from penstock.protocol.stream import DONE, HEARTBEAT, ChatChunks, CompletionChunks, event
from penstock.types import FinishReason

LOWEST = -9999.0
"""OpenAI's value for a probability of zero, which JSON has no logarithm of."""


@dataclass(slots=True, frozen=True)
class Echo:
    """The part of a prompt that is shown in front of its answers."""

    text: str = ""
    first: TextLogprob | None = None
    """The prompt's first token, where log-probabilities are shown too: it has none, and those that follow
    do."""
    num_top: int = 0
    """Alternatives that are shown beside each token; more may have been asked for, for `prompt_logprobs`."""


def chat_logprobs(logprobs: Sequence[TextLogprob]) -> ChatLogprobs:
    """`choices[].logprobs` of a chat answer or chunk."""
    return ChatLogprobs(
        [
            ContentLogprob(
                token=item.token,
                logprob=_shown(item.logprob),
                bytes=list(item.token_bytes),
                top_logprobs=[TopLogprob(t, _shown(p), list(b)) for t, b, p in item.top],
            )
            for item in logprobs
        ]
    )


def completion_logprobs(logprobs: Sequence[TextLogprob], offset: int) -> CompletionLogprobs:
    """`choices[].logprobs` of a plain completion; the first token stands at character `offset`."""
    offsets: list[int] = []
    for item in logprobs:
        offsets.append(offset)
        offset += len(item.token)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if item.logprob is None else _shown(item.logprob) for item in logprobs],
        tokens=[item.token for item in logprobs],
        top_logprobs=[None if item.logprob is None else _tops(item) for item in logprobs],
    )


def prompt_logprobs(following: Sequence[TextLogprob], count: int) -> PromptLogprobs:
    """VLLM's `prompt_logprobs`, of a prompt's tokens from the second on, with `count` alternatives each."""
    return [None, *(_by_id(item, count) for item in following)]


def _by_id(item: TextLogprob, count: int) -> dict[str, PromptLogprob]:
    ranked = zip(item.top_ids[:count], item.top, strict=False)
    found = {
        str(token_id): PromptLogprob(logprob=_shown(logprob), rank=rank, decoded_token=text)
        for rank, (token_id, (text, _, logprob)) in enumerate(ranked, start=1)
    }
    own = PromptLogprob(logprob=_shown(item.logprob), rank=item.rank or None, decoded_token=item.token)
    return {str(item.token_id): own} | found


def _tops(item: TextLogprob) -> dict[str, float]:
    """The likeliest tokens, and the token itself, by their text; of tokens with one text the likeliest."""
    found: dict[str, float] = {}
    for text, _, logprob in item.top:
        found.setdefault(text, _shown(logprob))
    found.setdefault(item.token, _shown(item.logprob))
    return found


def echoed_logprobs(echo: Echo, following: Sequence[TextLogprob]) -> list[TextLogprob]:
    """The prompt's tokens: its first, and `following`; nothing where no prompt is shown."""
    if echo.first is None:
        return []
    return [echo.first, *(replace(each, top=each.top[: echo.num_top]) for each in following)]


def _shown(logprob: float | None) -> float:
    assert logprob is not None, "only a prompt's first token has no log-probability"
    return max(logprob, LOWEST)


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
        """The client took what was written. Workers also continue once it has taken the text that was held
        back.
        """
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
        if self.head.include_usage:
            usage = self.head.usage_event(self._kind, self.exchange.usage(), self.exchange.served_facts())
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
        self._finish = chunks.finish()
        self._began = False
        self._held = bytearray()
        """Text that is held back, as the inside of a JSON string: such insides can be joined."""

    def write_to(self, exchange: Exchange) -> None:
        """Write to this one, which stands before the reply's own."""
        self._exchange = exchange

    def on_delta(self, delta: Delta) -> None:
        """More output. The first leaves at once."""
        text, is_first = delta.text, not self._began
        if not is_first and text and not delta.thought and not (exchange := self._exchange).holds:
            exchange.write(self._prefix + (delta.encoded or _encode(text)) + self._suffix)
            reply = self._reply  # `Reply.count`, without a call.
            reply.num_produced = produced = reply.num_produced + len(delta.token_ids)
            if produced >= reply.next_slice:
                reply.listener.on_tokens(reply)
            return
        if delta.thought:
            self._think(delta)
        if is_first and not self._began:
            self._begin()
        if text:
            exchange = self._exchange
            if exchange.holds and not is_first:
                self._hold(_encode(text)[1:-1])
            else:
                exchange.write(self._prefix + _encode(text) + self._suffix)
        self._reply.count(len(delta.token_ids))

    def _think(self, delta: Delta) -> None:
        """Reasoning that a worker tells apart: shown where the model's has a place."""

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
            before, after = self._finish
            self._exchange.write(b'%b"%b"%b' % (before, finish.reason.value.encode(), after))
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


_END = b'"usage":null}\n\n'


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    """As vLLM writes it: the details come with the last chunk of all."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class UsageWriter:
    """Stands before an exchange, for the sinks of one reply.

    Holds nothing back, for what is held has no usage of its own.
    """

    holds = False

    def __init__(self, exchange: Exchange, num_prompt: int) -> None:
        self._exchange, self._num_prompt = exchange, num_prompt
        self.num_generated = 0
        """Of all choices."""

    def as_exchange(self) -> Exchange:
        """For a sink, which uses nothing else of one."""
        return cast(Exchange, self)

    def write(self, data: bytes) -> None:
        """Write one chunk."""
        if data.endswith(_END):
            usage = _Usage(
                prompt_tokens=self._num_prompt,
                completion_tokens=self.num_generated,
                total_tokens=self._num_prompt + self.num_generated,
            )
            data = b'%b"usage":%b}\n\n' % (data[: -len(_END)], _encode(usage))
        self._exchange.write(data)


_END_OF_CHOICE = b"}]"


class TokenIdWriter:
    """Stands before an exchange, for the sink of one choice: its chunks have the ids of their tokens, as
    vLLM's have. The first has the prompt's too: those of a chat stand beside its choices.
    """

    holds = False

    def __init__(self, exchange: Exchange, prompt: Sequence[int], *, is_chat: bool) -> None:
        self._exchange, self._is_chat = exchange, is_chat
        self._prompt: Sequence[int] | None = prompt
        self.token_ids: list[int] = []
        """Of the next chunk."""

    def as_exchange(self) -> Exchange:
        """For a sink, which uses nothing else of one."""
        return cast(Exchange, self)

    def write(self, data: bytes) -> None:
        """Write one chunk."""
        of_choice, beside = b',"token_ids":%b' % _encode(self.token_ids), b""
        self.token_ids = []
        if self._prompt is not None:
            of_prompt = b',"prompt_token_ids":%b' % _encode(self._prompt)
            self._prompt = None
            if self._is_chat:
                beside = of_prompt
            else:
                of_choice += of_prompt
        at = data.rindex(_END_OF_CHOICE)
        end = at + len(_END_OF_CHOICE)
        self._exchange.write(b"%b%b%b%b%b" % (data[:at], of_choice, _END_OF_CHOICE, beside, data[end:]))


class TokenIdSink:
    """Tells a choice's writer the ids of a delta's tokens before its chunk is written."""

    __slots__ = ("_sink", "_writer")

    def __init__(self, sink: Sink, writer: TokenIdWriter) -> None:
        self._sink, self._writer = sink, writer

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        self._writer.token_ids += delta.token_ids
        self._sink.on_delta(delta)

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        self._sink.on_finish(finish)


class CountingSink:
    """Counts a choice's tokens before its chunk is written."""

    __slots__ = ("_sink", "_writer")

    def __init__(self, sink: Sink, writer: UsageWriter) -> None:
        self._sink, self._writer = sink, writer

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        self._writer.num_generated += len(delta.token_ids)
        self._sink.on_delta(delta)

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        self._sink.on_finish(finish)


def annotated(
    reply: StreamReply,
    sinks: Sequence[TextSink],
    *,
    num_prompt: int | None,
    prompt_ids: Sequence[Sequence[int]],
    is_chat: bool,
) -> Sequence[Sink]:
    """The sinks. With `num_prompt`, the tokens of all prompts, every chunk has the usage until there; with
    `prompt_ids`, each choice's prompt, it has the ids of its tokens.
    """
    exchange, found = reply.exchange, list[Sink](sinks)
    if num_prompt is not None:
        writer = UsageWriter(exchange, num_prompt)
        exchange = writer.as_exchange()
        for sink in sinks:
            sink.write_to(exchange)
        found = [CountingSink(sink, writer) for sink in found]
    if prompt_ids:
        writers = [TokenIdWriter(exchange, prompt, is_chat=is_chat) for prompt in prompt_ids]
        for sink, ids in zip(sinks, writers, strict=True):
            sink.write_to(ids.as_exchange())
        found = [TokenIdSink(sink, ids) for sink, ids in zip(found, writers, strict=True)]
    return found
