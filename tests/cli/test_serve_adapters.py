"""Adapters of a real server, as the official client sees them: their names, who may use them, what they share
with the model, and how they come and go while it runs.
"""

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
from lora_checkpoints import write_adapter_for
from openai.types import Completion
from served import Server
from tenant_keys import add

from penstock.cli.main import main
from penstock.config.checkpoints import resolve

pytestmark = pytest.mark.timeout(300)

DEMO = resolve("penstock-demo-mini")
ADMIN = "admin-0123456789abcdef"
LONG = "Tell me of rivers, and of the sluices that hold them back. " * 4


class Place:
    """A server with two adapters in its file, and the file."""

    def __init__(self, place: Path, *, processes: int = 1, replicas: int = 1) -> None:
        self.place = place
        self.adapters = {
            name: write_adapter_for(place / name, DEMO, seed=i) for i, name in enumerate(("fr", "de", "it"))
        }
        keys = place / "keys.json"
        self.open, self.closed = (add(keys, tenant=tenant).key for tenant in ("all", "some"))
        self.write("fr", "de", processes=processes, version=processes - 1, replicas=replicas)
        self.server = Server(place, "-c", str(place / "config.yaml"), PENSTOCK_ADMIN_KEY=ADMIN)
        self.server.wait_ready()

    def write(self, *names: str, processes: int = 1, version: int = 0, replicas: int = 1) -> None:
        adapters = ", ".join(f"{name}: {self.adapters[name]}" for name in names)
        engine = "dtype: float32, threads: 1, kv_memory_bytes: 16777216, max_running: 8, adapter_slots: 2"
        (self.place / "config.yaml").write_text(
            f"models: [{{path: {DEMO}, name: mini, version: {version}, replicas: {replicas}, "
            f"adapters: {{{adapters}}}, engine: {{{engine}}}}}]\n"
            f"auth: {{keys_file: {self.place / 'keys.json'}}}\n"
            f"tenants: [{{id: some, adapters: [de]}}]\n"
            f"ledger: {{directory: {self.place / 'ledger'}}}\nserver: {{port: 0, processes: {processes}}}\n"
        )

    def client(self, key: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.server.url, api_key=key or self.open, max_retries=0)

    def order(self, verb: str, key: str = ADMIN, **body: str | bool) -> httpx2.Response:
        url = f"{self.server.url}/{verb}_lora_adapter"
        return httpx2.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def names(self, key: str = "") -> dict[str, str | None]:
        with self.client(key) as client:
            return {model.id: model.parent for model in client.models.list().data}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("adapters"))
    yield place
    place.server.close()


def ask(client: openai.OpenAI, model: str, prompt: str = LONG) -> tuple[str, int]:
    """The greedy answer, and how many tokens of the prompt were cached."""
    found = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
    assert found.model == model
    details = found.usage.prompt_tokens_details
    return found.choices[0].text, (details.cached_tokens if details else 0) or 0


def test_names_answers_and_caches(served: Place) -> None:
    assert served.names() == {"mini": None, "de": "mini", "fr": "mini"}
    with served.client() as client:
        first = {model: ask(client, model) for model in ("mini", "fr", "de")}
        again = {model: ask(client, model) for model in ("mini", "fr", "de")}
    assert len({text for text, _ in first.values()}) == 3
    assert [cached for _, cached in first.values()] == [0, 0, 0]  # Nobody hits another's blocks,
    assert all(cached >= 16 for _, cached in again.values())  # and everybody hits his own.
    assert {model: text for model, (text, _) in first.items()} == {
        model: text for model, (text, _) in again.items()
    }


def test_who_may(served: Place) -> None:
    assert served.names(served.closed) == {"mini": None, "de": "mini"}
    with served.client(served.closed) as client:
        assert ask(client, "de")[0]
        with pytest.raises(openai.PermissionDeniedError) as refused:
            ask(client, "fr")
        assert refused.value.code == "adapter_not_allowed"
        with pytest.raises(openai.NotFoundError):
            ask(client, "es")


def test_one_comes_and_goes_while_it_runs(served: Place) -> None:
    path = str(served.adapters["it"])
    assert served.order("load", served.open, lora_name="it", lora_path=path).status_code == 403
    missing = served.order("load", lora_name="it", lora_path=f"{path}/no")
    assert missing.status_code == 400
    assert f"{path}/no/adapter_config.json: cannot be read" in missing.text
    nowhere = served.order("load", lora_name="it", lora_path="~no-such-user-here/it")
    assert (nowhere.status_code, "~no-such-user-here/it/adapter_config.json" in nowhere.text) == (400, True)
    assert served.order("load", lora_name="mini", lora_path=path).status_code == 400
    in_place = served.order("load", lora_name="it", lora_path=path, load_inplace=True)
    assert (in_place.status_code, "load_inplace: expected false" in in_place.text) == (400, True)
    assert "it" not in served.names()
    loaded = served.order("load", lora_name="it", lora_path=path)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'it' added successfully.")
    with served.client() as client:
        before = ask(client, "it")[0]
        assert served.order("load", lora_name="it", lora_path=str(served.adapters["fr"])).status_code == 400
        assert served.order("unload", lora_name="it").status_code == 200
        with pytest.raises(openai.NotFoundError):
            ask(client, "it")
        assert served.order("unload", lora_name="it").status_code == 404
        # The name means another one now: nothing of the old one is found in the cache.
        assert served.order("load", lora_name="it", lora_path=str(served.adapters["fr"])).status_code == 200
        assert ask(client, "it")[0] == ask(client, "fr")[0] != before
    assert served.order("unload", lora_name="it").status_code == 200


