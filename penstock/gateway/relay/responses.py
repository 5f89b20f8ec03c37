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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import msgspec

from penstock.backends.base import Delta, Finish, ToolCallPiece
from penstock.gateway.http.errors import error_answer, error_response
from penstock.gateway.http.exchange import Response
from penstock.gateway.relay.collect import CollectSink, WholeReply
from penstock.gateway.relay.relay import StreamReply, chat_logprobs
from penstock.gateway.relay.reply import Context
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


class Items:
    """The output, item by item, and the events that tell of it."""

    def __init__(self, response_id: str, new_call_id: Callable[[], str]) -> None:
        self.items: list[OutputItem] = []
        self._suffix, self._new_call_id = response_id.partition("_")[2], new_call_id
        self._pieces: list[str] = []
        """Of the item that is open."""
        self._is_open = False
        self._white = ""
        """White space in front of a message that may never come."""
        self._logprobs: list[ContentLogprob] = []
        self._passed = -1
        """The call of a provider that is open, by its index there."""

    def push(self, events: Iterable[ToolEvent], logprobs: Sequence[ContentLogprob] = ()) -> list[Event]:
        """More of the answer; `logprobs` belong to its text."""
        self._logprobs += logprobs
        told: list[Event] = []
        for event in events:
            match event:
                case Text(text):
                    told += self._text(text)
                case Thought(text):
                    told += self._thought(text)
                case CallPiece():
                    if event.name:
                        told += self._call(event.name, self._new_call_id())
                    told += self._arguments(event.arguments)
        return told

    def passed(self, piece: ToolCallPiece) -> list[Event]:
        """Part of a call that a provider made: its own id, for the call's answer goes back to it."""
        told: list[Event] = []
        if piece.index != self._passed:
            self._passed = piece.index
            told += self._call(piece.name, piece.id or self._new_call_id())
        return told + self._arguments(piece.arguments)

    def finish(self, *, is_whole: bool) -> list[Event]:
        """The end. An answer of nothing is an empty message."""
        told = [] if any(not isinstance(item, ReasoningItem) for item in self.items) else self._message()
        return told + self._close("completed" if is_whole else "incomplete")

    def _text(self, text: str) -> list[Event]:
        if not (self._is_open and isinstance(self.items[-1], MessageItem)):
            text = self._white + text
            if not text.strip():
                self._white = text
                return []
        told = self._message()
        self._white = ""
        self._pieces.append(text)
        shown, self._logprobs = self._logprobs, []
        cast(MessageItem, self.items[-1]).content[0].logprobs += shown
        return [*told, self._delta("response.output_text.delta", delta=text, logprobs=shown)]

    def _message(self) -> list[Event]:
        """Open a message, if none is."""
        if self._is_open and isinstance(self.items[-1], MessageItem):
            return []
        told = self._open(MessageItem(id=self._id("msg")))
        item = cast(MessageItem, self.items[-1])
        item.content = [OutputText(logprobs=[])]
        return [*told, self._delta("response.content_part.added", part=OutputText())]

    def _thought(self, text: str) -> list[Event]:
        told: list[Event] = []
        if not (self._is_open and isinstance(self.items[-1], ReasoningItem)):
            told = self._open(ReasoningItem(id=self._id("rs")))
            cast(ReasoningItem, self.items[-1]).content = [ReasoningText()]
            told.append(self._delta("response.content_part.added", part=ReasoningText()))
        self._pieces.append(text)
        return [*told, self._delta("response.reasoning_text.delta", delta=text)]

    def _call(self, name: str, call_id: str) -> list[Event]:
        return self._open(CallItem(id=self._id("fc"), call_id=call_id, name=name))

    def _arguments(self, piece: str) -> list[Event]:
        if not piece:
            return []
        self._pieces.append(piece)
        return [("response.function_call_arguments.delta", {**self._where(), "delta": piece})]

    def _open(self, item: OutputItem) -> list[Event]:
        told = self._close("completed")
        self._is_open, self._white = True, ""
        self.items.append(item)
        return [*told, ("response.output_item.added", {"output_index": len(self.items) - 1,
            "item": msgspec.structs.replace(item)})]  # fmt: skip

    def _close(self, status: str) -> list[Event]:
        """End the item that is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        self._pieces = []
        item.status = status
        told: list[Event] = []
        if isinstance(item, CallItem):
            item.arguments = text
            fields = {**self._where(), "name": item.name, "arguments": text}
            told.append(("response.function_call_arguments.done", fields))
        else:
            part = item.content[0]
            part.text = text
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            told.append(self._delta(f"response.{part.type}.done", text=text, **more))
            told.append(self._delta("response.content_part.done", part=part))
        told.append(("response.output_item.done", {"output_index": len(self.items) - 1, "item": item}))
        return told

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _delta(self, kind: str, **fields: object) -> Event:
        """An event about the one part of the item that is open."""
        return kind, {**self._where(), "content_index": 0, **fields}

    def _id(self, kind: str) -> str:
        """Says of which response it is and where in it: an item can be found by its id."""
        return f"{kind}_{self._suffix}_{len(self.items)}"


def answered(
    draft: ResponseBody, items: Sequence[OutputItem], reason: FinishReason, usage: UsageBody, now_s: int
) -> ResponseBody:
    """The response at its good end."""
    is_whole = reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    cut = "max_output_tokens" if reason is FinishReason.LENGTH else reason.value
    details = usage.completion_tokens_details
    reasoning = details.reasoning_tokens if isinstance(details, msgspec.Struct) else None
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


class WholeResponse(WholeReply):
    """A response in one piece."""

    __slots__ = ("_draft", "_now_s")

    def __init__(
        self, context: Context, draft: Draft, parser: AnswerParser, now_s: Callable[[], int]
    ) -> None:
        super().__init__(context, [parser])
        self._draft, self._now_s = draft, now_s

    def complete(self) -> None:
        """The answer is there: store it and send it."""
        (sink,) = self.sinks
        body = answered(self._draft.body, self._items(sink), sink.reason, self.tally.usage(), self._now_s())
        exchange = self.exchange
        self._draft.keep(body, lambda kept: exchange.respond(Response(body=_encode(kept))))
        self.sinks = ()  # They lead back here.

    def send_error(self, error: Exception) -> None:
        """Nothing was sent yet, so the status can tell."""
        super().send_error(self._draft.renamed(error))

    def _items(self, sink: CollectSink) -> list[OutputItem]:
        items = Items(self.head.id, lambda: self.ids.take("call"))
        items.push(sink.events, chat_logprobs(sink.logprobs).content or ())
        for index, call in sorted(sink.passed_calls.items()):
            whole = call.whole()
            function = whole.function
            assert function is not None
            items.passed(
                ToolCallPiece(
                    index=index,
                    id=whole.id or "",
                    name=function.name or "",
                    arguments=function.arguments or "",
                )
            )
        items.finish(is_whole=sink.reason is FinishReason.STOP)
        return items.items


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
        ids = context.ids  # Not `self`, which would keep itself alive: cycles are hardly ever collected.
        self._items = Items(self.head.id, lambda: ids.take("call"))
        self._num_events = 0
        self._reason = FinishReason.STOP

    def on_delta(self, delta: Delta) -> None:
        """More output (the sink of its one stream is this reply itself)."""
        self._begin_once()
        logprobs = chat_logprobs(delta.logprobs).content or () if self._shows_logprobs else ()
        try:
            self._tell(self._items.push(self._parser.push(delta.text, delta.thought), logprobs))
        except Exception as error:  # noqa: BLE001 - what a model writes must not end other streams.
            self.crash(error)
            return
        self.thought(self._parser.num_thoughts(delta.token_ids, delta.thought))
        for piece in delta.tool_calls:
            self._tell(self._items.passed(piece))
        self.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        """The end of the stream; the last event follows when all is settled."""
        finish = self.ended(finish)
        self._reason = finish.reason
        if finish.reason not in (FinishReason.ERROR, FinishReason.ABORT):
            self._begin_once()
            try:
                self._tell(self._items.push(self._parser.finish()))
                self._tell(self._items.finish(is_whole=finish.reason is FinishReason.STOP))
            except Exception as error:  # noqa: BLE001 - what a model writes must not end other streams.
                self.crash(error)
        self.choice_finished(0, finish)

    def complete(self) -> None:
        """The end of a stream that went well: store the response, then the last event."""
        items = self._items.items
        body = answered(self._draft.body, items, self._reason, self.tally.usage(), self._now_s())
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
        told = error_answer(error)
        fault = ResponseFault(code=str(told.code or told.type or "server_error"), message=told.message or "")
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
