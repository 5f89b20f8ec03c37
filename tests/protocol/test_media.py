"""Media from elsewhere: only from hosts that the operator allows."""

import pytest

from penstock.errors import InvalidRequest
from penstock.protocol.media import check_media
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