def test_more_adapters_than_slots_in_one_batch(served: Place) -> None:
    """Two slots, three adapters at once: all answers are those of each alone."""
    assert served.order("load", lora_name="it", lora_path=str(served.adapters["it"])).status_code == 200
    with served.client() as client:
        names = ["fr", "mini", "de", "it"]
        alone = {name: ask(client, name, "What is a river?")[0] for name in names}
        streams = [
            client.completions.create(
                model=name, prompt="What is a river?", max_tokens=12, temperature=0, stream=True
            )
            for name in names * 2
        ]
        texts = ["".join(chunk.choices[0].text for chunk in stream if chunk.choices) for stream in streams]
    assert texts == [alone[name] for name in names * 2]
    served.order("unload", lora_name="it")


def test_the_file_is_read_again(served: Place) -> None:
    served.write("fr", "it")
    served.server.process.send_signal(signal.SIGHUP)
    served.server.until(lambda: served.names().keys() == {"mini", "fr", "it"}, "not read again")
    with served.client() as client:
        assert ask(client, "it")[0]


def test_the_ledger_has_them(served: Place, capsys: pytest.CaptureFixture[str]) -> None:
    served.server.process.send_signal(signal.SIGINT)
    assert served.server.wait_ended() == 0
    assert main(["usage", "--directory", str(served.place / "ledger"), "--by", "adapter"]) == 0
    rows = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split()}
    assert {"fr", "de", "it"} <= rows


def test_every_gateway_process_knows_what_was_loaded_at_one(tmp_path: Path) -> None:
    """Even those that start later: after both were killed, and the worker, it is there again."""
    place = Place(tmp_path, processes=2)
    try:
        path = str(place.adapters["it"])
        assert place.order("load", lora_name="it", lora_path=path).status_code == 200
        for taken in ("mini@1", "mini"):  # Clients mean the model by both.
            refused = place.order("load", lora_name=taken, lora_path=path)
            assert (refused.status_code, f"The name '{taken}' is taken." in refused.text) == (400, True)
        assert place.order("load", lora_name="gone", lora_path=path).status_code == 200
        assert place.order("unload", lora_name="gone").status_code == 200
        with place.client() as client:
            before = ask(client, "it")[0]
        old = gateways(place.server)
        for pid in place.server.workers:  # And of the gateways, which are its children too.
            psutil.Process(pid).kill()
        place.server.until(lambda: len(gateways(place.server) - old) == 2, "they do not come back")
        place.server.wait_ready()
        place.server.until(lambda: has(place, "it"), "it was forgotten")
        with place.client() as client:
            assert ask(client, "it")[0] == before
        assert "gone" not in place.names()
    finally:
        place.server.close()


def test_a_stream_goes_on_at_another_worker_that_has_its_adapter(tmp_path: Path) -> None:
    """Its worker is killed in the middle: the text is the one that nothing befell."""
    place = Place(tmp_path, replicas=2)
    prompt, limit = "What is a river?", 300
    extra = {"ignore_eos": True}
    try:
        with place.client() as client:
            ask_whole = partial(
                client.completions.create, prompt=prompt, max_tokens=limit, temperature=0, extra_body=extra
            )
            whole = ask_whole(model="fr").choices[0].text
            before = cpu_times(place.server)
            stream = client.completions.create(
                model="fr", prompt=prompt, max_tokens=limit, temperature=0, extra_body=extra, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks: list[Completion] = []
            # A busy gateway joins tokens, so a share of the text counts, not a number of chunks.
            while len(text_of(chunks)) * 6 < len(whole):
                chunks.append(next(stream))
            now = cpu_times(place.server)
            psutil.Process(max(now, key=lambda pid: now[pid] - before[pid])).kill()  # The one that computes.
            chunks += stream
            assert text_of(chunks) == whole
            assert chunks[-1].penstock["migrated"] == "exact"
            assert whole != ask_whole(model="mini").choices[0].text
    finally:
        place.server.close()


def text_of(chunks: list[Completion]) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def cpu_times(server: Server) -> dict[int, float]:
    """Seconds that each of its workers has computed."""
    return {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in server.workers}


def gateways(server: Server) -> set[int]:
    """The server's gateway processes."""
    found = set[int]()
    for pid in server.workers:
        with contextlib.suppress(psutil.Error):  # It has just ended.
            if any("gateway_process" in word for word in psutil.Process(pid).cmdline()):
                found.add(pid)
    return found


def has(place: Place, name: str) -> bool:
    """Whether it is listed, and answers."""
    try:
        with place.client() as client:
            return name in place.names() and bool(ask(client, name)[0])
    except openai.OpenAIError:
        return False
