"""Answers of many vectors are made in pieces, between which others have their turn."""

import asyncio
import json
from array import array
from types import SimpleNamespace

import msgspec
import pytest
import uvloop

from penstock.backends.base import Delta, Finish
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.gateway.api import vectors as endpoints
from penstock.gateway.api.vectors import _checked, _cosines
from penstock.gateway.http.exchange import Exchange, RequestHead
from penstock.gateway.relay.reply import Context
from penstock.gateway.relay.vectors import PIECE_NUMBERS, VectorReply, embeddings
from penstock.protocol.stream import StreamHead
from penstock.protocol.worker_parts import INPUTS_TOKENS_MAX, inputs_problem
from penstock.rng import IdSource
from penstock.text.texts import TextTokens
from penstock.types import FinishReason, Usage

SIZE = 1024
NUM = 5 * PIECE_NUMBERS // SIZE


class Listener:
    """Of a reply that runs alone."""

    def __init__(self) -> None:
        self.bugs: list[Exception] = []

    def on_first_output(self, reply) -> None:
        pass

    def on_ended(self, reply) -> bool:
        return False

    def on_bug(self, reply, error: Exception) -> None:
        self.bugs.append(error)


class Engine:
    def generate(self, request, sink):
        return SimpleNamespace(abort=lambda: None, usage=None)


def reply_of(wording):
    sent: list[bytes] = []
    wire = SimpleNamespace(write=sent.append, paused=False, response_done=lambda **_: None)
    head = RequestHead(method="POST", path="/", headers={})
    exchange = Exchange(
        head, wire, client="", terms=SimpleNamespace(flusher=None), on_finished=lambda _: None
    )
    stream = StreamHead(id="a", created=0, model="m", fingerprint="f", include_usage=False)
    clock = SimpleNamespace(now_ns=lambda: 0)
    listener = Listener()
    context = Context(exchange=exchange, clock=clock, listener=listener, head=stream, ids=IdSource(seed=1))
    reply = VectorReply(context, NUM, wording)
    reply.start(Engine(), [(None, reply)])
    return reply, exchange, sent, listener


def finish(reply) -> None:
    vectors = tuple((i, array("f", [i, *[0.5] * (SIZE - 1)]).tobytes()) for i in range(NUM))
    reply.on_delta(Delta("", (), vectors=vectors))
    reply.on_finish(Finish(reason=FinishReason.STOP, usage=Usage(prompt_tokens=7)))


def whole(context, found, usage):
    return embeddings(context, found, usage, size=SIZE, base64=False)


def alone(test):
    """A test that runs on a loop of its own."""
    return lambda: uvloop.run(test())


@alone
async def test_others_have_their_turn_between_the_pieces() -> None:
    reply, _, sent, _ = reply_of(whole)
    finish(reply)
    turns = 0
    while not sent:
        turns += 1
        await asyncio.sleep(0)
    assert turns >= NUM * SIZE // PIECE_NUMBERS
    answer = json.loads(sent[0].split(b"\r\n\r\n", 1)[1])
    assert [each["embedding"][0] for each in answer["data"]] == list(range(NUM))
    assert len(answer["data"][0]["embedding"]) == SIZE


@alone
async def test_whose_client_left_is_made_no_further() -> None:
    made = 0

    def counting(context, found, usage):
        nonlocal made
        for _ in range(NUM):
            made += 1
            yield
        return msgspec.Raw(b"{}")

    reply, exchange, sent, _ = reply_of(counting)
    finish(reply)
    before = made
    exchange.disconnected()
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < before == made < NUM
    assert not sent


@alone
async def test_a_bug_in_a_later_piece_is_an_answer() -> None:
    def broken(context, found, usage):
        for i in range(NUM):
            assert i < NUM - 1, "a bug"
            yield
        return msgspec.Raw(b"{}")

    reply, _, sent, listener = reply_of(broken)
    finish(reply)
    while not sent:
        await asyncio.sleep(0)
    assert sent[0].startswith(b"HTTP/1.1 500 ")
    assert len(listener.bugs) == 1


def test_cosines_come_one_by_one() -> None:
    found = [array("f", values).tobytes() for values in ([1, 0], [1, 1], [0, 2])]
    steps = _cosines(found, [(0, 1), (0, 2)])
    next(steps), next(steps)
    with pytest.raises(StopIteration) as done:
        next(steps)
    assert done.value.value == pytest.approx([0.5**0.5, 0.0])


INFO = SimpleNamespace(max_model_len=4)


def test_behind_what_is_refused_no_more_texts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "INPUTS_TOKENS_MAX", 6)
    seen = 0

    def texts(length: int):
        nonlocal seen
        for _ in range(100):
            seen += 1
            yield TextTokens((1,) * length)

    with pytest.raises(InvalidRequest, match="The first 3 entries of 'documents' have 9 tokens") as refused:
        _checked(texts(3), INFO, "documents")
    assert (refused.value.code, refused.value.param, seen) == ("too_many_tokens", "documents", 3)
    seen = 0
    with pytest.raises(ContextTooLong, match="entry 0 of 'documents' has 5"):
        _checked(texts(5), INFO, "documents")
    assert seen == 1


def test_a_worker_refuses_as_many() -> None:
    assert inputs_problem(INPUTS_TOKENS_MAX, [INPUTS_TOKENS_MAX], ()) is None
    assert inputs_problem(INPUTS_TOKENS_MAX + 1, [INPUTS_TOKENS_MAX + 1], ()) == (
        "inputs",
        "the texts have 1048577 tokens, over 1048576",
    )
