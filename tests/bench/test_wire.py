import msgspec
import pytest

from penstock.bench.wire import decode_chunk, error_text


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
