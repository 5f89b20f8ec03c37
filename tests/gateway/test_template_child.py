"""A chat template that runs in a child process is counted and logged, with its model and the reason."""

import json
import re
import urllib.request

import pytest

RECURSIVE = "{% for m in messages recursive %}{{ m.content }}{% endfor %}"
"""It has no price: what a recursive loop walks over is not known before."""
GREEDY = "{% for i in range(9) %}{% for j in range(90000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
PLAIN = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "num_chars", "reason", "why"),
    [
        (RECURSIVE, 2, "unpriced", "line 1: a recursive loop"),
        (GREEDY, 2, "allowance", "used up its allowance"),
        (PLAIN, 300_000, "request_size", None),
        (PLAIN, 2, None, None),
    ],
    ids=["unpriced", "allowance", "request size", "in process"],
)
def test_counted_and_logged(start, kit, source: str, num_chars: int, reason: str | None, why: str | None):
    running = start(template=source, small=True)
    for _ in range(2):
        status, _ = ask(
            kit, running, kit.chat(max_tokens=1, chat_template_kwargs={"unused": "x" * num_chars})
        )
        assert status == 200
    counted = re.findall(
        r"^penstock_template_child_renders_total\{(.*)\} (.*)$", scrape(running), re.MULTILINE
    )
    expected = [(f'model="tiny",reason="{reason}"', "2.0")] if reason else []
    assert counted == expected
    lines = [line for line in running.log_text.getvalue().splitlines() if "child process" in line]
    assert len(lines) == (1 if why else 0), "the first request of a model says it"
    for line in lines:
        assert " warning " in line
        assert "model=tiny" in line
        assert f'why="{why}"' in line


def ask(kit, running, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    raw = kit.Raw(running).send(kit.post("/v1/chat/completions", body, "Connection: close"))
    head, _, text = raw.read_all().partition(b"\r\n\r\n")
    raw.close()
    return int(head.split()[1]), json.loads(text)


def scrape(running) -> str:
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=10) as response:
        return response.read().decode()
