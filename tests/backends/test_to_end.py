"""An answer that came in one read, its end included, says what it says when each event is read by itself."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from test_envelope import READERS, WORDS, block_of, event

from penstock.backends.base import Finish, GenerateRequest
from penstock.backends.http.chunks import Holes
from penstock.backends.http.context import LeavingStream, StreamContext
from penstock.backends.http.dialects.base import AtOnce, Piece, joined
from penstock.backends.http.stream import HttpStream
from penstock.backends.http.terms import HTTP_LIMITS, Anomaly
from penstock.backends.http.to_end import read_to_end
from penstock.clock import ManualClock
from penstock.errors import EngineFault, WorkerUnavailable
from penstock.text.detokenizer import PieceTokens
from penstock.types import FinishReason, RequestId, SamplingParams

TOKENIZER = byte_tokenizer()
PIECES = PieceTokens(TOKENIZER)
REQUEST = GenerateRequest(
    request_id=RequestId("r"),
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=40, stop_token_ids=(256,)),
)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
READ_AT_ONCE = ("chat", "vllm")


class Owner:
    """Notes what a stream tells of its worker."""

    def __init__(self) -> None:
        self.odd = list[Anomaly]()

    def leave(self, stream: LeavingStream, finish: Finish) -> None: ...

    def noted(self, anomaly: Anomaly, detail: str) -> None:
        self.odd.append(anomaly)

    def lost(self, why: str, *, unreachable: bool) -> None: ...


def received(
    kind: str, reads: Sequence[bytes], model: str, request: GenerateRequest, *, at_once: bool | AtOnce = True
) -> tuple[Any, ...]:
    """What a stream makes of these reads of an answer's body, also of one that reads nothing `at_once`."""
    owner, recorder = Owner(), Recorder()
    context = StreamContext(TOKENIZER, PIECES, Holes(PIECES), ManualClock(), owner, HTTP_LIMITS)
    made = type("Reader", (READERS[kind],), {} if at_once is True else {"at_once": at_once or None})
    reader = made(request)
    stream = HttpStream(context, request, recorder, reader, model=model, trusts_prompt=False, may_move=True)
    stream.on_response(200, {b"content-type": b"text/event-stream"})
    for each in reads:
        if recorder.finish is None:
            stream.on_body(each)
    if recorder.finish is None:
        stream.on_end()
    ids = [token_id for delta in recorder.deltas for token_id in delta.token_ids]
    logprobs = [each for delta in recorder.deltas for each in delta.logprobs]
    end = recorder.finish
    assert end is not None
    error = None if end.error is None else (type(end.error), str(end.error))
    return recorder.text, ids, logprobs, end.reason, end.usage, end.stop, error, end.resume, owner.odd


def at_once(kind: str, events: Sequence[bytes]) -> Piece | None:
    """As a reader tells it; checked against each event read by itself."""
    reader = READERS[kind](REQUEST)
    found = read_to_end(block_of([*events, b"[DONE]"]), reader, len(events) + 1)
    if found is not None:
        held: Piece | None = reader.read(events[0])
        for each in events[1:]:
            assert held is not None
            held = joined(held, reader.read(each))
        assert held is not None
        assert joined(held, Piece(done=True)) == found
    return found


def answer(kind: str, words: Sequence[str], **end: Any) -> list[dict[str, Any]]:
    """As vLLM's servers send it, and others: the first event has the prompt's ids, or a role and no text."""
    events = [event(kind, word, [number]) for number, word in enumerate(words)]
    if kind == "chat":
        events.insert(0, event(kind, "", delta={"role": "assistant", "content": ""}))
        events.append(event(kind, "", **{"delta": {}, "finish_reason": "stop", **end}))
    else:
        events[0]["choices"][0]["prompt_token_ids"] = [1, 2]
        events[-1]["choices"][0] |= {"finish_reason": "stop", "stop_reason": None, **end}
    return [*events, {"id": "c-1", "model": "served", "choices": [], "usage": USAGE}]


def encoded(events: Sequence[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(each).encode() for each in events]


@pytest.mark.parametrize("kind", READ_AT_ONCE)
def test_a_whole_answer_is_read_at_once(kind: str) -> None:
    found = at_once(kind, encoded(answer(kind, WORDS)))
    assert found is not None
    assert found.finish is not None
    assert found.usage is not None
    assert found.done
    assert found.text == ("".join(WORDS) if kind == "chat" else "")
    assert found.token_ids == (tuple(range(len(WORDS))) if kind == "vllm" else ())


SAYS_MORE: tuple[dict[str, Any], ...] = (
    {"error": "overloaded"},
    {"object": "error", "message": "m"},
    {"model": "another"},
    {"choices": [{"finish_reason": "stop", "delta": {"content": "x"}, "text": "x", "token_ids": [1]}]},
    {"choices": [{"delta": {"reasoning_content": "so"}, "text": "so"}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "text": "so", "token_ids": None}]},
    {"choices": [{"delta": {"content": "a"}, "text": "a", "token_ids": [], "logprobs": {"content": []}}]},
    {"choices": 1},
)


@pytest.mark.parametrize("kind", READ_AT_ONCE)
@pytest.mark.parametrize("more", SAYS_MORE, ids=str)
def test_an_answer_that_says_more_is_read_event_by_event(kind: str, more: dict[str, Any]) -> None:
    events = answer(kind, WORDS)
    events.insert(2, events[2] | more)
    assert read_to_end(block_of([*encoded(events), b"[DONE]"]), READERS[kind](REQUEST), 9) is None
    one_by_one = [block_of([each]) for each in [*encoded(events), b"[DONE]"]]
    assert received(kind, [b"".join(one_by_one)], "served", REQUEST) == received(
        kind, one_by_one, "served", REQUEST
    )


