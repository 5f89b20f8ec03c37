"""Events that are read by what stands around their text say what they say when they are read whole."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.base import GenerateRequest
from penstock.backends.http.dialects.base import AnswerReader, Piece
from penstock.backends.http.dialects.openai import ChatReader, CompletionReader, TextReader
from penstock.backends.http.dialects.tgi import TgiReader
from penstock.backends.http.dialects.vllm import VllmReader
from penstock.backends.http.envelope import BadEvent, Envelopes
from penstock.protocol.stream import EventReader
from penstock.types import RequestId, SamplingParams

REQUEST = GenerateRequest(
    request_id=RequestId("r"), prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=100)
)
READERS = {"chat": ChatReader, "completion": CompletionReader, "text": TextReader, "vllm": VllmReader}
HEAD = {"id": "c-1", "created": 1_763_770_000, "model": "served"}


def event(kind: str, text: str, ids: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    if kind == "chat":
        return {**HEAD, "choices": [{**choice, "delta": {"content": text}, **more}]}
    if kind == "vllm":
        choice |= {"stop_reason": None, "text": text, "prompt_token_ids": None, "token_ids": list(ids)}
        return {**HEAD, "choices": [{**choice, **more}]}
    return {**HEAD, "choices": [{**choice, "text": text, **more}]}


def block_of(events: Sequence[bytes]) -> bytes:
    """As a server sends them: data of several lines has a field for each."""
    return b"".join(b"data: %b\n\n" % each.replace(b"\n", b"\ndata: ") for each in events)


def one_by_one(reader: AnswerReader, events: Sequence[bytes]) -> Iterator[Piece | str]:
    """What each says; the last is "unreadable" where that is so."""
    for each in events:
        try:
            yield reader.read(each)
        except (msgspec.DecodeError, UnicodeDecodeError):
            yield "unreadable"
            return


def through_envelopes(
    kind: str, events: Sequence[bytes], reads: int, *, joins: bool
) -> tuple[list[Piece | str], int]:
    """The same by an `Envelopes`, of which the stream's part is played here; and how many were not read."""
    reader = READERS[kind](REQUEST)
    envelopes = Envelopes(reader)
    found: list[Piece | str] = []
    num_spared = 0
    for start in range(0, len(events), reads):
        block = block_of(events[start : start + reads])
        texts = envelopes.texts(block) if joins else None
        piece = envelopes.ids(block) if joins else None
        assert texts is None or piece is None
        if texts is not None:
            piece = Piece(text="".join(texts), parts=tuple(texts))
        if piece is not None:
            found.append(piece)
            num_spared += len(piece.parts) or len(piece.token_ids) or 1
            continue
        for each in envelopes.sort(block, joins=joins):
            if isinstance(each, Piece):
                found.append(each)
                num_spared += len(each.parts) or len(each.token_ids) or 1
                continue
            try:
                piece = reader.read(each)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return [*found, "unreadable"], num_spared
            found.append(piece)
            envelopes.learn(each, piece)
    return found, num_spared


def flat(pieces: Sequence[Piece | str]) -> list[Any]:
    """Text and ids as they follow each other, and everything else in its place."""
    made: list[Any] = []
    for each in pieces:
        if not isinstance(each, Piece):
            made.append(each)
            continue
        if each.text and made and isinstance(made[-1], list) and made[-1][0] == "text":
            made[-1][1] += each.text
        elif each.text:
            made.append(["text", each.text])
        if each.token_ids and made and isinstance(made[-1], list) and made[-1][0] == "ids":
            made[-1][1] += each.token_ids
        elif each.token_ids:
            made.append(["ids", each.token_ids])
        rest = msgspec.structs.replace(each, text="", parts=(), token_ids=(), model="")
        if rest != Piece():
            made.append(rest)
    return made


def said(pieces: Sequence[Piece | str]) -> tuple[Any, ...]:
    """What they say in all: usage may come before the text that it came behind."""
    read = [each for each in pieces if isinstance(each, Piece)]
    return (
        "".join(each.text for each in read),
        [token_id for each in read for token_id in each.token_ids],
        [text for each in read for text in each.parts or (each.text,) if text],
        [(each.finish, each.stop) for each in read if each.finish is not None],
        [each.usage for each in read if each.usage is not None][-1:],
        [each for each in pieces if not isinstance(each, Piece) or each.error is not None],
    )


def check(kind: str, events: Sequence[bytes], reads: int = 1000, *, joins: bool = True) -> int:
    plain = list(one_by_one(READERS[kind](REQUEST), events))
    found, num_spared = through_envelopes(kind, events, reads, joins=joins)
    assert flat(found) == flat(plain)
    assert said(read_through(kind, events, reads, joins=joins)) == said(plain)
    return num_spared


