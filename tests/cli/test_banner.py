import io
import shlex
from dataclasses import replace

import msgspec
from rich.console import Console

from penstock.cli.wiring.serving import BannerFacts, curl_line, python_snippet, show

FACTS = BannerFacts(
    url="http://127.0.0.1:8000/v1", models=("penstock-demo", "b"), key="sk-new", needs_key=True, ready_s=2.345
)


def shown(facts: BannerFacts) -> str:
    console = Console(file=io.StringIO(), width=60)
    show(console, facts)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_new_key_is_shown_and_used() -> None:
    text = shown(FACTS)
    assert "ready after 2.3 s" in text
    assert "key        sk-new" in text
    assert "console    http://127.0.0.1:8000/console\n" in text
    assert curl_line(FACTS) in text.splitlines()  # Not wrapped, however narrow the terminal.


def test_a_configured_key_is_not_shown() -> None:
    text = shown(replace(FACTS, key=""))
    assert "as configured" in text
    assert 'Bearer $PENSTOCK_API_KEY"' in text
    assert 'os.environ["PENSTOCK_API_KEY"]' in text


def test_the_curl_line_is_one_shell_command() -> None:
    words = shlex.split(curl_line(FACTS))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sk-new" in words
    body = msgspec.json.decode(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("penstock-demo", True)


def test_the_snippet_is_python() -> None:
    for facts in (FACTS, replace(FACTS, key=""), replace(FACTS, key="", needs_key=False)):
        compile(python_snippet(facts), "snippet", "exec")


def test_no_key_no_header() -> None:
    facts = replace(FACTS, key="", needs_key=False)
    assert "Authorization" not in curl_line(facts)
    assert "none is needed" in shown(facts)


def test_an_open_address_is_pointed_out() -> None:
    assert "listens on 0.0.0.0" in shown(replace(FACTS, open_to="0.0.0.0"))
