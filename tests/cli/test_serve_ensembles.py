"""Ensembles of a real server with two gateway processes and two tenants, as the official client sees them:
the steps of docs/ensembles.md, and steps that mean it ill.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from served import Server
from tenant_keys import add

from penstock.cli.main import main
from penstock.config.checkpoints import resolve

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ensembles.md").read_text()
TRICKS = """
import os, time

def act(answer, request):
    what = request["messages"][-1]["content"]
    if what == "hang":
        time.sleep(3600)
    if what == "eat":
        return {"choices": "x" * (1 << 30)}
    if what == "die":
        os._exit(3)
    if what == "fail":
        print("about to fail")
        raise KeyError("nothing")
    if what == "no JSON":
        return answer | {"choices": [float("nan")]}
    if what == "no answer":
        return {"choices": []}
    if what == "refuse":
        raise ValueError("Not this one.")
    answer["usage"], answer["id"] = {"prompt_tokens": 0}, "mine"
    answer["choices"][0]["message"]["content"] = os.environ.get("PENSTOCK_SECRET", "no secret")

def shout(request):
    return {**request, "prompt": request["prompt"].upper()}
"""


KEYS: dict[str, str] = {}
"""By tenant."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("ensembles")
    (place / "steps").mkdir()
    found = re.search(r"```python\n# The module `support`, in ./steps.\n(.*?)```", PAGE, re.DOTALL)
    assert found
    (place / "steps" / "support.py").write_text(found[1])
    (place / "steps" / "tricks.py").write_text(TRICKS)
    bounds = f"path: {place / 'steps'}, timeout_s: 2, memory_bytes: 268435456"
    (place / "config.yaml").write_text(f"""
models:
  - path: {resolve("penstock-demo-mini")}
    name: small
    engine: {{threads: 1, kv_memory_bytes: 16777216, max_running: 4}}
ensembles:
  - {{name: support, model: small, before: "support:prepare", after: "support:finish", {bounds}}}
  - {{name: tricks, model: small, after: "tricks:act", {bounds}}}
  - {{name: shout, model: small, before: "tricks:shout", {bounds}}}
tenants:
  - {{id: acme}}
  - {{id: guest, models: [support]}}
auth: {{keys_file: {place / "keys.jsonl"}}}
server: {{port: 0, processes: 2}}
ledger: {{directory: {place / "ledger"}}}
""")
    KEYS.update({tenant: add(place / "keys.jsonl", tenant=tenant).key for tenant in ("acme", "guest")})
    made = Server(place, "-c", str(place / "config.yaml"), PENSTOCK_SECRET="hidden")
    made.wait_ready()
    yield made
    made.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=KEYS["acme"], max_retries=0) as made:
        yield made


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_steps_of_the_page(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "messages": say("My card is 4111 1111 1111 1111"),
        "temperature": 0,
        "max_tokens": 12,
    }
    answer = client.chat.completions.create(model="support", **asked)
    brief = [{"role": "system", "content": "Be brief."}, *say("My card is [card]")]
    plain = client.chat.completions.create(model="small", **asked | {"messages": brief})
    assert answer.model == "support"
    assert (
        answer.choices[0].message.content == f"{plain.choices[0].message.content}\n\n(Written by a machine.)"
    )
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    chunks = list(
        client.chat.completions.create(
            model="support", stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer.choices[0].message.content
    assert {chunk.model for chunk in chunks} == {"support"}
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [
        None, answer.choices[0].finish_reason,
    ]  # fmt: skip
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="please begin a new one") as refused:
        client.chat.completions.create(model="support", messages=say("x") * 51)
    assert refused.value.code == "refused_by_ensemble"


def test_a_step_in_front_leaves_streams_as_they_are(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    plain = client.completions.create(model="small", prompt="THE CAPITAL", **how)
    chunks = list(client.completions.create(model="shout", prompt="the capital", stream=True, **how))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert len(chunks) > 3
    assert {chunk.model for chunk in chunks} == {"shout"}


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("hang", 500, "The ensemble 'tricks' failed: tricks:act took more than 2 s."),
        ("eat", 500, "The ensemble 'tricks' failed: tricks:act took more than 268435456 bytes of memory."),
        ("die", 500, "The ensemble 'tricks' failed: tricks:act was ended (exit code 3)."),
        ("fail", 500, "The ensemble 'tricks' failed: tricks:act raised KeyError."),
        ("no JSON", 500, "The ensemble 'tricks' failed: tricks:act raised ValueError."),
        ("no answer", 500, "The ensemble 'tricks' failed: tricks:act returned 0 choices."),
        ("refuse", 400, "Not this one."),
    ],
)
def test_steps_that_mean_it_ill_harm_their_own_request_alone(
    server: Server, client: openai.OpenAI, what: str, status: int, words: str
) -> None:
    for streams in (False, True) if what == "fail" else (False,):
        with pytest.raises(openai.APIStatusError) as failed:
            client.chat.completions.create(
                model="tricks", messages=say(what), max_tokens=2, extra_body={"stream": streams}
            )
        kind, code = {
            400: ("invalid_request_error", "refused_by_ensemble"), 500: ("api_error", "ensemble_failed"),
        }[status]  # fmt: skip
        assert failed.value.status_code == status
        assert failed.value.body == {"message": words, "param": None, "code": code, "type": kind}
    good = client.chat.completions.create(model="tricks", messages=say("go on"), max_tokens=2)
    assert good.choices[0].message.content == "no secret"
    assert good.id.startswith("chatcmpl-")
    assert good.usage is not None
    assert good.usage.prompt_tokens > 0
    if what == "fail":
        server.wait_said("about to fail")
        server.wait_said("KeyError: 'nothing'")


