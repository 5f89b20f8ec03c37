"""A stream whose worker is lost goes on on another: the client sees nothing of it, and the ledger has one
record.
"""

import itertools
import json
import sqlite3
from contextlib import closing

import msgspec
import openai
import pytest
from fake_backend import WORDS, endless_words

from penstock.config.ledger import LedgerConfig
from penstock.errors import EngineFault

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the pipe"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Losing:
    """A script whose worker is lost, and comes back at once, before it has given the tokens of these
    numbers.
    """

    def __init__(self, *at: int, text: str = "") -> None:
        self.at, self.text, self.running = set(at), text, None
        self.lost = 0

    def __call__(self, request):
        words = (self.text[i : i + 3] for i in range(0, len(self.text), 3)) if self.text else None
        for i, word in enumerate(words or endless_words(request)):
            if i in self.at and i >= len(request.resumed) and self.running is not None:
                self.at.discard(i)
                self.running.loop.call_soon(self._lose)
            yield word

    def _lose(self) -> None:
        self.lost += 1
        self.running.backend.lose_worker()
        self.running.backend.recover()


def both(start, script, ask, config=None, **options):
    """The same requests to an undisturbed gateway and to one that loses its worker; what came back from
    each.
    """
    calm = start(config, type(script)(text=script.text), **options)
    expected = ask(calm)
    running = start(config, script, **options)
    script.running = running
    num_losses = len(script.at)
    got = ask(running)
    assert script.lost == num_losses
    return got, expected


def events(kit, running, path, body):
    """The stream's events, less what differs between any two requests."""
    raw = kit.Raw(running).send(
        kit.post(
            path, {"stream": True, "stream_options": {"include_usage": True}, **body}, "Connection: close"
        )
    )
    text = raw.read_all().split(b"\r\n\r\n", 1)[1]
    raw.close()
    found = []
    for line in text.replace(b"\r\n", b"\n").split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            for name in ("id", "created", "penstock"):
                event.pop(name, None)
            for choice in event.get("choices", ()):
                for call in choice.get("delta", {}).get("tool_calls") or ():
                    call.pop("id", None)
            found.append(event)
    assert b"[DONE]" in text
    return found


@pytest.mark.parametrize(
    ("at", "fields"),
    [
        ((1,), {}),
        ((3, 4, 9), {}),
        ((5,), {"stop": [WORDS[7] + WORDS[8], WORDS[4] + "no"]}),
        ((5,), {"n": 3}),
        ((4,), {"logprobs": True, "top_logprobs": 2}),
    ],
    ids=["at the second token", "three times", "inside a stop string", "three choices", "logprobs"],
)  # fmt: skip
def test_the_client_sees_the_very_same_events(kit, start, at, fields) -> None:
    body = kit.chat(max_tokens=12, seed=0, **fields)
    got, expected = both(
        start, Losing(*at), lambda running: events(kit, running, "/v1/chat/completions", body), step_s=0.001
    )
    assert got == expected
    assert expected[-1]["usage"]["completion_tokens"] <= 12 * fields.get("n", 1)


def test_a_tool_call_that_was_cut_is_one_call(kit, start) -> None:
    body = kit.chat(max_tokens=100, tools=[TOOL])
    script = Losing(6, 20, text="I will look. " + CALL)
    got, expected = both(start, script, lambda running: events(kit, running, "/v1/chat/completions", body))
    assert got == expected
    assert any(choice["finish_reason"] == "tool_calls" for event in got for choice in event["choices"])


@pytest.mark.parametrize("at", [0, 4])
def test_a_completion_with_the_prompts_logprobs_tells_them_once(kit, start, at) -> None:
    """Lost before the first token it begins anew, and the prompt is scored again; later it goes on."""
    body = {"model": "tiny", "prompt": "hi you", "echo": True, "logprobs": 1, "max_tokens": 8, "seed": 0}
    got, expected = both(start, Losing(at), lambda running: events(kit, running, "/v1/completions", body))
    assert got == expected

    def ask(running):
        with kit.openai_client(running) as client:
            return client.completions.create(**body).choices

    got, expected = both(start, Losing(at), ask)
    assert got == expected


def test_choices_that_are_over_stay_so(kit, start) -> None:
    """The first has its stop string at once, the second moves."""

    def ask(running):
        with kit.openai_client(running) as client:
            answer = client.chat.completions.create(**kit.chat(max_tokens=11, n=2, seed=1, stop=[WORDS[2]]))
            return [(choice.message.content, choice.finish_reason) for choice in answer.choices], answer.usage

    script = Losing(6)
    got, expected = both(start, script, ask, step_s=0.001)
    assert got == expected
    assert len(script.running.requests) == 3, "only the one that was not over went on"


def test_the_answer_says_that_it_moved_and_how(kit, start) -> None:
    script = Losing(5)
    running = script.running = start(None, script, step_s=0.001)
    with kit.openai_client(running) as client:
        whole = client.chat.completions.with_raw_response.create(**kit.chat(max_tokens=12))
        script.at = {7}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = client.chat.completions.create(**kit.chat(max_tokens=12), **options)
        calm = client.chat.completions.with_raw_response.create(**kit.chat(max_tokens=12))
    assert whole.headers["x-penstock-migrated"] == "exact"
    assert last.model_extra["penstock"]["migrated"] == "exact"
    assert "x-penstock-migrated" not in calm.headers


def test_one_record_with_two_attempts(kit, start, tmp_path) -> None:
    ledger = LedgerConfig(directory=str(tmp_path / "ledger"))
    config = msgspec.structs.replace(kit.make_config(), ledger=ledger)
    script = Losing(5)
    running = script.running = start(config, script, step_s=0.001)
    with kit.openai_client(running) as client:
        answer = client.chat.completions.create(**kit.chat(max_tokens=12))
    assert 'penstock_migrations_total{model="tiny"} 1' in running.metrics.render().decode()
    running.stop()
    with closing(sqlite3.connect(tmp_path / "ledger" / "usage.sqlite")) as ledger:
        (row,) = ledger.execute("SELECT attempts, outcome, prompt_tokens, completion_tokens FROM usage")
    assert row == (2, "finished", answer.usage.prompt_tokens, 12)


def test_a_client_that_leaves_while_its_stream_waits_pays_for_what_it_got(kit, start, tmp_path) -> None:
    ledger = LedgerConfig(directory=str(tmp_path / "ledger"))
    running = start(msgspec.structs.replace(kit.make_config(), ledger=ledger), step_s=0.01)
    with kit.openai_client(running) as client:
        stream = client.chat.completions.create(**kit.chat(stream=True, max_tokens=1000))
        list(itertools.islice(stream, 3))
        running.call(running.backend.lose_worker)
        stream.close()
    running.wait_until(lambda: running.gateway.num_accepted == 0)
    running.stop()
    with closing(sqlite3.connect(tmp_path / "ledger" / "usage.sqlite")) as ledger:
        (row,) = ledger.execute("SELECT attempts, outcome, prompt_tokens, completion_tokens FROM usage")
    assert row[:2] == (1, "cancelled")
    assert row[2] > 0
    assert row[3] >= 2


def test_what_is_the_requests_own_fault_does_not_move(kit, start) -> None:
    running = start(step_s=0.01)
    with kit.openai_client(running) as client:
        stream = client.chat.completions.create(**kit.chat(stream=True, max_tokens=1000))
        next(stream)
        running.call(lambda: running.backend.fail(running.requests[-1].request_id, EngineFault("NaN logits")))
        with pytest.raises(openai.APIError, match="NaN logits"):
            list(stream)
    assert len(running.requests) == 1
