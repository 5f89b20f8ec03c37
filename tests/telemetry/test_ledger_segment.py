import pytest
from hypothesis import given
from hypothesis import strategies as st
from usage_records import opened, progress

from penstock.errors import LedgerError
from penstock.policy.flow import SCHEMA_VERSION, UsageRecord
from penstock.telemetry.ledger_segment import (
    FRAME_BYTES_MAX,
    Kind,
    SegmentHeader,
    decode_progress,
    decode_record,
    encode,
    read_frames,
    read_head,
    to_frame,
    to_head,
)

HEADER = SegmentHeader(instance="i", sequence=3, created_ns=9)
BODIES = st.lists(
    st.tuples(st.sampled_from([Kind.OPEN, Kind.SLICE, Kind.CLOSE]), st.binary(min_size=1, max_size=50))
)


def test_records_and_slices_come_back() -> None:
    data = to_frame(Kind.OPEN, encode(opened("a"))) + to_frame(Kind.SLICE, encode(progress("a", 5)))
    first, second = read_frames(data)
    assert (first.kind, decode_record(first.body)) == (Kind.OPEN, opened("a"))
    assert (second.kind, decode_progress(second.body)) == (Kind.SLICE, progress("a", 5))
    assert second.end == len(data)


def test_the_head_comes_back() -> None:
    data = to_head(HEADER)
    assert read_head(data + b"more", "x") == (HEADER, len(data))


@pytest.mark.parametrize("cut", range(0, len(to_head(HEADER)), 7))
def test_a_torn_head_is_a_segment_with_nothing_in_it(cut: int) -> None:
    assert read_head(to_head(HEADER)[:cut] + bytes(50), "x") is None


def test_a_newer_version_is_refused_by_name() -> None:
    data = to_head(SegmentHeader(version=SCHEMA_VERSION + 1, instance="i", sequence=1, created_ns=0))
    with pytest.raises(LedgerError, match=r"0001\.seg was written by a newer version"):
        read_head(data, "0001.seg")


def test_fields_of_a_later_version_are_passed_over() -> None:
    """Additive changes need no new version: a reader that lacks a field reads the rest."""
    body = encode({"request_id": "a", "ended_ns": 1, "tenant": "t", "requested_model": "m",
                   "served_model": "m", "outcome": "finished", "a_later_field": 5})  # fmt: skip
    assert decode_record(body).request_id == "a"
    assert isinstance(decode_record(body), UsageRecord)


@given(BODIES, st.data())
def test_cut_anywhere_the_whole_frames_before_it_remain(
    bodies: list[tuple[Kind, bytes]], data: st.DataObject
) -> None:
    frames = [to_frame(kind, body) for kind, body in bodies]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.sampled_from([b"", bytes(64)]))
    found = [(frame.kind, frame.body) for frame in read_frames(whole[:cut] + tail)]
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    num_whole = sum(end <= cut for end in ends)
    # Zeros after a cut may only complete a frame that ended in zeros, and then it is the one that was
    # written.
    assert found[:num_whole] == list(bodies[:num_whole])
    assert found == list(bodies[: len(found)])
    if not tail:
        assert len(found) == num_whole


@given(st.binary(min_size=1, max_size=60), st.integers(0, 10**6), st.integers(0, 7))
def test_one_wrong_bit_ends_the_data(body: bytes, place: int, bit: int) -> None:
    data = bytearray(to_frame(Kind.CLOSE, body) + to_frame(Kind.CLOSE, b"next"))
    size = len(to_frame(Kind.CLOSE, body))
    data[place % size] ^= 1 << bit
    assert body not in [frame.body for frame in read_frames(bytes(data)) if frame.kind == Kind.CLOSE]


@given(st.binary(max_size=200))
def test_noise_is_no_frame(data: bytes) -> None:
    for frame in read_frames(data):
        assert frame.end <= len(data)


def test_lengths_are_bounded() -> None:
    assert list(read_frames((FRAME_BYTES_MAX + 1).to_bytes(4, "little") + bytes(2 * FRAME_BYTES_MAX))) == []
    with pytest.raises(AssertionError):
        to_frame(Kind.CLOSE, bytes(FRAME_BYTES_MAX + 1))
