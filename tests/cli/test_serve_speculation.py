"""Speculation in a real server, as the official client sees it: the same answers, and what was guessed in
their usage.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from served import PATIENCE_S, Server

from penstock.config.checkpoints import resolve

pytestmark = pytest.mark.timeout(300)

DEMO, MINI = resolve("penstock-demo"), resolve("penstock-demo-mini")
"""The first is served: by the law of real steps drafts must pay, as the mini's do not on a fast machine."""
STORY = "Tell me a story"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One model with drafts, one without, and one with another model's, behind two gateway processes."""
    place = tmp_path_factory.mktemp("speculation")
    engine = "dtype: float32, threads: 1, kv_memory_bytes: 16777216, max_running: 8, speculation"
    models = ", ".join(
        f"{{path: {DEMO}, name: {name}, engine: {{{engine}: {value}}}}}"
        for name, value in (("guessing", "ngram"), ("plain", "'off'"), ("drafted", MINI))
    )
    (place / "config.yaml").write_text(
        f"models: [{models}]\nledger: {{directory: {place / 'ledger'}}}\n"
        "server: {port: 0, processes: 2, trust_local: true}\n"
    )
    made = Server(place, "-c", str(place / "config.yaml"))
    made.wait_ready()
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=server.key or "none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, model: str, **how: Any) -> Any:
    """The story is told, and asked for again."""
    first = {"role": "user", "content": STORY}
    asked = {"model": model, "max_tokens": 80, "temperature": 0, **how}
    reported = client.chat.completions.create(messages=[first], model=model, max_tokens=80, temperature=0)
    before = {"role": "assistant", "content": reported.choices[0].message.content}
    return client.chat.completions.create(messages=[first, before, first], **asked)


def guessed(make: Callable[[], list[Any]]) -> list[Any]:
    """An answer, in one or more parts, of which some was guessed right. Whether drafts pay is for the law of
    real steps to say, and others that keep the machine busy mislead it for a while.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        parts = make()
        details = parts[-1].usage.completion_tokens_details
        if details is not None and details.accepted_prediction_tokens:
            return parts
    raise AssertionError("nothing was guessed right")


def test_what_was_guessed_is_in_the_usage(client: openai.OpenAI) -> None:
    (guessing,), plain = guessed(lambda: [ask(client, "guessing")]), ask(client, "plain")
    assert guessing.choices[0].message.content == plain.choices[0].message.content
    assert guessing.usage.completion_tokens == plain.usage.completion_tokens
    details = guessing.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < guessing.usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0
    assert details.reasoning_tokens is None
    assert plain.usage.completion_tokens_details is None


def test_another_model_guesses(server: Server, client: openai.OpenAI) -> None:
    """Drawn at a temperature, the same text, of which the smaller model has guessed a part."""

    def tell(model: str) -> Any:
        return client.chat.completions.create(
            messages=[{"role": "user", "content": STORY}], model=model, max_tokens=80, temperature=0.7, seed=5
        )

    (drafted,) = guessed(lambda: [tell("drafted")])
    assert drafted.choices[0].message.content == tell("plain").choices[0].message.content
    server.until(lambda: counted(server, "drafted", "accepted") > 0, "no drafts in /metrics")


def test_streams_and_stop_strings_end_where_they_would_without_drafts(client: openai.OpenAI) -> None:
    whole = ask(client, "plain").choices[0].message.content
    words = whole.split()
    stop = words[len(words) // 2]
    found: list[tuple[str, str | None, int]] = []
    how: dict[str, Any] = {"stop": [stop], "stream": True, "stream_options": {"include_usage": True}}
    for chunks in (
        guessed(lambda: list(ask(client, "guessing", **how))),
        list(ask(client, "plain", **how)),
    ):
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        found.append((text, ends[0], chunks[-1].usage.completion_tokens))
        details = chunks[-1].usage.completion_tokens_details
        assert details is None or details.accepted_prediction_tokens < chunks[-1].usage.completion_tokens
    assert found[0] == found[1]
    assert found[0][:2] == (whole[: whole.index(stop)], "stop")


def test_drafts_are_counted(server: Server, client: openai.OpenAI) -> None:
    guessed(lambda: [ask(client, "guessing")])
    server.until(lambda: counted(server, "guessing", "accepted") > 0, "no drafts in /metrics")
    accepted = counted(server, "guessing", "accepted")  # First: both grow between two looks.
    assert counted(server, "guessing", "drafted") >= accepted
    assert counted(server, "plain", "drafted") == 0


def counted(server: Server, model: str, what: str) -> float:
    page = httpx2.get(server.url.removesuffix("/v1") + "/metrics").text
    found = re.search(
        rf'^penstock_engine_{what}_tokens_total\{{model="{model}"\}} (\S+)$', page, re.MULTILINE
    )
    return float(found[1]) if found else 0.0
