"""Answers of the Responses API: a chat's output put together as items, at the end or while it streams.

response.created, response.in_progress
    response.output_item.added                                 a reasoning, a message or a call begins
        response.content_part.added                                (not of a call)
        response.reasoning_text.delta ..., .done                   what it consists of
        response.output_text.delta ..., .done
        response.function_call_arguments.delta ..., .done
        response.content_part.done
    response.output_item.done
response.completed | response.incomplete | response.failed

Every event has its number. One choice, so one sink, which numbers them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import msgspec

from penstock.backends.base import Delta, Finish, ToolCallPiece
from penstock.gateway.http.errors import error_answer, error_response
from penstock.gateway.http.exchange import Response
from penstock.gateway.relay.relay import StreamReply, chat_logprobs
from penstock.gateway.relay.reply import Context, Reply
from penstock.protocol.openai import ContentLogprob, UsageBody
from penstock.protocol.responses import (
    CallItem,
    IncompleteDetails,
    InputDetails,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseFault,
    ResponseUsage,
)
from penstock.text.reasoning import AnswerParser
from penstock.text.tools import CallPiece, Text, Thought, ToolEvent
from penstock.types import FinishReason

_encode = msgspec.json.Encoder().encode
Event = tuple[str, dict[str, Any]]
"""Its type, and its fields beside the number."""


class Draft(Protocol):
    """A response that is being answered."""

    body: ResponseBody
    """As it was when nothing was answered."""

    def keep(self, body: ResponseBody, finish: Callable[[ResponseBody], None]) -> None:
        """Store the response, if it is to be stored, then finish it; it says itself whether it is stored."""
        ...

    def renamed(self, error: Exception) -> Exception:
        """An error in the words of the request."""
        ...


class _Part:
    """An item that may grow: where it stands, and its text or arguments so far."""

    __slots__ = ("item", "pieces", "where")

    def __init__(self, item: OutputItem, index: int) -> None:
        self.item = item
        self.pieces: list[str] = []
        self.where: dict[str, Any] = {"item_id": item.id, "output_index": index}

    def begun(self) -> Event:
        """The event of a new item: the item as it is now, for it will change."""
        fields = {"output_index": self.where["output_index"], "item": msgspec.structs.replace(self.item)}
        return "response.output_item.added", fields

    def event(self, kind: str, **fields: object) -> Event:
        """An event about the one part of a message or of reasoning."""
        return kind, {**self.where, "content_index": 0, **fields}

    def grow(self, arguments: str) -> list[Event]:
        """More arguments of a call."""
        if not arguments:
            return []
        self.pieces.append(arguments)
        return [("response.function_call_arguments.delta", {**self.where, "delta": arguments})]

    def end(self, status: str) -> list[Event]:
        """Fill the item in."""
        item, text = self.item, "".join(self.pieces)
        item.status = status
        sent: list[Event] = []
        if isinstance(item, CallItem):
            item.arguments = text
            fields = {**self.where, "name": item.name, "arguments": text}
            sent.append(("response.function_call_arguments.done", fields))
        else:
            part = item.content[0]
            part.text = text
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            sent.append(self.event(f"response.{part.type}.done", text=text, **more))
            sent.append(self.event("response.content_part.done", part=part))
        fields = {"output_index": self.where["output_index"], "item": item}
        return [*sent, ("response.output_item.done", fields)]


class Items:
    """The output, item by item, and the events that tell of it."""

    def __init__(self, response_id: str, new_call_id: Callable[[], str]) -> None:
        self.items: list[OutputItem] = []
        self._suffix, self._new_call_id = response_id.partition("_")[2], new_call_id
        self._open: _Part | None = None
        """The part that grows now. The next item ends it."""
        self._passed: dict[int, _Part] = {}
        """Calls of a provider, by their index there. Parts of several may come in turns, with text between
        them, so each is open until the end."""
        self._white = ""
        """White space in front of a message that may never come."""
        self._logprobs: list[ContentLogprob] = []
        """Of text that was not shown yet."""

    def push(
        self, events: Sequence[ToolEvent], logprobs: Sequence[ContentLogprob] = (), num_thoughts: int = 0
    ) -> list[Event]:
        """More of the answer; `logprobs` belong to its tokens, of which `num_thoughts` more, the first that
        were not shown, are now known to be reasoning.
        """
        self._logprobs = [*self._logprobs, *logprobs][num_thoughts:]
        sent: list[Event] = []
        for event in events:
            match event:
                case Text(text):
                    sent += self._text(text)
                case Thought(text):
                    sent += self._thought(text)
                case CallPiece():
                    if event.name:
                        sent += self._begin(self._call(event.name, self._new_call_id()))
                    assert self._open is not None, "a call's first piece has its name"
                    sent += self._open.grow(event.arguments)
        if events and not isinstance(events[-1], Text):
            self._logprobs = []  # Of what is no text.
        return sent

    def passed(self, piece: ToolCallPiece) -> list[Event]:
        """Part of a call that a provider made: its own id, for the call's answer goes back to it."""
        sent: list[Event] = []
        if (part := self._passed.get(piece.index)) is None:
            sent += self._close("completed")
            part = self._added(self._call(piece.name, piece.id or self._new_call_id()))
            self._passed[piece.index] = part
            sent.append(part.begun())
        return sent + part.grow(piece.arguments)

    def finish(self, *, is_whole: bool) -> list[Event]:
        """The end. An answer of nothing is an empty message."""
        status = "completed" if is_whole else "incomplete"
        sent = [] if any(not isinstance(item, ReasoningItem) for item in self.items) else self._message()
        sent += self._close(status)
        passed, self._passed = self._passed, {}
        for part in passed.values():
            sent += part.end(status)
        return sent

    def _text(self, text: str) -> list[Event]:
        if self._open is None or not isinstance(self._open.item, MessageItem):
            text = self._white + text
            if not text.strip():
                self._white = text
                return []
        sent = self._message()
        self._white = ""
        part = self._open
        assert part is not None
        part.pieces.append(text)
        shown, self._logprobs = self._logprobs, []
        cast(MessageItem, part.item).content[0].logprobs += shown
        return [*sent, part.event("response.output_text.delta", delta=text, logprobs=shown)]

    def _message(self) -> list[Event]:
        """Open a message, if none is."""
        if self._open is not None and isinstance(self._open.item, MessageItem):
            return []
        return self._begin(MessageItem(id=self._id("msg")))

    def _thought(self, text: str) -> list[Event]:
        sent: list[Event] = []
        if self._open is None or not isinstance(self._open.item, ReasoningItem):
            sent = self._begin(ReasoningItem(id=self._id("rs")))
        assert self._open is not None
        self._open.pieces.append(text)
        return [*sent, self._open.event("response.reasoning_text.delta", delta=text)]

    def _call(self, name: str, call_id: str) -> CallItem:
        return CallItem(id=self._id("fc"), call_id=call_id, name=name)

    def _begin(self, item: OutputItem) -> list[Event]:
        """The next item, which grows from now on."""
        sent = self._close("completed")
        part = self._open = self._added(item)
        sent.append(part.begun())
        if isinstance(item, CallItem):
            return sent
        if isinstance(item, MessageItem):
            item.content, shown = [OutputText(logprobs=[])], OutputText()
        else:
            item.content, shown = [ReasoningText()], ReasoningText()
        return [*sent, part.event("response.content_part.added", part=shown)]

    def _added(self, item: OutputItem) -> _Part:
        self._white = ""
        self.items.append(item)
        return _Part(item, len(self.items) - 1)

    def _close(self, status: str) -> list[Event]:
        """End the item that grows."""
        part, self._open = self._open, None
        return [] if part is None else part.end(status)

    def _id(self, kind: str) -> str:
        """Says of which response it is and where in it: an item can be found by its id."""
        return f"{kind}_{self._suffix}_{len(self.items)}"


