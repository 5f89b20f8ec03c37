"""Several models of one real server that sleep and wake, as the official client sees them."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
from served import Server
from tenant_keys import add

from penstock.cli.main import main
from penstock.config.checkpoints import resolve

pytestmark = pytest.mark.timeout(300)

ADMIN = "admin-0123456789abcdef"
MODELS = {"tide": resolve("penstock-demo-mini"), "weir": resolve("penstock-demo")}
ENGINE = "threads: 1, dtype: float32, host_kv_memory_bytes: 0, max_running: 8"


BOUND = 1 << 30
"""Two processes, and the KV cache of one model; not of two."""


class Place:
    """A server with two models and two tenants."""

    def __init__(
        self,
        place: Path,
        *,
        server: str = "",
        fleet: str = "",
        health: str = "",
        weir: str = "",
        kv_bytes: int = 32 << 20,
        versions: bool = False,
    ) -> None:
        keys = place / "keys.json"
        self.one, self.two, self.old = (add(keys, tenant=tenant).key for tenant in ("one", "two", "old"))
        self.tide = place / "tide"
        shutil.copytree(MODELS["tide"], self.tide)
        paths = MODELS | {"tide": self.tide}
        models = "".join(
            f"- {{path: {path}, name: {'river' if versions else name}, {weir if name == 'weir' else ''}"
            f" version: {len(MODELS) - i if versions else 0},"
            f" engine: {{{ENGINE}, kv_memory_bytes: {kv_bytes}}}}}\n"
            for i, (name, path) in enumerate(paths.items())
        )
        (place / "config.yaml").write_text(
            f"models:\n{models}auth: {{keys_file: {keys}}}\nledger: {{directory: {place / 'ledger'}}}\n"
            f"server: {{port: 0, {server}}}\nfleet: {{{fleet}}}\nhealth: {{{health}}}\n"
            "tenants: [{id: old, models: [river@1, tide]}]\n"
        )
        self.server = Server(place, "-c", str(place / "config.yaml"), PENSTOCK_ADMIN_KEY=ADMIN)
        self.server.wait_ready()
        self.base = self.server.url.removesuffix("/v1")

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.server.url, api_key=key, max_retries=0)

    def ask(self, key: str, model: str, **more: object) -> str:
        with self.client(key) as client:
            answer = client.completions.create(
                model=model, prompt="The river", max_tokens=16, temperature=0, **more
            )
            return answer.choices[0].text

    def admin(self, verb: str, path: str, key: str = ADMIN, **body: object) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.request(verb, self.base + path, json=body or None, headers=headers, timeout=60)

    def order(self, what: str, model: str) -> httpx2.Response:
        return self.admin("POST", f"/admin/{what}", model=model)

    def states(self) -> dict[str, str]:
        found = self.admin("GET", "/admin/workers").json()["workers"]
        return {each["model"]: each["state"] for each in found}

    def wait_state(self, model: str, state: str) -> None:
        self.server.until(lambda: self.states()[model] == state, f"{model} never {state}")

    def engines(self) -> list[psutil.Process]:
        found = list[psutil.Process]()
        for pid in self.server.workers:
            with contextlib.suppress(psutil.Error):  # It may just have ended.
                if "penstock.engine.worker" in (process := psutil.Process(pid)).cmdline():
                    found.append(process)
        return found

    def resident(self) -> int:
        return sum(each.memory_info().rss for each in self.engines())


class LongStream:
    """An answer that takes a while, read by a thread."""

    def __init__(self, place: Place, key: str, model: str) -> None:
        self.text, self.begun, self.finish = "", threading.Event(), ""

        def read() -> None:
            with place.client(key) as client:
                stream = client.completions.create(
                    model=model, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
                )
                for chunk in stream:
                    self.begun.set()
                    self.text += chunk.choices[0].text
                    self.finish = chunk.choices[0].finish_reason or self.finish

        self._thread = threading.Thread(target=read)
        self._thread.start()
        assert self.begun.wait(60)

    def ended(self) -> str:
        self._thread.join(120)
        return self.finish


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Two gateway processes; one of the models sleeps by itself, though it is probed."""
    idle = "sleep_after_s: 3,"
    made = Place(tmp_path_factory.mktemp("sleep"), server="processes: 2", weir=idle, health="probe_s: 0.5")
    yield made
    made.server.close()


