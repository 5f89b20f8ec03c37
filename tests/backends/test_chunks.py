"""Reads that are one chunk of one event are taken whole, and say what they say when all is parsed."""

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.base import Delta, Finish, GenerateRequest
from penstock.backends.http.chunks import (
    AROUND_BYTES_MAX,
    HOLE_BYTES_MAX,
    HOLES_MAX,
    ChunkReader,
    Holes,
    is_one_chunk,
)
from penstock.backends.http.client import HttpClient, _Connection
from penstock.backends.http.context import LeavingStream, StreamContext
from penstock.backends.http.dialects.openai import ChatReader
from penstock.backends.http.dialects.vllm import VllmReader
from penstock.backends.http.stream import HttpStream
from penstock.backends.http.terms import Anomaly, HttpAddress, HttpLimits
from penstock.clock import ManualClock
from penstock.text.detokenizer import PieceTokens
from penstock.types import RequestId, SamplingParams

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
READERS = {"chat": ChatReader, "vllm": VllmReader}


class FakeTransport(asyncio.Transport):
    """Goes nowhere."""

    closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: object) -> None:
        """Thrown away."""

    def abort(self) -> None:
        self.closed = True


class Received:
    """The sink, and the owner, of one stream."""

    def __init__(self) -> None:
        self.text, self.ids, self.num_deltas = "", list[int](), 0
        self.finish: Finish | None = None
        self.noted_kinds: list[Anomaly] = []

    def on_delta(self, delta: Delta) -> None:
        assert not delta.encoded or json.loads(delta.encoded) == delta.text
        self.num_deltas += 1
        self.text += delta.text
        self.ids += delta.token_ids

    def on_finish(self, finish: Finish) -> None:
        self.finish = finish

    def leave(self, stream: LeavingStream, finish: Finish) -> None:
        """Nothing to do."""

    def noted(self, anomaly: Anomaly, detail: str) -> None:
        self.noted_kinds.append(anomaly)

    def lost(self, why: str, *, unreachable: bool) -> None:
        """Nothing to do."""