def _is_whole(reason: FinishReason) -> bool:
    """Whether the answer ended by itself: with its text, or with calls (providers say which)."""
    return reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)


def _items_of(context: Context) -> Items:
    """Those of a new response. A reply that they led back to would stay until a collection, which is rare."""
    ids = context.ids
    return Items(context.head.id, lambda: ids.take("call"))


def answered(
    draft: ResponseBody, items: Sequence[OutputItem], reason: FinishReason, usage: UsageBody, now_s: int
) -> ResponseBody:
    """The response at its good end."""
    is_whole = _is_whole(reason)
    cut = "max_output_tokens" if reason is FinishReason.LENGTH else reason.value
    details = usage.completion_tokens_details
    reasoning = details.reasoning_tokens if isinstance(details, msgspec.Struct) else msgspec.UNSET
    return msgspec.structs.replace(
        draft,
        status="completed" if is_whole else "incomplete",
        completed_at=now_s if is_whole else None,
        incomplete_details=None if is_whole else IncompleteDetails(cut),
        output=list(items),
        usage=ResponseUsage(
            input_tokens=usage.prompt_tokens or 0,
            input_tokens_details=InputDetails(usage.cached_tokens or 0),
            output_tokens=usage.completion_tokens or 0,
            output_tokens_details=OutputDetails(reasoning or 0),
            total_tokens=usage.total_tokens or 0,
        ),
    )