def read_through(
    kind: str,
    events: Sequence[bytes],
    reads: int,
    *,
    joins: bool,
    model: str = "",
) -> list[Piece | str]:
    """The same by `Envelopes.read`, as a stream calls it."""
    envelopes, found = Envelopes(READERS[kind](REQUEST), model), list[Piece | str]()
    try:
        for start in range(0, len(events), reads):
            found += envelopes.read(block_of(events[start : start + reads]), joins=joins)
    except BadEvent:
        found.append("unreadable")
    return found


WORDS = (" water", "", ' "quoted" \\ and\nbroken', " Rücklauf 水車 \U0001f30a", "\u2028", ' {"content": "x"}')


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_events_that_differ_in_their_text_are_read_without_the_rest(
    kind: str, separators: tuple[str, str], ascii_only: bool
) -> None:
    events = [
        json.dumps(event(kind, word, [i, 7 * i]), separators=separators, ensure_ascii=ascii_only).encode()
        for i, word in enumerate(WORDS * 3)
    ]
    assert check(kind, events) >= len(events) - 2
    assert check(kind, events, reads=1, joins=False) >= len(events) - 2


@pytest.mark.parametrize("kind", READERS)
def test_what_says_more_is_read_whole_and_ends_a_run(kind: str) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    made = [
        event(kind, " a", [1]),
        event(kind, " b", [2]),
        event(kind, " c", [3]),
        {**event(kind, " d", [4]), "model": "other"},
        {**event(kind, " e", [5]), "usage": usage},
        event(kind, " f", [6]),
        event(kind, " g", [7], finish_reason="stop"),
        {**HEAD, "choices": [], "usage": usage},
        {"error": {"message": "no room", "type": "overloaded"}},
    ]
    events = [json.dumps(each).encode() for each in made]
    assert check(kind, events) == 2, "the other model is learned instead"
    found, _ = through_envelopes(kind, events, 1000, joins=True)
    assert isinstance(joined := found[1], Piece)
    assert joined == (Piece(token_ids=(2, 3)) if kind == "vllm" else Piece(text=" b c", parts=(" b", " c")))
    assert isinstance(other := found[2], Piece)
    assert other.model == "other"


def test_a_text_that_only_looks_like_the_answers_is_not_taken_for_it() -> None:
    """The first string in these is no text of the answer: to replace it changes nothing, so it is no hole."""
    decoys = {"note": {"content": " a"}, "also": {"text": " a"}}
    events = [json.dumps({**decoys, **event("chat", word)}).encode() for word in (" a", " a", " b", " c")]
    assert check("chat", events) == 3
    doubled = b'{"choices":[{"delta":{"content":"x","content":"%b"},"index":0}]}'
    assert check("chat", [doubled % word for word in (b"x", b"x", b"y", b"z")]) == 3


def test_the_text_beside_ids_must_still_be_text() -> None:
    good = json.dumps(event("vllm", " a", [1])).encode()
    assert check("vllm", [good, good, good.replace(b'" a"', b"17"), good]) == 1
    assert check("vllm", [good, good, good.replace(b"[1]", b"[1,]"), good]) == 1
    assert check("vllm", [good, good.replace(b"[1]", b"[]"), good.replace(b"[1]", b"[ 4 , 5 ]")]) == 2


@pytest.mark.parametrize("joins", [True, False])
def test_blank_lines_between_events_say_nothing(joins: bool) -> None:
    one = json.dumps(event("chat", " a")).encode()
    envelopes = Envelopes(ChatReader(REQUEST))
    for lines in (b"\n\n", b"\n\n\n", b"\n\n\n\n"):
        block = EventReader().whole(b"data: " + one + lines)
        assert list(envelopes.sort(block, joins=joins)) == [one]
        block = EventReader().whole((b"data: " + one + lines) * 2)
        assert list(envelopes.sort(block, joins=joins)) == [one, one]
    assert list(envelopes.sort(EventReader().whole(b"\n\n\n"), joins=joins)) == []


def test_a_reader_that_remembers_reads_every_event() -> None:
    reader = TgiReader(REQUEST)
    envelopes = Envelopes(reader)
    one = b'{"index":1,"token":{"id":5,"text":" a","logprob":-0.5,"special":false}}'
    envelopes.learn(one, reader.read(one))
    assert list(envelopes.sort(block_of([one, one]), joins=True)) == [one, one]


def test_answers_whose_events_are_never_alike_are_taken_apart_a_few_times_only() -> None:
    events = [json.dumps({"n": i, **event("chat", f" {i}")}).encode() for i in range(50)]

    class Counting(ChatReader):
        num_read = 0

        def read(self, event: bytes) -> Piece:
            self.num_read += 1
            return super().read(event)

    reader = Counting(REQUEST)
    envelopes = Envelopes(reader)
    for each in events:
        assert list(envelopes.sort(block_of([each]), joins=True)) == [each]
        envelopes.learn(each, reader.read(each))
    assert reader.num_read <= len(events) + 4