@pytest.mark.parametrize(
    "between", [b"\n", b": a comment\n\n", b"event: x\n", b"data: 1\n", b'{"x":1}\n', b" \n"]
)
def test_a_line_that_is_no_event_is_never_taken_for_one(between: bytes) -> None:
    first, *others = encoded(answer("vllm", WORDS))
    broken = b'{"model":"served","choices":[]\n,"usage":null}'
    for block in (
        block_of([first]) + between + block_of([*others, b"[DONE]"]),
        block_of([first])[:-1] + between + b"\n" + block_of([*others, b"[DONE]"]),
        b"data: " + broken + b"\n\n" + block_of([*others, b"[DONE]"]),
        block_of([first + first, *others, b"[DONE]"]),
    ):
        assert read_to_end(block, READERS["vllm"](REQUEST), 9) is None


def test_of_many_texts_none_is_read_at_once() -> None:
    events = encoded(answer("chat", [" a"] * 40))
    assert at_once("chat", events) is None
    assert at_once("vllm", encoded(answer("vllm", [" a"] * 200))) is not None


NO_ID = (-1, 2**31, 2**32 - 1, 2**63, 10**30)
texts = st.text(max_size=12) | st.sampled_from(WORDS)
token_ids = st.integers(0, 256) | st.sampled_from([257, 100_000, 2**31 - 1, *NO_ID])
"""Also some that the tokenizer does not know, and some that are none."""
ends = st.fixed_dictionaries(
    {},
    optional={
        "finish_reason": st.sampled_from(["stop", "length", "abort", "tool_calls", "", None, "new"]),
        "stop_reason": st.sampled_from([None, 256, 7, "word"]),
        "logprobs": st.sampled_from([None, {"content": []}]),
    },
)


@pytest.mark.parametrize("no_id", NO_ID)
@pytest.mark.parametrize("reads", [1, 2])
def test_an_answer_of_full_length_with_an_id_that_is_none_is_not_charged(no_id: int, reads: int) -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, max_tokens=1)
    request = msgspec.structs.replace(REQUEST, sampling=sampling)
    made = answer("vllm", ["a"], finish_reason="length")
    made[0]["choices"][0]["token_ids"] = [no_id]
    blocks = [block_of(each) for each in (encoded(made), [b"[DONE]"])]
    text, ids, _, reason, usage, _, error, resume, odd = received(
        "vllm", [b"".join(blocks)] if reads == 1 else blocks, "served", request
    )
    assert (text, ids, reason, usage.completion_tokens) == ("", [], FinishReason.ERROR, 0)
    assert error is not None
    assert error[0] is WorkerUnavailable  # Another worker is asked.
    assert resume == ()
    assert odd == [Anomaly.CORRUPT]


def test_an_answer_that_cannot_be_taken_is_not_charged() -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, max_tokens=1)
    request = msgspec.structs.replace(REQUEST, sampling=sampling)
    piece = Piece(token_ids=(2**31,), finish=FinishReason.LENGTH, done=True)
    whole = block_of([*encoded(answer("vllm", ["a"])), b"[DONE]"])
    text, ids, _, reason, usage, _, error, *_ = received(
        "vllm", [whole], "served", request, at_once=AtOnce(9, lambda lines, num_events: piece)
    )
    assert (text, ids, reason, usage.completion_tokens) == ("", [], FinishReason.ERROR, 0)
    assert error is not None
    assert error[0] is EngineFault


@settings(max_examples=200)
@given(
    kind=st.sampled_from(sorted(READERS)),
    said=st.lists(st.tuples(texts, st.lists(token_ids, max_size=3)), min_size=1, max_size=12),
    end=ends,
    more=st.lists(st.tuples(st.integers(0, 13), st.sampled_from(SAYS_MORE)), max_size=1),
    damage=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 400), st.binary(max_size=3)), max_size=1),
    has_usage=st.booleans(),
    has_done=st.booleans(),
    model=st.sampled_from(["", "served", "another"]),
    max_tokens=st.sampled_from([1, 3, 40]),
)
def test_whatever_comes_at_once_is_taken_as_if_it_was_cut_and_read(
    kind: str,
    said: list[tuple[str, list[int]]],
    end: dict[str, Any],
    more: list[tuple[int, dict[str, Any]]],
    damage: list[tuple[int, int, bytes]],
    has_usage: bool,
    has_done: bool,
    model: str,
    max_tokens: int,
) -> None:
    made = answer(kind, [text for text, _ in said], **end)
    for each, (_, ids) in zip(made, said, strict=False):
        if kind == "vllm":
            each["choices"][0]["token_ids"] = ids
    made = made if has_usage else made[:-1]
    for place, what in more:
        made[place % len(made)] |= what
    events = [*encoded(made), b"[DONE]"] if has_done else encoded(made)
    for number, place, bytes_ in damage:
        whole = events[number % len(events)]
        at = place % (len(whole) + 1)
        damaged = whole[:at] + bytes_ + whole[at + len(bytes_) :]
        events[number % len(events)] = damaged.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    sampling = msgspec.structs.replace(REQUEST.sampling, max_tokens=max_tokens)
    request = msgspec.structs.replace(REQUEST, sampling=sampling)
    found = received(kind, [block_of(events)], model, request)
    assert found == received(kind, [block_of(events)], model, request, at_once=False)
    try:
        at_once(kind, events[: len(events) - has_done])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AssertionError("an event that cannot be read was read") from error