class Played:
    """A stream over a connection whose reads are given; `whole`: it may take reads whole."""

    def __init__(self, kind: str, *, whole: bool, limits: HttpLimits | None = None) -> None:
        clock, self.received, limits = ManualClock(), Received(), limits or HttpLimits()
        client = HttpClient(HttpAddress.parse("http://localhost:1"), limits, clock)
        self.transport = FakeTransport()
        self.connection = _Connection(client)
        self.connection.connection_made(self.transport)
        client.put_back(self.connection)
        tokenizer = byte_tokenizer()
        pieces = PieceTokens(tokenizer)
        self.holes = Holes(pieces)
        context = StreamContext(tokenizer, pieces, self.holes, clock, self.received, limits)
        sampling = SamplingParams(max_tokens=10_000)
        request = GenerateRequest(request_id=RequestId("r"), prompt_token_ids=(1,), sampling=sampling)
        stream = HttpStream(
            context, request, self.received, READERS[kind](request), model="m", trusts_prompt=False,
            may_move=True,
        )  # fmt: skip
        self.exchange = client.start("POST", "/", stream, body=b"{}")
        stream.sent(self.exchange)
        self.num_whole, self._whole = 0, whole
        self.connection.data_received(HEAD)

    def read(self, data: bytes) -> None:
        if not self._whole:
            self.exchange.take_chunk = None
        elif (take := self.exchange.take_chunk) is not None and not hasattr(take, "counts"):
            self.exchange.take_chunk = self._counting(take)
        self.connection.data_received(data)

    def _counting(self, take: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        def counted(data: bytes) -> bool:
            was_taken = take(data)
            self.num_whole += was_taken
            return was_taken

        counted.counts = True  # type: ignore[attr-defined]
        return counted

    def outcome(self) -> tuple[object, ...]:
        received, finish = self.received, self.received.finish
        ended = finish and (finish.reason, str(finish.error), finish.usage, finish.resume)
        return received.text, received.ids, ended, received.noted_kinds, self.transport.closed


def play(
    kind: str,
    reads: Sequence[bytes],
    *,
    whole: bool,
    limits: HttpLimits | None = None,
) -> Played:
    async def inside() -> Played:
        played = Played(kind, whole=whole, limits=limits)
        for each in reads:
            played.read(each)
        return played

    return asyncio.run(inside())


def event(kind: str, text: str, ids: Sequence[int], reason: str | None = None) -> bytes:
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": reason}
    if kind == "chat":
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    else:
        choice |= {"stop_reason": None, "text": text, "token_ids": list(ids)}
    return b"data: %b\n\n" % json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode()


def chunk(data: bytes, form: bytes = b"%x\r\n") -> bytes:
    return form % len(data) + data + b"\r\n"


def check(kind: str, reads: Sequence[bytes], limits: HttpLimits | None = None) -> int:
    """How many reads were taken whole; all the rest is as if none was."""
    quick, plain = (play(kind, reads, whole=whole, limits=limits) for whole in (True, False))
    assert quick.outcome() == plain.outcome()
    assert plain.num_whole == 0
    return quick.num_whole


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("form", [b"%x\r\n", b"%X\r\n", b"0%x\r\n"])
def test_all_but_the_first_reads_and_the_last_are_taken_whole(kind: str, form: bytes) -> None:
    reads = [chunk(event(kind, f" {i}", [65 + i % 20]), form) for i in range(40)]
    reads += [chunk(event(kind, "", [66], "stop")), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    assert check(kind, reads) == 38  # One is taken apart, and one shows that they come one by one.


def test_reads_are_taken_whole_behind_a_first_event_that_says_more() -> None:
    first = event("vllm", "", [65]).replace(b'"token_ids"', b'"prompt_token_ids": [1, 2], "token_ids"')
    later = [
        event("vllm", f" {i}", [65 + i % 20]).replace(
            b'"token_ids"', b'"prompt_token_ids": null, "token_ids"'
        )
        for i in range(40)
    ]
    # The second event is taken apart too, and the third shows that they come one by one.
    assert check("vllm", [chunk(each) for each in (first, *later)]) == 38


@pytest.mark.parametrize("kind", READERS)
def test_a_read_of_another_form_is_parsed_and_so_is_the_one_behind_it(kind: str) -> None:
    each = [chunk(event(kind, " a", [65])) for _ in range(12)]
    cut = each[4][:7], each[4][7:]
    comment, two = chunk(b": here\n\n"), each[0] + each[1]
    extended = each[0].replace(b"\r\n", b";a=b\r\n", 1)
    for odd in ([*cut], [comment], [two], [extended]):
        assert check(kind, [*each[:4], *odd, *each[4:]]) in range(8, 11)
    assert check(kind, [*each[:4], each[0] + b"5", *each[4:]]) == 2, "what follows is a long chunk"


def test_the_bounds_on_an_answer_hold_for_reads_that_are_taken_whole() -> None:
    reads = [chunk(event("chat", " a", ())) for _ in range(50)]
    limits = HttpLimits(response_bytes_max=20 * len(reads[0]))
    assert check("chat", reads, limits) == 18
    played = play("chat", reads, whole=True, limits=limits)
    assert played.received.finish is not None
    assert "over" in str(played.received.finish.error)


def test_what_holes_say_is_remembered_up_to_a_bound() -> None:
    holes = Holes(PieceTokens(byte_tokenizer()))
    delta = holes.texts[b'" a"']
    assert delta is not None
    assert delta is holes.texts[b'" a"']
    assert (holes.texts[b"17"], holes.texts[b'""'], holes.texts[b'"a']) == (None, None, None)
    assert holes.texts[b'"%b"' % (b"x" * HOLE_BYTES_MAX)] is not None
    assert len(holes.texts) == 4, "a sentence is not remembered"
    assert holes.ids(b',"ids":[')[b'"","ids":[7,8'] == (7, 8)
    for i in range(HOLES_MAX):
        holes.texts[b'"%d"' % i]
    assert len(holes.texts) <= HOLES_MAX


def test_one_chunk_is_told_from_all_else() -> None:
    one = chunk(event("chat", " a", ()))
    body = event("chat", " a", ())
    assert is_one_chunk(one, body)
    assert not is_one_chunk(one + b"1", body)
    assert not is_one_chunk(b"1" + one, body)
    assert not is_one_chunk(one, body[:-1])
    assert not is_one_chunk(chunk(b"data"), b"data")
    sizes: dict[int, bytes] = {}
    reader = ChunkReader(b"data: ", b"\n\n", sizes)
    assert reader.hole(b"7\r\ndata: \n\n\r\n") is None
    assert reader.hole(b"8\r\ndata: \n\n\r\n") == b""
    assert reader.hole(b"7\r\ndata: \n\n\r\n") is None
    assert reader.hole(b"4\r\n: \n\n\r\n") is None
    assert sizes == {13: b"8\r\n", 9: b"4\r\n"}
    other = ChunkReader(b"data: x\n", b"\n\n", sizes)
    assert not other.hole(b"9\r\ndata: x\n\n\r\n"), "what stands around overlaps"
    assert other.hole(b"a\r\ndata: x\n\n\n\r\n") == b""


def test_a_stream_with_much_around_its_texts_is_parsed() -> None:
    for num_bytes, num_whole in ((AROUND_BYTES_MAX - 200, 6), (AROUND_BYTES_MAX, 0)):
        reads = [event("chat", f" {i}", ()).replace(b'"c"', b'"%b"' % (b"c" * num_bytes)) for i in range(8)]
        assert check("chat", [chunk(read) for read in reads]) == num_whole


@settings(max_examples=150)
@given(
    kind=st.sampled_from(sorted(READERS)),
    said=st.lists(
        st.tuples(st.text(max_size=8), st.lists(st.integers(0, 255), min_size=1, max_size=2)), max_size=12
    ),
    damage=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 250), st.binary(max_size=3)), max_size=2),
    cuts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 250)), max_size=2),
)
def test_whatever_comes_is_as_if_all_of_it_was_parsed(
    kind: str,
    said: list[tuple[str, list[int]]],
    damage: list[tuple[int, int, bytes]],
    cuts: list[tuple[int, int]],
) -> None:
    opening = [chunk(event(kind, word, [70])) for word in (" a", " b", " c")]
    reads = [*opening, *(chunk(event(kind, text, ids)) for text, ids in said)]
    reads += [chunk(event(kind, " z", [71], "stop")), b"0\r\n\r\n"]
    for number, place, bytes_ in damage:
        whole = reads[number % len(reads)]
        at = place % (len(whole) + 1)
        reads[number % len(reads)] = whole[:at] + bytes_ + whole[at + len(bytes_) :]
    for number, place in cuts:
        at = number % len(reads)
        reads[at : at + 1] = [part for part in (reads[at][:place], reads[at][place:]) if part]
    check(kind, reads)


