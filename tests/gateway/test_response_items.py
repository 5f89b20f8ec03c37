"""The items of a response, without a gateway: what they hold, and that a stream is freed with its request."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.backends.base import Delta, Finish, ToolCallPiece
from penstock.clock import ManualClock
from penstock.gateway.relay.responses import Items, ResponseStream, WholeResponse
from penstock.protocol.openai import ContentLogprob, UsageBody
from penstock.protocol.responses import ResponseBody
from penstock.text.reasoning import AnswerParser
from penstock.text.tools import CallPiece, Text, Thought
from penstock.types import FinishReason, Usage


def test_a_stream_is_freed_without_the_collector() -> None:
    class Stream(ResponseStream):
        __slots__ = ("__weakref__",)

    exchange = SimpleNamespace(on_disconnect=None, on_caught_up=None, on_full=None, terms=None)
    context = SimpleNamespace(
        exchange=exchange, clock=None, listener=None, head=SimpleNamespace(id="resp_1"), ids=None
    )
    gc.disable()
    try:
        stream = Stream(cast(Any, context), cast(Any, None), AnswerParser(), lambda: 0, shows_logprobs=False)
        found = weakref.ref(stream)
        exchange.on_disconnect = exchange.on_caught_up = exchange.on_full = None  # As when it is over.
        del stream
        assert found() is None
    finally:
        gc.enable()


def piece(index: int, arguments: str, name: str = "") -> ToolCallPiece:
    return ToolCallPiece(index=index, id=name and f"call_{name}", name=name, arguments=arguments)


INTERLEAVED = [piece(0, '{"a"', "add"), piece(1, '{"b"', "sub"), piece(0, ":1}"), piece(1, ":2}")]


def made() -> Items:
    return Items("resp_1", lambda: "call_own")


def calls_of(items: Items) -> list[tuple[str, str, str, str]]:
    found = [msgspec.to_builtins(item) for item in items.items]
    return [
        (item["call_id"], item["name"], item["arguments"], item["status"])
        for item in found
        if item["type"] == "function_call"
    ]


@pytest.mark.parametrize("text", ["", "note"])
def test_a_providers_calls_may_come_in_turns(text: str) -> None:
    items, reported = made(), list[tuple[str, dict[str, Any]]]()
    for part in INTERLEAVED:
        reported += items.passed(part)
        reported += items.push([Text(text)] if text else [])
    reported += items.finish(is_whole=True)
    assert calls_of(items) == [
        ("call_add", "add", '{"a":1}', "completed"), ("call_sub", "sub", '{"b":2}', "completed"),
    ]  # fmt: skip
    deltas: dict[str, str] = {}
    for kind, fields in reported:
        if kind.endswith("arguments.delta"):
            deltas[fields["item_id"]] = deltas.get(fields["item_id"], "") + fields["delta"]
    done = {
        fields["item_id"]: fields["arguments"] for kind, fields in reported if kind.endswith("arguments.done")
    }
    assert deltas == done
    ended = [fields["output_index"] for kind, fields in reported if kind == "response.output_item.done"]
    assert sorted(ended) == list(range(len(items.items)))
    shown = [msgspec.to_builtins(item) for item in items.items]
    assert "".join(each["content"][0]["text"] for each in shown if each["type"] == "message") == text * 4


class Drafted:
    def __init__(self) -> None:
        unset = dict.fromkeys(field.name for field in msgspec.structs.fields(ResponseBody) if field.required)
        self.body = ResponseBody(**unset)
        self.kept: list[ResponseBody] = []

    def keep(self, body: ResponseBody, finish: object) -> None:
        self.kept.append(body)

    def renamed(self, error: Exception) -> Exception:
        return error


@pytest.mark.parametrize("streams", [True, False])
def test_a_call_that_a_provider_made_is_whole_where_its_response_is(streams: bool) -> None:
    exchange = SimpleNamespace(
        is_open=True, streaming=True, write=lambda data: None, request=None, outcome=None, first_ns=1,
        reasoning_tokens=0, usage=UsageBody,
    )  # fmt: skip
    listener = SimpleNamespace(on_first_output=lambda reply: None, on_ended=lambda reply: False)
    context = SimpleNamespace(
        exchange=exchange,
        clock=ManualClock(),
        listener=listener,
        head=SimpleNamespace(id="resp_1"),
        ids=None,
    )
    draft, parser = Drafted(), AnswerParser()
    reply = (
        ResponseStream(cast(Any, context), draft, parser, lambda: 0, shows_logprobs=False)
        if streams
        else WholeResponse(cast(Any, context), draft, parser, lambda: 0)
    )
    backend = SimpleNamespace(generate=lambda request, sink: None)
    reply.start(cast(Any, backend), [(cast(Any, None), reply)])
    for part in INTERLEAVED:
        reply.on_delta(Delta("", (1,), tool_calls=(part,)))
    reply.on_finish(Finish(reason=FinishReason.TOOL_CALLS, usage=Usage()))
    (body,) = draft.kept
    assert (body.status, [item.status for item in body.output]) == ("completed", ["completed"] * 2)


def logprobs_of(items: Items) -> list[str]:
    found = [msgspec.to_builtins(item) for item in items.items if item.type == "message"]
    return [each["token"] for item in found for each in item["content"][0]["logprobs"]]


def token(text: str) -> ContentLogprob:
    return ContentLogprob(text, -1.0)


def test_log_probabilities_are_those_of_the_text() -> None:
    items = made()
    items.push([Thought("hm")], [token("hm")])
    items.push([Text("Yes")], [token("Yes")])
    items.push([], [token("<tool")])
    items.push([CallPiece(0, name="add", arguments="{}")], [token("_call>{}")])
    items.push([Text("Done")], [token("Done")])
    items.finish(is_whole=True)
    assert logprobs_of(items) == ["Yes", "Done"]


def test_tokens_that_prove_to_be_reasoning_have_none() -> None:
    items = made()
    items.push([], [token("<th")])
    items.push([], [token("ink>")], 2)
    items.push([Thought("hm"), Text("Yes")], [token("hm"), token("</think>"), token("Yes")], 2)
    items.finish(is_whole=True)
    assert logprobs_of(items) == ["Yes"]
