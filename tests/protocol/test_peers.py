"""Messages between the gateway processes of one server and their parent: whole, cut off, and for the other
side.
"""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.peers import (
    Ask,
    ChildLaunch,
    ChildReport,
    Done,
    ModelNumbers,
    Order,
    ServedTokens,
    Snapshot,
    Sum,
    WorkerAt,
    decode_to_child,
    decode_to_parent,
    frame,
)
from penstock.protocol.worker import FrameDecoder
from penstock.types import TenantId

MODELS = {"m": ModelNumbers(3, 1.5, 2)}
SERVED = ServedTokens((("m", 0, TenantId("acme"), 500), ("m", 1, TenantId("b"), -20)))
"""It goes from one child to the others as it is."""
TO_PARENT = [
    Snapshot(metrics=b"a 1\n", connections=4, streams=2, models=MODELS, gone=("w",)),
    Ask(),
    Order("w", 2.5),
    Order("w", None),
    SERVED,
]
TO_CHILD = [Sum(metrics=b"", connections=4, streams=2, processes=2, models=MODELS), Done(), SERVED]


@pytest.mark.parametrize("message", TO_PARENT, ids=lambda message: type(message).__name__)
def test_a_message_to_the_parent_comes_back_as_it_was(message) -> None:
    (body,) = FrameDecoder().feed(frame(message))
    assert decode_to_parent(body) == message


@pytest.mark.parametrize("message", TO_CHILD, ids=lambda message: type(message).__name__)
def test_a_message_to_a_child_comes_back_as_it_was(message) -> None:
    (body,) = FrameDecoder().feed(frame(message))
    assert decode_to_child(body) == message


@given(st.lists(st.integers(0, 400), max_size=20))
def test_any_split_of_the_stream_gives_the_same_messages(cuts) -> None:
    stream = b"".join(map(frame, TO_PARENT))
    decoder, found = FrameDecoder(), []
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]):
        found += [decode_to_parent(body) for body in decoder.feed(stream[start:end])]
    assert found == TO_PARENT


@pytest.mark.parametrize("message", [*TO_PARENT, *TO_CHILD], ids=lambda message: type(message).__name__)
def test_a_body_that_is_cut_off_is_an_error(message) -> None:
    (body,) = FrameDecoder().feed(frame(message))
    for end in range(len(body)):
        for decode in (decode_to_parent, decode_to_child):
            with pytest.raises(msgspec.DecodeError):
                decode(body[:end])


def test_a_message_for_the_other_side_is_an_error() -> None:
    (done,), (ask,) = FrameDecoder().feed(frame(Done())), FrameDecoder().feed(frame(Ask()))
    with pytest.raises(msgspec.DecodeError):
        decode_to_parent(done)
    with pytest.raises(msgspec.DecodeError):
        decode_to_child(ask)


def test_what_a_process_is_started_with_passes_through_json() -> None:
    launch = ChildLaunch(
        index=1,
        config=b"{}",
        listeners=(3, 4),
        workers=(WorkerAt("w", "m", "unix:/w"),),
        parent="/p",
        hash_key=b"\0\xff",
        held={"w": 2.0},
    )
    assert msgspec.json.decode(msgspec.json.encode(launch), type=ChildLaunch) == launch


def test_what_is_no_news_is_not_sent() -> None:
    assert msgspec.json.encode(ChildReport()) == b"{}"
    update = ChildReport(workers=(), held={"w": 1.0})
    assert msgspec.json.decode(msgspec.json.encode(update), type=ChildReport) == update