ENDS = {
    "well": b"data: [DONE]\n\n",
    "with its usage": b'data: {"model": "m", "choices": [], '
    b'"usage": {"prompt_tokens": 1, "completion_tokens": 6}}\n\ndata: [DONE]\n\n',
    "with an error": b'data: {"error": {"message": "no room", "type": "overloaded"}}\n\n',
    "with what cannot be read": b"data: {\n\n",
    "as another model's": event("vllm", " other", [77]).replace(b'"m"', b'"n"'),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_finished", [True, False])
def test_an_answer_in_one_read_is_passed_on_at_once_and_says_the_same(
    kind: str, end: str, is_finished: bool
) -> None:
    events = [event(kind, f" {i}", [65 + i]) for i in range(5)]
    events += [event(kind, " z", [80], "stop")] if is_finished else []
    # What follows a finish does not count, but for another name of the model.
    body = [*events, ENDS[end]]
    one = play(kind, [chunk(b"".join(body)) + b"0\r\n\r\n"], whole=True)
    many = play(kind, [*map(chunk, body), b"0\r\n\r\n"], whole=False)
    assert one.outcome() == many.outcome()
    assert one.received.num_deltas == 1
    assert one.received.text.startswith(" 0 1 2 3 4" if kind == "chat" else "ABCDE")
    assert "other" not in one.received.text


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(READERS)),
    said=st.lists(
        st.tuples(st.text(max_size=8), st.lists(st.integers(0, 255), min_size=1, max_size=2)), max_size=12
    ),
    damage=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 250), st.binary(max_size=3)), max_size=2),
    end=st.sampled_from(sorted(ENDS)),
)
def test_one_read_says_what_a_read_for_each_event_says(
    kind: str, said: list[tuple[str, list[int]]], damage: list[tuple[int, int, bytes]], end: str
) -> None:
    events = [event(kind, text, ids) for text, ids in said]
    events += [event(kind, " z", [80], "length"), ENDS[end]]
    for number, place, bytes_ in damage:
        one = events[number % len(events)]
        at = place % (len(one) + 1)
        events[number % len(events)] = one[:at] + bytes_ + one[at + len(bytes_) :]
    together = play(kind, [chunk(b"".join(events)), b"0\r\n\r\n"], whole=True)
    single = play(kind, [*map(chunk, events), b"0\r\n\r\n"], whole=False)
    assert together.outcome() == single.outcome()
