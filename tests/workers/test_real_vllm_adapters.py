"""Adapters that the gateway lets a real vLLM load and unload while it runs: those of the configuration, and
those of operators, at a server of two gateway processes.
"""

import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from served import Server

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]
ADMIN, KEY = "admin-0123456789abcdef", "sk-0123456789abcdef0123"


class Front:
    """`penstock serve` in front of a vLLM that has "tone" and "brief" of its own."""

    def __init__(
        self, place: Path, vllm_url: str, model: Path, adapter_of: Callable[[Path, int], Path]
    ) -> None:
        self.vllm_url = vllm_url
        self.adapters = {seed: adapter_of(place / f"adapter-{seed}", seed) for seed in (0, 1)}
        file = place / "penstock.yaml"
        file.write_text(
            f"server: {{port: 0, processes: 2}}\nauth: {{keys: [{KEY}]}}\n"
            f"models: [{{path: {model}, name: mine, replicas: 0, adapters: {{first: {self.adapters[0]}}}, "
            f"workers: [{{url: '{vllm_url}', engine: vllm, served_model: served}}]}}]\n"
        )
        self.server = Server(place, "-c", str(file), PENSTOCK_ADMIN_KEY=ADMIN)
        self.server.wait_ready()

    def order(self, verb: str, **body: str) -> httpx2.Response:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return httpx2.post(f"{self.server.url}/{verb}_lora_adapter", json=body, headers=headers, timeout=120)

    def ask(self, model: str) -> str:
        with openai.OpenAI(base_url=self.server.url, api_key=KEY, max_retries=0) as client:
            found = client.completions.create(model=model, prompt="A river", max_tokens=12, temperature=0)
        assert found.model == model
        return found.choices[0].text

    def names(self) -> dict[str, str | None]:
        with openai.OpenAI(base_url=self.server.url, api_key=KEY, max_retries=0) as client:
            return {card.id: card.parent for card in client.models.list()}

    def has(self, name: str) -> bool:
        with contextlib.suppress(openai.OpenAIError):
            return bool(self.ask(name))
        return False

    def listed(self) -> dict[str, str]:
        """What the vLLM itself says."""
        with urllib.request.urlopen(f"{self.vllm_url}/v1/models", timeout=30) as answer:
            return {card["id"]: card["root"] for card in json.load(answer)["data"] if card["parent"]}


@pytest.fixture
def front(
    tmp_path: Path, vllm_url: str, model_28m: Path, adapter_of: Callable[[Path, int], Path]
) -> Iterator[Front]:
    made = Front(tmp_path, vllm_url, model_28m, adapter_of)
    yield made
    for name in made.listed().keys() - {"tone", "brief"}:  # The vLLM is everybody's.
        made.order("unload", lora_name=name)
    made.server.close()


def test_a_real_vllm_loads_what_is_wanted_of_the_model(front: Front) -> None:
    front.server.until(lambda: front.has("first"), "the configuration's adapter does not come")
    assert front.listed()["first"] == str(front.adapters[0])
    answers = {name: front.ask(name) for name in ("first", "tone", "brief", "mine")}
    assert answers["first"] == answers["tone"] not in (answers["brief"], answers["mine"])

    loaded = front.order("load", lora_name="second", lora_path=str(front.adapters[1]))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert front.ask("second") == answers["brief"]
    assert front.names()["second"] == "mine"
    for path in ("/nowhere/at/all", "s3://models/fr", f"{front.adapters[1]}#digest=5f0c"):
        refused = front.order("load", lora_name="third", lora_path=path)
        assert refused.status_code == 400, refused.text
        assert "third" in refused.json()["error"]["message"]
    assert "third" not in front.names()
    assert front.order("unload", lora_name="second").status_code == 200
    assert front.listed().keys() == {"tone", "brief", "first"}
    with pytest.raises(openai.NotFoundError):
        front.ask("second")
