"""Rollouts of a real server's model: one of a version that has no worker, one that is taken back because
it is slower, and one that is promoted, by several gateway processes, and survives a restart.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

ADMIN = "admin-0123456789abcdef"
SMALL, LARGE = resolve("penstock-demo-mini"), resolve("penstock-demo")
SLOWNESS = (
    "hard stop: time per token is ", "hard stop: prefill per uncached token is ", "time per token +",
    "prefill per uncached token +", "machine time per token of work +",
)  # fmt: skip
"""The beginnings of reasons to take a slower version back."""
AWAY = (
    "- {path: penstock-demo-mini, name: river, version: 3, replicas: 0,"
    " workers: [{url: 'http://127.0.0.1:1/v1', engine: vllm, served_model: river}]}\n"
)
PLAN = {"model": "river", "steps": [50], "requests_min": 30, "warm_up_requests": 5, "step_s": 3}


class Place:
    """A server with versions of one model, and two tenants."""

    def __init__(self, place: Path, *versions: Path, processes: int, more: str = "") -> None:
        self.place, keys = place, place / "keys.json"
        self.one, self.two = (add(keys, tenant=tenant).key for tenant in ("one", "two"))
        models = "".join(
            f"- {{path: {path}, name: river, version: {version},"
            f" engine: {{threads: 1, dtype: float32, kv_memory_bytes: 33554432, host_kv_memory_bytes: 0}}}}\n"
            for version, path in enumerate(versions, 1)
        )
        (place / "config.yaml").write_text(
            f"models:\n{models}{more}auth: {{keys_file: {keys}}}\nledger: {{directory: {place / 'ledger'}}}\n"
            f"server: {{port: 0, processes: {processes}}}\ntenants: [{{id: two, models: [river@1]}}]\n"
        )
        self.start()

    def start(self) -> None:
        self.server = Server(self.place, "-c", str(self.place / "config.yaml"), PENSTOCK_ADMIN_KEY=ADMIN)
        self.server.wait_ready()
        self.base = self.server.url.removesuffix("/v1")
        self.clients = {
            key: openai.OpenAI(base_url=self.server.url, api_key=key, max_retries=0)
            for key in (self.one, self.two)
        }

    def admin(self, verb: str, path: str, key: str = ADMIN, **body: object) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.request(verb, self.base + path, json=body or None, headers=headers, timeout=60)

    def latest(self) -> dict[str, Any]:
        return self.admin("GET", "/admin/rollouts?model=river").json()["rollouts"][0]

    def ask(self, key: str, conversation: int, model: str = "river") -> str:
        """The version that answered."""
        answer = self.clients[key].completions.create(
            model=model, prompt="The river", max_tokens=12, temperature=0, user=f"user-{conversation}",
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return answer.model

    def ask_until(self, happened: Callable[[], bool], *, timeout_s: float = 200.0) -> dict[int, set[str]]:
        """Many conversations; by conversation, the versions that answered."""
        versions: dict[int, set[str]] = {}
        end, lock, number = time.monotonic() + timeout_s, threading.Lock(), iter(range(10**6))

        def clients() -> None:
            while not stop.is_set():
                with lock:
                    conversation = next(number) % 90
                versions.setdefault(conversation, set()).add(self.ask(self.one, conversation))

        stop = threading.Event()
        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(clients) for _ in range(4)]
            try:
                while not happened():
                    assert time.monotonic() < end, json.dumps(self.latest())
                    time.sleep(0.2)
            finally:
                stop.set()
            for each in running:
                each.result()
        return versions

    def audit(self) -> list[dict[str, str]]:
        return self.admin("GET", "/admin/audit").json()["events"]


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The second version is slower, and the third one's workers are never there."""
    place = Place(tmp_path_factory.mktemp("slower"), SMALL, LARGE, processes=1, more=AWAY)
    yield place
    place.server.close()


def penstock(place: Place, *words: str) -> int:
    os.environ["COLUMNS"] = "110"
    return main(["rollout", *words, "--url", place.base, "--key", ADMIN])


def test_what_cannot_be_rolled_out_is_refused_at_once(slower: Place) -> None:
    for body, status, words in (
        (
            {"model": "river", "candidate": "river@4"},
            404,
            "has no version 'river@4'. It has 'river@1', 'river@2', 'river@3'",
        ),
        ({"model": "lake", "candidate": "lake@2"}, 404, "has no version"),
        ({"model": "river", "candidate": "river@1"}, 400, "'river@1' serves 'river' already"),
        ({**PLAN, "candidate": "river@2", "steps": [80]}, 400, "'steps' must be growing percentages"),
        ({**PLAN, "candidate": "river@2", "step": [5]}, 400, "unknown field `step`"),
    ):
        answer = slower.admin("POST", "/admin/rollouts", **body)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
    assert slower.admin("POST", "/admin/rollouts/river/promote").status_code == 404
    assert slower.admin("POST", "/admin/rollouts/river/pause").status_code == 404
    assert slower.admin("GET", "/admin/rollouts", key=slower.one).status_code == 403
    assert slower.admin("GET", "/admin/rollouts").json() == {"rollouts": []}