def test_who_may_use_it_and_where_it_stands(server: Server, client: openai.OpenAI, tmp_path: Path) -> None:
    cards = {card.id: getattr(card, "root", None) for card in client.models.list()}
    assert cards == {"small": None, "support": "small", "tricks": "small", "shout": "small"}
    with openai.OpenAI(base_url=server.url, api_key=KEYS["guest"], max_retries=0) as guest:
        assert [card.id for card in guest.models.list()] == ["support"]
        answer = guest.chat.completions.create(model="support", messages=say("hello"), max_tokens=2)
        assert answer.model == "support"
        for name in ("small", "tricks"):
            with pytest.raises(openai.PermissionDeniedError):
                guest.chat.completions.create(model=name, messages=say("hello"), max_tokens=2)
    for call in (
        lambda: client.responses.create(model="support", input="hello", max_output_tokens=2),
        lambda: client.embeddings.create(model="support", input="hello"),
    ):
        with pytest.raises(openai.BadRequestError, match="'support' is an ensemble, which answers"):
            call()
    headers = {"Authorization": f"Bearer {KEYS['acme']}"}
    body = {"model": "support", "messages": say("hello"), "max_tokens": 2}
    found = httpx2.post(f"{server.url}/chat/completions", json=body, headers=headers)
    assert found.headers["x-penstock-model"] == "small"
    assert found.headers["x-penstock-requested-model"] == "support"
    ledger = server.out.parent / "ledger"

    def recorded() -> bool:
        main_id = found.json()["id"]
        text = "".join(path.read_bytes().decode("latin-1") for path in ledger.rglob("*") if path.is_file())
        return main_id in text and "support" in text

    server.until(recorded, "no record in the ledger")


@pytest.mark.parametrize(
    ("ensemble", "words"),
    [
        (
            "name: a, model: m, before: 'nowhere:f'",
            "ensembles: a: nowhere:f cannot be imported: ModuleNotFound",
        ),
        ("name: a, model: x, before: 'json:dumps'", "ensembles[0].model: no model 'x' here"),
        ("name: m, model: m, before: 'json:dumps'", "ensembles[0].name: 'm' is the name of something else"),
        ("name: a, model: m", "ensembles[0].before: neither before nor after"),
        (
            "name: a, model: m, after: 'json.dumps'",
            "ensembles[0].after: expected module:function, got 'json.dumps'",
        ),
    ],
)
def test_what_cannot_be_is_said_at_the_start(
    ensemble: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(
        f"models: [{{path: {resolve('penstock-demo-mini')}, name: m}}]\nensembles: [{{{ensemble}}}]\n"
        f"ledger: {{directory: {tmp_path / 'ledger'}}}\nserver: {{port: 0}}\n"
    )
    assert main(["serve", "-c", str(tmp_path / "config.yaml")]) == 2
    assert words in capfd.readouterr().err