def test_by_hand_and_by_the_first_request(place: Place) -> None:
    before = place.ask(place.one, "tide")
    place.ask(place.one, "weir")
    awake = place.resident()
    assert place.order("sleep", "tide").json()["is_sleeping"] is True
    assert main(["sleep", "tide", "--url", place.base, "--key", ADMIN]) == 0, "it sleeps already"
    place.wait_state("weir", "asleep")  # Idle for long enough.
    assert awake - place.resident() > 40 << 20
    assert place.admin("GET", "/admin/is_sleeping?model=weir").json()["state"] == "asleep"
    assert place.admin("GET", "/admin/is_sleeping?model=weir", key=place.one).status_code == 403
    for path in ("/health", "/ready"):
        assert httpx2.get(place.base + path).status_code == 200, "what sleeps is well"
    with place.client(place.two) as client:
        assert {model.id: model.state for model in client.models.list().data} == dict.fromkeys(
            MODELS, "asleep"
        )
    metrics = place.admin("GET", "/metrics").text
    assert 'penstock_workers{model="tide",state="asleep"}' in metrics
    # Both processes hear of it, and each tenant's request waits and is answered as ever.
    answers = list[str]()
    threads = [
        threading.Thread(target=lambda key=key: answers.append(place.ask(key, "tide")))
        for key in (place.one, place.two) * 3
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert answers == [before] * 6
    assert place.states()["tide"] == "ready"
    with place.client(place.two) as client:
        assert client.models.retrieve("tide").state is None


def test_no_answer_is_cut(place: Place) -> None:
    stream = LongStream(place, place.one, "tide")
    refused = place.order("sleep", "tide")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_busy")
    assert stream.ended() == "length"


def test_one_that_is_damaged_asleep_harms_nobody_else(place: Place) -> None:
    assert place.order("sleep", "tide").status_code == 200
    weights = place.tide / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(openai.InternalServerError, match=r"The model 'tide' cannot be woken\.$"):
        place.ask(place.one, "tide")
    place.server.wait_said("tide/model.safetensors: not a whole safetensors file")
    assert place.ask(place.two, "weir")
    weights.write_bytes(whole)
    assert place.ask(place.one, "tide")


def test_one_that_dies_asleep_is_started_asleep(place: Place) -> None:
    before = place.ask(place.one, "tide")
    assert place.order("sleep", "tide").status_code == 200
    place.wait_state("weir", "asleep")
    old = {each.pid for each in place.engines()}
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    place.server.until(lambda: len({each.pid for each in place.engines()} - old) == 2, "not started again")
    for model in MODELS:
        place.wait_state(model, "asleep")
    assert place.ask(place.two, "tide") == before


def test_whoever_cannot_wait_is_told_when_to_come_back(place: Place) -> None:
    place.wait_state("weir", "asleep")
    with pytest.raises(openai.RateLimitError) as refused:
        place.ask(place.one, "weir", extra_headers={"x-penstock-max-wait-ms": "20"})
    assert "asleep" in str(refused.value)
    place.wait_state("weir", "ready")  # It wakes for whoever comes back.
    assert place.ask(place.one, "weir")


def test_strangers_and_wrong_names(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.order("sleep", "none").status_code == 404
    assert place.admin("POST", "/admin/sleep", key=place.one, model="tide").status_code == 403
    assert place.admin("POST", "/admin/wake_up", model=["tide"]).status_code == 400
    assert place.admin("POST", "/admin/wake_up", model="tide").json()["is_sleeping"] is False
    assert main(["wake", "tide", "--url", place.base, "--key", ADMIN]) == 0
    assert "tide is ready." in capsys.readouterr().err
    assert main(["wake", "none", "--url", place.base, "--key", ADMIN]) == 1


def test_versions_share_a_name_and_a_bound_on_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path, fleet=f"memory_bytes: {BOUND}", kv_bytes=BOUND // 3, versions=True)
    new, old = "river@2", "river@1"
    try:
        assert place.states() == {new: "ready", old: "asleep"}, "the first that fits is awake"
        with place.client(place.one) as client:
            cards = {card.id: card.root for card in client.models.list()}
            assert cards == {new: None, old: None, "river": new}
            assert client.models.retrieve("river").root == new
            answer = client.completions.create(model="river", prompt="x", max_tokens=1)
            assert answer.model == new, "the version that stands first"
        with place.client(place.old) as client:
            assert [card.id for card in client.models.list()] == [old]
            with pytest.raises(openai.PermissionDeniedError):
                client.completions.create(model="river", prompt="x")
        with pytest.raises(openai.NotFoundError):
            place.ask(place.one, "river@3")
        assert place.ask(place.old, old)
        assert place.states() == {new: "asleep", old: "ready"}
        stream = LongStream(place, place.one, old)
        with pytest.raises(openai.InternalServerError) as refused:
            place.ask(place.two, "river")
        assert refused.value.status_code == 503
        assert refused.value.code == "no_memory"
        assert "while 'river@1' has work" in str(refused.value)
        assert stream.ended() == "length"
        assert place.ask(place.two, "river")
        assert place.states() == {new: "ready", old: "asleep"}
        place.server.process.send_signal(signal.SIGINT)
        assert place.server.wait_ended() == 0, "who sleeps is ended like others"
        assert "the model cannot answer" not in place.server.err.read_text(), "it was asleep or woke"
    finally:
        place.server.close()
    capsys.readouterr()
    by = "--by=model,requested_model"
    assert main(["usage", by, "--format=csv", f"--directory={tmp_path / 'ledger'}"]) == 0
    reported = capsys.readouterr().out
    assert "river@2,river," in reported
    assert "river@1,river@1," in reported