OTHERS = {
    "of another choice": [event("chat", " a"), event("chat", " b", index=1)],
    "with the same beginning": [event("chat", " a"), event("chat", " b", stop_reason=None)],
    "with the same beginning only": [event("chat", " b", stop_reason=None)],
}


@pytest.mark.parametrize("others", OTHERS)
def test_a_read_is_split_once_whatever_stands_between_similar_events(others: str) -> None:
    class Counting(Envelopes):
        num_bytes = 0

        def _holes(self, block: bytes) -> tuple[list[bytes], int]:
            self.num_bytes += len(block)
            return super()._holes(block)

    reader = ChatReader(REQUEST)
    envelopes, one = Counting(reader), json.dumps(event("chat", " a")).encode()
    envelopes.learn(one, reader.read(one))
    block = block_of([json.dumps(each).encode() for each in OTHERS[others] * 200])
    assert len(list(envelopes.sort(block, joins=True))) == 200 * len(OTHERS[others])
    assert envelopes.num_bytes <= 2 * len(block)
    assert (envelopes.num_bytes > 0) == (others != "with the same beginning only")


texts = st.text(max_size=12) | st.sampled_from(WORDS)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(sorted(READERS)),
    said=st.lists(st.tuples(texts, st.lists(st.integers(0, 1 << 20), max_size=3)), min_size=1, max_size=12),
    damage=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 400), st.binary(max_size=3)), max_size=2),
    reads=st.integers(1, 12),
    joins=st.booleans(),
)
def test_whatever_comes_is_read_as_if_each_event_was_read_whole(
    kind: str,
    said: list[tuple[str, list[int]]],
    damage: list[tuple[int, int, bytes]],
    reads: int,
    joins: bool,
) -> None:
    events = [json.dumps(event(kind, text, ids)).encode() for text, ids in said]
    for number, place, bytes_ in damage:
        whole = events[number % len(events)]
        at = place % (len(whole) + 1)
        damaged = whole[:at] + bytes_ + whole[at + len(bytes_) :]
        events[number % len(events)] = damaged.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    check(kind, events, reads, joins=joins)


@pytest.mark.parametrize("kind", READERS)
def test_the_end_of_an_answer_in_the_same_read_leaves_the_rest_one_run(kind: str) -> None:
    made = [event(kind, word, [i]) for i, word in enumerate(WORDS)]
    made.append(event(kind, " z", [99], finish_reason="length"))
    events = [json.dumps(each).encode() for each in made]
    assert check(kind, events) == len(WORDS) - 1
    found, _ = through_envelopes(kind, events, 1000, joins=True)
    assert len(found) == 3, "what is learned, one run, the end"


def answer(kind: str, number: int, **more: Any) -> list[bytes]:
    """One of a worker's answers, whose first event says more, as vLLM's does."""
    head = {"id": f"c-{number}", "created": 1_763_770_000 + number, **more}
    events = [{**event(kind, f" {i}", [i + 1]), **head} for i in range(6)]
    events[0]["usage"] = None
    events.append({**event(kind, " z", [99], finish_reason="length"), **head})
    return [json.dumps(each).encode() for each in events]


def test_an_event_of_another_model_is_not_joined_to_those_before_it() -> None:
    events = [json.dumps(event("chat", word)).encode() for word in (" a", " b")]
    foreign = events[1].replace(b'"served"', b'"other"')
    first, second = read_through("chat", [events[0], foreign], 2, joins=True, model="served")
    assert isinstance(first, Piece)
    assert isinstance(second, Piece)
    assert (first.text, second.model) == (" a", "other"), "what came before it is given"


def test_an_id_with_escapes_is_read() -> None:
    events = [each.replace(b"c-7", b'c\\"7') for each in answer("chat", 7)]
    check("chat", events)
    check("chat", [each.replace(b"c-7", b"c\xff7") for each in answer("chat", 7)])
    check("chat", [each.replace(b"1763770007", b"0763770007") for each in answer("chat", 7)])


@pytest.mark.parametrize("kind", READERS)
def test_a_read_of_many_unlike_events_is_not_copied_again_for_each(kind: str) -> None:
    events = [json.dumps({"n": i, **event(kind, f" {i}", [i + 1])}).encode() for i in range(1000)]
    found = read_through(kind, events, 1000, joins=True)
    assert said(found) == said(list(one_by_one(READERS[kind](REQUEST), events)))
    sizes = [len(each.parts or each.token_ids) for each in found if isinstance(each, Piece)]
    assert max(sizes) <= 257
    assert len(sizes) <= 8
