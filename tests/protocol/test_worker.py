import contextlib
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.worker import (
    MAX_FRAME_BYTES,
    AbortRequest,
    Drain,
    FrameDecoder,
    KVEvents,
    Loading,
    ModelInfo,
    Output,
    Ping,
    Pong,
    ProtocolError,
    Ready,
    RequestFinished,
    Stats,
    StepOutput,
    Submit,
    SubscribeKVEvents,
    WorkerFailed,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from penstock.types import FinishReason, SamplingParams, TokenLogprob, Usage

INFO = ModelInfo(
    model="m",
    architecture="A",
    dtype="float32",
    num_parameters=1,
    vocab_size=2,
    max_model_len=3,
    num_blocks=4,
    block_tokens=16,
    max_running=5,
)
USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, queue_ns=4, prefill_ns=5, decode_ns=6)
TO_WORKER = [
    Submit(request_id="r", prompt=b"\1\0\0\0", sampling=SamplingParams(stop_token_ids=(2,), logprobs=1)),
    Submit(
        request_id="r", prompt=b"", sampling=SamplingParams(), cache_salt=b"s", priority=-1, fairness_key="t"
    ),
    Submit(
        request_id="r",
        prompt=b"",
        sampling=SamplingParams(
            presence_penalty=1,
            frequency_penalty=-2,
            repetition_penalty=1.5,
            logit_bias=((7, -100.0),),
            min_tokens=3,
        ),
    ),
    AbortRequest(("a", "b")),
    Drain(),
    Ping(),
    Submit(request_id="r", prompt=b"", resumed=b"\2\0\0\0", sampling=SamplingParams()),
    SubscribeKVEvents(),
    SubscribeKVEvents(2**63 - 1, 7),
]
FROM_WORKER = [
    Pong(),
    Loading("importing"),
    Loading("loading weights", 3, 9),
    Ready(INFO),
    WorkerFailed("no such file", "CheckpointError"),
    StepOutput(
        7, (Output("r", (1,)), Output("s", (2,), (TokenLogprob(2, -0.5, ((2, -0.5),)),), None, USAGE))
    ),
    StepOutput(
        8, (Output("r", (), None, RequestFinished(reason=FinishReason.STOP, usage=USAGE, stop_token_id=2)),)
    ),
    Stats(step=1, running=2, waiting=3, blocks_total=4, blocks_used=5, blocks_cached=6),
    KVEvents(epoch=2**63 - 1, sequence=0, payload=b"p"),
    KVEvents(epoch=1, sequence=-1, payload=b"", snapshot=True, more=True),
]
STREAM = b"".join(encode(message) for message in FROM_WORKER)


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_messages_to_workers_come_back_as_they_were(message) -> None:
    (body,) = FrameDecoder().feed(encode(message))
    assert decode_to_worker(body) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_messages_from_workers_come_back_as_they_were(message) -> None:
    (body,) = FrameDecoder().feed(encode(message))
    assert decode_from_worker(body) == message


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_split_of_the_stream_gives_the_same_messages(cuts: list[int]) -> None:
    decoder, found = FrameDecoder(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += [decode_from_worker(body) for body in decoder.feed(STREAM[start:end])]
    assert found == FROM_WORKER


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(1, 50))
def test_any_bodies_come_back_whole_and_in_order(bodies: list[bytes], piece: int) -> None:
    stream = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    decoder, found = FrameDecoder(), []
    for start in range(0, len(stream), piece):
        found += decoder.feed(stream[start : start + piece])
    assert found == bodies


def test_a_reader_that_stops_early_loses_nothing() -> None:
    decoder = FrameDecoder()
    first = next(decoder.feed(STREAM))
    rest = list(decoder.feed(b""))
    assert [decode_from_worker(body) for body in [first, *rest]] == FROM_WORKER


@given(st.binary(max_size=400))
def test_noise_is_frames_or_a_protocol_error_and_nothing_else(noise: bytes) -> None:
    decoder = FrameDecoder()
    with contextlib.suppress(ProtocolError):
        for body in decoder.feed(noise):
            decode_to_worker(body)


@given(st.binary(max_size=200))
def test_a_body_that_is_no_message_is_a_protocol_error(body: bytes) -> None:
    for decode in (decode_to_worker, decode_from_worker):
        with contextlib.suppress(ProtocolError):
            decode(body)


def test_an_absurd_length_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(ProtocolError, match="announced"):
        list(FrameDecoder().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))


def test_a_message_for_the_other_side_is_a_protocol_error() -> None:
    (body,) = FrameDecoder().feed(encode(Drain()))
    with pytest.raises(ProtocolError):
        decode_from_worker(body)
