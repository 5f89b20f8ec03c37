import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.wire import EVENT_BYTES_MAX, SseReader, decode_chunk, error_text

EVENT = st.lists(st.text("abc :{}é", max_size=12), min_size=1, max_size=3)


@given(events=st.lists(EVENT, max_size=6), ends=st.sampled_from(["\n", "\r\n", "\r"]), data=st.data())
def test_sse_is_the_same_however_it_is_cut(events: list[list[str]], ends: str, data: st.DataObject) -> None:
    lines = [[": a comment", "event: x", *(f"data: {line}" for line in event)] for event in events]
    raw = "".join(ends.join(event) + ends * 2 for event in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, got = SseReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += reader.feed(raw[start:end])
    if ends == "\r":  # The last CR may be half of a CRLF: only the next bytes tell.
        got += reader.feed(b":\n\n")
    assert got == ["\n".join(event).encode() for event in events]


def test_sse_without_a_space_and_without_data() -> None:
    assert list(SseReader().feed(b"data:x\n\n: ping\n\nid: 4\n\ndata\n\n")) == [b"x"]


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(ValueError, match="over"):
        list(SseReader().feed(b"data: " + b"x" * EVENT_BYTES_MAX + b"y"))


def test_content_of_every_kind_of_answer() -> None:
    chat, whole, text = (
        decode_chunk(msgspec.json.encode({"choices": [choice]})).choices[0]
        for choice in ({"delta": {"content": "a"}}, {"message": {"content": "b"}}, {"text": "c"})
    )
    assert (chat.content, whole.content, text.content) == ("a", "b", "c")
    role = decode_chunk(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}').choices[0]
    assert not role.is_output
    tool = decode_chunk(b'{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}').choices[0]
    assert tool.is_output


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "flat"}', "flat"),
        (b"{}", "HTTP 500"),
        (b"<html>oops", "HTTP 500: <html>oops"),
        (b"", "HTTP 500"),
    ],
)
def test_error_text(body: bytes, text: str) -> None:
    assert error_text(500, body) == text