def test_a_version_without_a_worker_changes_nothing_and_cannot_be_promoted(
    slower: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock(slower, "start", "river@3", "--steps", "50") == 0
    try:
        assert "river@3 has no worker that takes requests" in capsys.readouterr().out
        assert {slower.ask(slower.one, each) for each in range(20)} == {"river@1"}
        assert penstock(slower, "promote", "river") == 1
        refused = capsys.readouterr().err
        assert "river@1 serves. Promote it when it has one, or abort the rollout" in refused
        assert slower.latest()["state"] == "running"
    finally:
        assert penstock(slower, "abort", "river") == 0


def test_a_slower_version_is_taken_back_by_itself(slower: Place, capsys: pytest.CaptureFixture[str]) -> None:
    started = slower.admin("POST", "/admin/rollouts", **PLAN, candidate="river@2")
    assert started.json()["rollouts"][0]["state"] == "running"
    again = slower.admin("POST", "/admin/rollouts", **PLAN, candidate="river@2")
    assert again.status_code == 400
    assert "Promote or abort it first" in again.json()["error"]["message"]
    versions = slower.ask_until(lambda: slower.latest()["state"] != "running")
    found = slower.latest()
    assert found["state"] == "rolled_back"
    assert found["why"].startswith(SLOWNESS), found["why"]
    had = Counter(version for each in versions.values() for version in each)
    assert had["river@2"] > 10
    assert had["river@1"] > 10
    assert {slower.ask(slower.one, each) for each in range(20)} == {"river@1"}, "nobody gets it any more"
    words = [each["what"] for each in slower.audit()]
    assert "rollout begins" in words
    assert "rollout taken back" in words
    assert penstock(slower, "status", "river") == 0
    shown = capsys.readouterr().out
    assert f"river@1 -> river@2: rolled_back: {found['why']}" in shown
    assert "worse" in shown or "hard stop" in shown


def test_its_decision_is_on_record_and_comes_out_the_same_again(
    slower: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    path = slower.place / "ledger" / "rollout-decisions.jsonl"
    assert main(["rollout", "replay", str(path)]) == 0
    assert "1 decisions made again: all the same" in capsys.readouterr().out
    changed = slower.place / "changed.jsonl"
    changed.write_text(path.read_text().replace('"state":"rolled_back"', '"state":"promoted"'))
    assert main(["rollout", "replay", str(changed)]) == 1
    shown = capsys.readouterr().out
    assert "line 1: river@2: on record promoted, step 1" in shown
    assert "again rolled_back, step 1" in shown
    assert main(["rollout", "replay", str(slower.place / "config.yaml")]) == 2
    capsys.readouterr()
    assert main(["rollout", "replay"]) == 2
    assert "replay needs a FILE" in capsys.readouterr().err


def test_copies_find_a_slower_version_out_before_anybody_has_it(
    slower: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--shadow", "100", "--steps", "50", "--requests", "30", "--warm-up", "5", "--step-minutes", "1")
    assert penstock(slower, "start", "river@2", *flags) == 0
    assert "nobody has it, it gets copies of 100 %" in capsys.readouterr().out
    versions = slower.ask_until(lambda: slower.latest()["state"] != "running")
    found = slower.latest()
    assert found["state"] == "rolled_back"
    assert found["step"] == -1, found["why"]
    assert {version for each in versions.values() for version in each} == {"river@1"}
    assert found["why"].startswith(SLOWNESS), found["why"]
    metrics = {each["metric"]: each for each in found["metrics"]}
    assert min(metrics["failures"]["canary_requests"], metrics["failures"]["control_requests"]) >= 10
    assert metrics["failures"]["difference"] == 0, "the copies were answered"
    page = slower.admin("GET", "/metrics").text
    assert 'penstock_shadow_requests_total{model="river@2",outcome="compared"}' in page
    assert "it gets copies of 100 % of conversations" in [each.get("why") for each in slower.audit()]


def test_who_may_not_use_the_new_version_keeps_the_old_one(slower: Place) -> None:
    assert penstock(slower, "start", "river@2", "--steps", "50", "--requests", "100000") == 0
    try:
        assert {slower.ask(slower.two, each) for each in range(30)} == {"river@1"}
        assert {slower.ask(slower.one, each) for each in range(30)} == {"river@1", "river@2"}
        assert slower.ask(slower.one, 1, "river@2") == "river@2", "a version that is named is what answers"
        same = [slower.ask(slower.one, 7) for _ in range(5)]
        assert len(set(same)) == 1, "a conversation stays where it is"
    finally:
        assert penstock(slower, "abort", "river") == 0
    assert slower.latest()["state"] == "aborted"
    assert {slower.ask(slower.one, each) for each in range(20)} == {"river@1"}


def test_a_version_that_is_no_worse_is_promoted_and_stays(tmp_path: Path) -> None:
    place = Place(tmp_path, LARGE, SMALL, processes=2)
    try:
        plan = {**PLAN, "candidate": "river@2", "promotes": True}
        assert place.admin("POST", "/admin/rollouts", **plan).status_code == 200
        versions = place.ask_until(lambda: place.latest()["state"] != "running")
        found = place.latest()
        assert found["state"] == "promoted", json.dumps(found)
        metrics = {each["metric"]: each for each in found["metrics"]}
        assert metrics["time per token"]["difference"] < 0, "the new one is faster"
        assert metrics["failures"]["canary_requests"] >= 30, "those of both processes"
        # One change at most: from the old one to the new.
        assert all(len(each) <= 2 for each in versions.values())
        assert _all_get(place, "river@2")
        with openai.OpenAI(base_url=place.server.url, api_key=place.one) as client:
            assert client.models.retrieve("river").model_dump()["root"] == "river@2"
        place.server.close()
        place.start()
        assert _all_get(place, "river@2")
        assert place.latest()["state"] == "promoted"
        assert place.admin("POST", "/admin/rollouts/river/abort").status_code == 200
        assert _all_get(place, "river@1"), "an operator takes it back"
    finally:
        place.server.close()


def _all_get(place: Place, version: str) -> bool:
    """Every process has heard, or will in a moment."""
    for _ in range(50):
        if {place.ask(place.one, each) for each in range(16)} == {version}:
            return True
        time.sleep(0.1)
    return False
