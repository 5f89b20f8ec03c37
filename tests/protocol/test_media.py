"""Media from elsewhere: only from hosts that the operator allows."""

import msgspec
import pytest

from penstock.errors import InvalidRequest
from penstock.protocol.needs import check_media
from penstock.protocol.openai import ContentPart, Message


def check(url: object, *hosts: str, kind: str = "image_url") -> None:
    for value in (url, {"url": url, "detail": "low"}):
        part = ContentPart(type=kind, **{kind: value})
        check_media([Message(role="user", content="text"), Message(role="user", content=[part])], hosts)


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("data:image/png;base64,AAAA", ()),
        ("DATA:,x", ()),
        ("https://images.example.com/a.png?x=1", ("images.example.com",)),
        ("https://Images.Example.com:8443/a.png", ("images.example.com",)),
        ("https://a.b.example.com/", ("*.example.com",)),
        ("http://example.org/a", ("*",)),
        ("http://8.8.8.8/a", ("*",)),
        ("http://10.0.0.7/a", ("10.0.0.7",)),
    ],
)
def test_what_is_passed_on(url: str, hosts: tuple[str, ...]) -> None:
    check(url, *hosts)
    check(url, *hosts, kind="video_url")


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("https://example.com/a.png", ()),
        ("https://example.com.evil.org/", ("example.com", "*.example.com")),
        ("https://notexample.com/", ("*.example.com",)),
        ("https://example.com@evil.org/", ("example.com",)),
        ("https://evil.org\\@example.com/", ("example.com",)),
        ("https://example.com /", ("example.com",)),
        ("https://ex\u0430mple.com/", ("*",)),
        ("file:///etc/passwd", ("*",)),
        ("//example.com/a", ("*",)),
        ("example.com/a", ("*",)),
        ("https://", ("*",)),
        ("https://[::1/", ("*",)),
        ("", ("*",)),
        (5, ("*",)),
        *(
            (f"http://{host}/latest/meta-data", ("*",))
            for host in (
                "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "localhost", "a.localhost",
                "redis",
                "10.0.0.7", "192.168.1.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.7]", "[fd00::1]",
                "metadata.google.internal", "printer.local", "localhost.", "100.64.0.1", "0.0.0.0",
            )
        ),
    ],
)  # fmt: skip
def test_what_is_refused(url: object, hosts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(url, *hosts)
    assert refused.value.param == "messages[1].content[0].image_url"


METADATA = "http://169.254.169.254/x"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "text", "text": "hi", "uuid": "u", "image_url": {"url": METADATA}}, "image_url"),
        ({"type": "text", "text": "hi", "uuid": "u", "image_url": "data:,x"}, "image_url"),
        ({"type": "text", "text": "hi", "audio_url": METADATA}, "audio_url"),
        ({"type": "text", "text": "hi", "video_url": {"url": METADATA}}, "video_url"),
        ({"type": "text", "text": "hi", "image_embeds": "AAAA"}, "image_embeds"),
        ({"type": "refusal", "refusal": "no", "file": {"file_id": "file-1"}}, "file"),
        ({"type": "image_url", "image_url": "data:,x", "audio_url": "data:,x"}, "audio_url"),
        ({"type": "image_url", "image_url": {"url": "data:,x", "a_url": METADATA}}, "image_url.a_url"),
        ({"type": "file", "file": {"file_url": METADATA}}, "file.file_url"),
        ({"type": "file", "file": {"file_url": "file.pdf"}}, "file.file_url"),
        ({"type": "file", "file": {"file_id": METADATA}}, "file.file_id"),
        ({"type": "file", "file": {"file_id": " gs://bucket/x"}}, "file.file_id"),
        ({"type": "file", "file": {"file_data": METADATA}}, "file.file_data"),
        ({"type": "file", "file": METADATA}, "file"),
        ({"type": "input_audio", "input_audio": {"data": METADATA}}, "input_audio.data"),
    ],
)  # fmt: skip
def test_an_address_is_found_wherever_a_worker_may_read_it(part: dict[str, object], field: str) -> None:
    message = msgspec.convert({"role": "user", "content": [part]}, Message)
    with pytest.raises(InvalidRequest) as refused:
        check_media([message], ("*",))
    assert refused.value.param == f"messages[0].content[0].{field}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "see http://169.254.169.254/", "image_url": None, "cache_control": {}},
        {"type": "file", "file": {"file_id": "file-abc", "filename": "C:\\a.pdf"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "file_url": None}},
        {"type": "file", "file": {"file_url": "https://files.example.com/a.pdf"}},
        {"type": "input_audio", "input_audio": {"data": "//uQxAAA", "format": "mp3"}},
    ],
)
def test_files_and_sound_that_are_passed_on(part: dict[str, object]) -> None:
    check_media([msgspec.convert({"role": "user", "content": [part]}, Message)], ("files.example.com",))
