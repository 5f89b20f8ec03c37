"""A real server whose model scales: by hand and by load, with streams that run while workers leave."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from served import Server

from penstock.cli.main import main

pytestmark = pytest.mark.timeout(300)

ADMIN, KEY = "admin-0123456789abcdef", "sk-user-0123456789abcdef"
PROCESSES = 2


class Place:
    """Two gateway processes, and a model with one to three workers."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "config.yaml").write_text(
            "models:\n- {path: penstock-demo-mini, name: river, scale: {max: 3, min: 1, in_after_s: 2},"
            " engine: {threads: 1, dtype: float32, kv_memory_bytes: 33554432, host_kv_memory_bytes: 0}}\n"
            f"ledger: {{directory: {place / 'ledger'}}}\nserver: {{port: 0, processes: {PROCESSES}}}\n"
        )
        self.server = Server(
            place, "-c", str(place / "config.yaml"), PENSTOCK_ADMIN_KEY=ADMIN, PENSTOCK_API_KEY=KEY
        )
        self.server.wait_ready()
        self.base = self.server.url.removesuffix("/v1")
        self.client = openai.OpenAI(base_url=self.server.url, api_key=KEY, max_retries=0)

    def admin(self, verb: str, path: str, key: str = ADMIN, **body: object) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.request(verb, self.base + path, json=body or None, headers=headers, timeout=60)

    def wanted(self) -> dict[str, object]:
        return self.admin("GET", "/scale?model=river").json()

    def stream(self) -> str:
        """How a long answer ends."""
        answer = self.client.completions.create(
            model="river", prompt="The river", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
        )
        return [chunk.choices[0].finish_reason for chunk in answer if chunk.choices][-1] or ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("scale"))
    yield found
    found.server.close()


def test_orders_that_contradict_the_bounds_are_refused(place: Place) -> None:
    for body, status, words in (
        ({"model": "river", "workers": 9}, 400, "expected 0 to 3 (models[].scale.max), got 9"),
        ({"model": "river", "workers": 1, "for_s": 0}, 400, "Invalid 'for_s'"),
        ({"model": "lake", "workers": 1}, 404, "does not scale"),
        ({"workers": 1, "metric": "cpu"}, 400, "unknown field `metric`"),
    ):
        refused = place.admin("POST", "/admin/scale", **body)
        assert refused.status_code == status, refused.text
        assert words in refused.json()["error"]["message"]
    assert place.admin("GET", "/admin/scale", key=KEY).status_code == 403
    assert place.admin("GET", "/scale").status_code == 400
    assert place.admin("GET", "/scale?model=river&pool=spot").status_code == 400


def test_out_and_in_again_while_streams_run(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["COLUMNS"] = "110"
    server, flags = place.server, ["--url", place.base, "--key", ADMIN]
    assert place.wanted() == {"model": "river", "workers": 1, "ready": 1}
    assert main(["scale", "river", "--to", "3", "--for", "1h", *flags]) == 0
    assert "3 workers by hand until" in capsys.readouterr().out
    server.until(lambda: place.wanted()["ready"] == 3, "three are ready")
    assert b'penstock_scale_wanted_workers{model="river",pool=""} 3' in place.admin("GET", "/metrics").content
    with ThreadPoolExecutor(12) as threads:
        streams = [threads.submit(place.stream) for _ in range(12)]
        assert main(["scale", "river", "--to", "1", *flags]) == 0
        assert place.wanted()["workers"] == 1
        assert [each.result() for each in streams] == ["length"] * 12, "no stream is cut"
    server.until(lambda: len(place.admin("GET", "/admin/workers").json()["workers"]) == 1, "two have left")
    leaves = Counter(re.findall(r"a worker leaves +worker=(river-\d)", server.err.read_text()))
    # Those with least to do, which may be the first one, too.
    assert list(leaves.values()) == [1 + PROCESSES] * 2, "nobody joined one again"
    assert main(["scale", "river", "--auto", *flags]) == 0
    report = place.admin("GET", "/admin/scale?model=river").json()["models"][0]
    assert report["override"] is None
    assert [each["move"] for each in report["moves"]][-2:] == ["in", "out"]
    assert report["decision"]["cold_start_s"] < 60, "it was measured"
    assert report["points"][-1]["workers"] >= 1
    said = [(each["what"], each["about"]) for each in place.admin("GET", "/admin/audit").json()["events"]]
    assert ("scaled out", "river") in said
    assert ("scaling by hand", "river") in said


def test_every_decision_is_on_record_and_comes_out_the_same_again(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place.place / "ledger" / "scaling-decisions.jsonl"
    place.server.until(path.exists, "decisions are written down")
    assert main(["scale", "--replay", str(path)]) == 0
    assert "all the same" in capsys.readouterr().out
    changed = place.place / "changed.jsonl"
    changed.write_text(path.read_text().replace('"max":3', '"max":2', 1))
    assert main(["scale", "--replay", str(changed)]) == 1
    assert "come out otherwise" in capsys.readouterr().out
    assert main(["scale", "--replay", str(place.place / "out")]) == 2
