import io
import json
import logging

import pytest

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.tree import LogConfig
from penstock.telemetry.log import AccessLine, Log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(
    *, stream: io.StringIO | None = None, secrets: tuple[str, ...] = (), **config: object
) -> tuple[Log, io.StringIO]:
    stream = io.StringIO() if stream is None else stream
    clock = ManualClock(wall_ns=1_700_000_000 * NS_PER_S + 123_456_789)
    return Log(LogConfig(**config), clock, stream=stream, secrets=secrets), stream


def text(message: str, **fields: object) -> str:
    log, out = make()
    log.info(message, **fields)
    return out.getvalue()


def test_text_is_for_people() -> None:
    line = text("worker ready", model="penstock-demo", blocks=512, ok=True, note="two words", missing=None)
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith(":20.123")  # The hour depends on the time zone.
    assert (
        rest == 'info    worker ready model=penstock-demo blocks=512 ok=true note="two words" missing=null\n'
    )


def test_json_is_for_machines() -> None:
    log, out = make(format="json")
    log.warning("slow client", request_id="r-1", buffered=1.5, text='a "b"\nc')
    assert json.loads(out.getvalue()) == {
        "ts": "2023-11-14T22:13:20.123456Z",
        "level": "warning",
        "message": "slow client",
        "request_id": "r-1",
        "buffered": 1.5,
        "text": 'a "b"\nc',
    }
    assert out.getvalue().startswith('{"ts":')
    assert out.getvalue().count("\n") == 1


def test_a_field_cannot_pass_for_the_head() -> None:
    log, out = make(format="json")
    log.info("x", level="error")
    assert json.loads(out.getvalue())["level"] == "info"
    assert json.loads(out.getvalue())["fields"] == {"level": "error"}


def test_colour_only_on_a_terminal() -> None:
    log, out = make(stream=Terminal())
    log.error("x")
    assert "\x1b[31merror  \x1b[0m x" in out.getvalue()
    log, out = make()
    log.error("x")
    assert "\x1b" not in out.getvalue()


def test_levels() -> None:
    log, out = make(level="warning")
    log.debug("no")
    log.info("no")
    log.warning("yes")
    log.error("yes")
    assert out.getvalue().count("yes") == 2
    assert "no" not in out.getvalue().replace("now", "")


def test_a_short_secret_does_not_cut_words_to_pieces() -> None:
    log, out = make(secrets=("k", "port", "x" * 15))
    log.info("native kernels on port 8000", path="/v1/thanks")
    assert "native kernels on port 8000 path=/v1/thanks" in out.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_hidden(form: str) -> None:
    log, out = make(format=form, secrets=("my.key+1-and-more", ""))
    log.info(
        "got my.key+1-and-more today",
        authorization="Bearer abc",
        api_key="k-1",
        path="/x?k=my.key+1-and-more",
    )
    log.info("header was Bearer abc.def", note="sk-1234567890abcdef", prompt_tokens=12, password=7)
    log.bug("bug", ValueError("with my.key+1-and-more inside"), token="abc")
    seen = out.getvalue()
    for secret in ("my.key+1", "abc", "k-1", "sk-1234567890abcdef", "password=7", '"password":7'):
        assert secret not in seen
    assert "prompt_tokens" in seen
    assert "12" in seen


def test_nobody_writes_lines_of_their_own() -> None:
    line = text("path /x\nINFO forged\x1b[2J", user="a\nb", bidi="\u2028", quote='say "hi"')
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert "\u2028" not in line
    assert r"path /x\nINFO forged\x1b[2J" in line


def test_an_exception_has_its_traceback() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        fail()
    log, out = make()
    log.bug("loop died", caught.value, task="relay")
    first, *rest = out.getvalue().splitlines()
    assert first.endswith("loop died error=\"KeyError: 'lost'\" task=relay")
    assert rest[0] == "Traceback (most recent call last):"
    log, out = make(format="json")
    log.bug("loop died", caught.value)
    line = json.loads(out.getvalue())
    assert line["error"] == "KeyError: 'lost'"
    assert "in fail" in line["traceback"]


ACCESS = AccessLine(
    method="POST",
    path="/v1/chat/completions",
    status=200,
    duration_ns=132_500_000,
    request_id="chatcmpl-1",
    model="penstock-demo",
    outcome="stop",
    ttft_ns=9_000_000,
    prompt_tokens=31,
    cached_tokens=16,
    generated_tokens=12,
)


def test_the_access_line() -> None:
    log, out = make()
    log.access(ACCESS)
    log.access(AccessLine(method="GET", path="/he\nalth", status=200, duration_ns=1_000_000))
    assert out.getvalue() == "", "lines of one turn are written together"
    log.flush()
    first, second = out.getvalue().splitlines()
    assert first.split(" ", 1)[1] == (
        "info    POST /v1/chat/completions 200 duration_ms=132.5 request_id=chatcmpl-1 model=penstock-demo "
        "outcome=stop prompt_tokens=31 cached_tokens=16 generated_tokens=12 ttft_ms=9.0"
    )
    assert second.split(" ", 1)[1] == "info    GET /he\\nalth 200 duration_ms=1.0"
    log.access(ACCESS)
    log.warning("something else")
    assert [line.split()[1] for line in out.getvalue().splitlines()[2:]] == ["info", "warning"], (
        "in their order"
    )
    log, out = make(access=False)
    log.access(ACCESS)
    log.flush()
    assert out.getvalue() == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_polls_are_for_debugging(form: str) -> None:
    poll = AccessLine(method="GET", path="/ready", status=200, duration_ns=1_000_000, is_poll=True)
    for level, lines in (("info", 0), ("debug", 1)):
        log, out = make(format=form, level=level)
        log.access(poll)
        log.flush()
        assert len(out.getvalue().splitlines()) == lines
    assert "debug" in out.getvalue()
    assert "GET /ready 200" in out.getvalue()


def test_the_access_line_for_machines() -> None:
    log, out = make(format="json")
    log.access(ACCESS)
    log.flush()
    line = json.loads(out.getvalue())
    assert (line["message"], line["model"], line["ttft_ms"]) == (
        "POST /v1/chat/completions 200",
        "penstock-demo",
        9.0,
    )


def test_numbers_that_json_lacks() -> None:
    log, out = make(format="json")
    log.info("x", ratio=float("nan"))
    assert json.loads(out.getvalue())["ratio"] is None


def test_libraries_may_write_here_too() -> None:
    log, out = make(format="json")
    name = "penstock-test-library"
    log.adopt(name)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger(name).exception("task %s failed", 7)
    line = json.loads(out.getvalue())
    assert (line["message"], line["logger"], line["error"]) == ("task 7 failed", name, "ValueError: bad")
    assert "Traceback" in line["traceback"]