class WholeResponse(Reply):
    """A response in one piece."""

    __slots__ = ("_began", "_draft", "_items", "_now_s", "_parser", "_reason")

    def __init__(
        self, context: Context, draft: Draft, parser: AnswerParser, now_s: Callable[[], int]
    ) -> None:
        super().__init__(context)
        self._draft, self._parser, self._now_s = draft, parser, now_s
        self._items = _items_of(context)
        self._began = False
        self._reason = FinishReason.STOP

    def on_delta(self, delta: Delta) -> None:
        """More output (the sink of its one stream is this reply itself)."""
        if not self._began:
            self._began = True
            self.first_output()
        num_thoughts = self._parser.num_thoughts(delta.token_ids, delta.thought)
        if self.guarded(self._take, delta, num_thoughts) is None:
            return
        self.thought(num_thoughts)
        for piece in delta.tool_calls:
            self._items.passed(piece)
        self.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end of the stream; the answer follows when all is settled."""
        finish = self.ended(finish)
        self._reason = finish.reason
        if finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):  # Another attempt may continue.
            self.guarded(self._take_end, finish)
        self.choice_finished(0, finish)

    def _take(self, delta: Delta, num_thoughts: int) -> list[Event]:
        events = self._parser.push(delta.text, delta.thought)
        return self._items.push(events, chat_logprobs(delta.logprobs).content or (), num_thoughts)

    def _take_end(self, finish: Finish) -> None:
        self._items.push(self._parser.finish())
        self._items.finish(is_whole=_is_whole(finish.reason))

    def complete(self) -> None:
        """The answer is there: store it and send it."""
        items, usage = self._items.items, self.exchange.usage()
        body = answered(self._draft.body, items, self._reason, usage, self._now_s())
        exchange = self.exchange
        self._draft.keep(body, lambda kept: exchange.respond(Response(body=_encode(kept))))

    def send_error(self, error: Exception) -> None:
        """Nothing was sent yet, so the status can tell."""
        self.exchange.respond(error_response(self._draft.renamed(error)))


class ResponseStream(StreamReply):
    """A response that streams."""

    __slots__ = ("_draft", "_items", "_now_s", "_num_events", "_parser", "_reason", "_shows_logprobs")

    def __init__(
        self,
        context: Context,
        draft: Draft,
        parser: AnswerParser,
        now_s: Callable[[], int],
        *,
        shows_logprobs: bool,
    ) -> None:
        super().__init__(context, "response")
        self._draft, self._parser, self._now_s = draft, parser, now_s
        self._shows_logprobs = shows_logprobs
        self._items = _items_of(context)
        self._num_events = 0
        self._reason = FinishReason.STOP

    def on_delta(self, delta: Delta) -> None:
        """More output (the sink of its one stream is this reply itself)."""
        self._begin_once()
        num_thoughts = self._parser.num_thoughts(delta.token_ids, delta.thought)
        if self.guarded(self._take, delta, num_thoughts) is None:
            return
        self.thought(num_thoughts)
        for piece in delta.tool_calls:
            self._tell(self._items.passed(piece))
        self.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end of the stream; the last event follows when all is settled."""
        finish = self.ended(finish)
        self._reason = finish.reason
        if finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):
            self._begin_once()
            self.guarded(self._take_end, finish)
        self.choice_finished(0, finish)

    def _take(self, delta: Delta, num_thoughts: int) -> bool:
        logprobs = chat_logprobs(delta.logprobs).content or () if self._shows_logprobs else ()
        events = self._parser.push(delta.text, delta.thought)
        self._tell(self._items.push(events, logprobs, num_thoughts))
        return True

    def _take_end(self, finish: Finish) -> None:
        self._tell(self._items.push(self._parser.finish()))
        self._tell(self._items.finish(is_whole=_is_whole(finish.reason)))

    def complete(self) -> None:
        """The end of a stream that went well: store the response, then the last event."""
        items = self._items.items
        body = answered(self._draft.body, items, self._reason, self.exchange.usage(), self._now_s())
        self._draft.keep(body, self._end)

    def _end(self, body: ResponseBody) -> None:
        self.exchange.end(self._event(f"response.{body.status}", {"response": body}))

    def send_error(self, error: Exception) -> None:
        """A status if there is still time for one, else a last event and a closed connection."""
        error = self._draft.renamed(error)
        if not self.exchange.streaming:
            self.exchange.respond(error_response(error))
            return
        if not self._num_events:
            self._created()
        answer = error_answer(error)
        fault = ResponseFault(
            code=str(answer.code or answer.type or "server_error"), message=answer.message or ""
        )
        body = msgspec.structs.replace(
            self._draft.body, status="failed", error=fault, output=list(self._items.items)
        )
        self.exchange.end_broken(self._event("response.failed", {"response": body}))

    def _begin_once(self) -> None:
        if not self._num_events:
            self.begin()
            self._created()

    def _created(self) -> None:
        for kind in ("response.created", "response.in_progress"):
            self.exchange.write(self._event(kind, {"response": self._draft.body}))

    def _tell(self, events: Sequence[Event]) -> None:
        if events:
            self.exchange.write(b"".join(self._event(*event) for event in events))

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = _encode({"type": kind, **fields, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
