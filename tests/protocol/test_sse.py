import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.stream import EventReader, EventTooLong

EVENT = st.lists(st.text("abc :{}é", max_size=12), min_size=1, max_size=3)


@given(events=st.lists(EVENT, max_size=6), ends=st.sampled_from(["\n", "\r\n", "\r"]), data=st.data())
def test_sse_is_the_same_however_it_is_cut(events: list[list[str]], ends: str, data: st.DataObject) -> None:
    lines = [[": a comment", "event: x", *(f"data: {line}" for line in event)] for event in events]
    raw = "".join(ends.join(event) + ends * 2 for event in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, got = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += reader.feed(raw[start:end])
    assert got == ["\n".join(event).encode() for event in events]


def test_sse_without_a_space_and_without_data() -> None:
    assert list(EventReader().feed(b"data:x\n\n: ping\n\nid: 4\n\ndata\n\n")) == [b"x"]


def test_an_endless_event_is_refused() -> None:
    reader = EventReader(event_bytes_max=100)
    assert reader.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(EventTooLong, match="over 100 bytes"):
        reader.feed(b"x" * 10)
    with pytest.raises(EventTooLong):
        EventReader(event_bytes_max=100).feed(b"data: " + b"x" * 100 + b"\n\n")
