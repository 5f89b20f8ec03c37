"""Foreign engines behind `penstock serve`, over sockets, in processes of their own: streams of one that dies
continue on another worker, and several deployments of a model have an order and limits.
"""

import json
import signal
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from provider_process import ProviderProcess
from served import Server

pytestmark = pytest.mark.timeout(240)
STUCK = {"after": 20, "hang": True}
"""A stream goes so far, and no further until its worker is killed."""
KEYS, ADMIN = ("sk-one-tenant-0000000001", "sk-another-tenant-000002"), "sk-the-operators-key-0003"
PROCESSES = 2
RPM, REQUESTS = 4, 11


class Fleet:
    """`twins` has two vLLMs, `mixed` an SGLang and a worker of ours, `lone` a vLLM, `deployed` two providers,
    of which the cheaper takes four requests a minute.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.twins = [ProviderProcess("vllm"), ProviderProcess("vllm")]
        self.mixed, self.lone = ProviderProcess("sglang"), ProviderProcess("vllm")
        self.cheap, self.dear = ProviderProcess("openai"), ProviderProcess("openai")
        file = place / "penstock.yaml"
        file.write_text(
            f"server: {{port: 0, processes: {PROCESSES}}}\n"
            f"auth: {{keys: [{', '.join(KEYS)}], admin_keys: [{ADMIN}]}}\n"
            f"ledger: {{directory: {place / 'ledger'}}}\n"
            "models:\n"
            + _model("twins", "replicas: 0", *self.twins)
            + _model("mixed", "engine: {threads: 1, kv_memory_bytes: 33554432}", self.mixed)
            + _model("lone", "replicas: 0", self.lone)
            + _model(
                "deployed", "replicas: 0", self.cheap, self.dear, terms=(f"order: 1, rpm: {RPM}", "order: 2")
            )
        )
        self.server, self._asked = Server(place, "-c", str(file)), 0
        self.server.wait_ready()
        self.server.until(self.all_ready, "not all workers are ready")

    def all_ready(self) -> bool:
        url = f"{self.server.url.removesuffix('/v1')}/admin/workers"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {ADMIN}"})
        with urllib.request.urlopen(request) as found:
            workers = json.load(found)["workers"]
        return len(workers) == 7 and all(worker["state"] == "ready" for worker in workers)

    def stream(self, model: str, *, max_tokens: int, **headers: str) -> "Stream":
        """A greedy answer, with the seed that the stand-ins make their letters of. Tenants ask in turn."""
        self._asked += 1
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Hi."}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 3,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        key = KEYS[self._asked % len(KEYS)]
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        request = urllib.request.Request(
            f"{self.server.url}/chat/completions", json.dumps(body).encode(), headers
        )
        return Stream(urllib.request.urlopen(request, timeout=60))

    def close(self) -> None:
        self.server.close()
        for provider in (*self.twins, self.mixed, self.lone, self.cheap, self.dear):
            provider.kill()


def _model(name: str, own: str, *providers: ProviderProcess, terms: tuple[str, ...] = ()) -> str:
    workers = ", ".join(
        f"{{url: '{each.url}', engine: {each.engine}, served_model: served, max_model_len: 512{more}}}"
        for each, more in zip_longest(providers, [f", {text}" for text in terms], fillvalue="")
    )
    return f"  - {{path: penstock-demo-mini, name: {name}, {own}, workers: [{workers}]}}\n"


class Stream:
    """An answer that is read piece by piece."""

    def __init__(self, response: Any) -> None:
        self.headers, self._lines = response.headers, iter(response)
        self.text, self.usage, self.error, self.why = "", None, None, None
        self.facts: dict[str, Any] = {}

    def read(self, num_chars: int = 10_000) -> "Stream":
        """Up to so much text, or to the end."""
        while len(self.text) < num_chars and (line := next(self._lines, None)) is not None:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            self.error = event.get("error", self.error)
            self.usage = event.get("usage") or self.usage
            self.facts |= event.get("penstock", {})
            for choice in event.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
                self.why = choice["finish_reason"] or self.why
        return self


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("moves"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def twins(fleet: Fleet) -> tuple[Stream, Stream]:
    """An undisturbed answer, and one whose worker was killed in the middle."""
    whole = fleet.stream("twins", max_tokens=60).read()
    before = [twin.behaves(**STUCK) for twin in fleet.twins]
    stream = fleet.stream("twins", max_tokens=60)
    assert stream.headers["x-penstock-migration"] == "approximate"
    stream.read(5)
    (its,) = [i for i, twin in enumerate(fleet.twins) if twin.behaves(**STUCK) > before[i]]
    fleet.twins[1 - its].behaves()
    fleet.twins[its].kill()
    stream.read()
    assert fleet.twins[1 - its].behaves() == before[1 - its] + 1
    return whole, stream


@pytest.fixture(scope="module")
def mixed(fleet: Fleet) -> Stream:
    """An answer that an SGLang began, which was killed, and a worker of ours continued."""
    while True:  # Until the router chooses the SGLang.
        before = fleet.mixed.behaves(**STUCK)
        stream = fleet.stream("mixed", max_tokens=60)
        if fleet.mixed.behaves(**STUCK) > before:
            break
        stream.read()
    assert stream.headers["x-penstock-migration"] == "approximate"
    begun = stream.read(5).text
    fleet.mixed.kill()
    stream.read()
    assert stream.text.startswith(begun)
    return stream


def test_a_stream_of_a_vllm_that_dies_continues_on_another_one(twins: tuple[Stream, Stream]) -> None:
    whole, stream = twins
    assert (stream.text, stream.why, stream.error) == (whole.text, "length", None)
    assert stream.usage["completion_tokens"] == 60
    assert (whole.facts.get("migrated"), stream.facts["migrated"]) == (None, "approximate")


def test_a_worker_of_ours_continues_what_an_sglang_began(mixed: Stream) -> None:
    assert (mixed.why, mixed.error, mixed.usage["completion_tokens"]) == ("length", None, 60)
    assert mixed.facts["migrated"] == "approximate"


def test_a_client_may_refuse_a_continuation_that_could_differ(fleet: Fleet) -> None:
    whole = fleet.stream("lone", max_tokens=60).read()
    fleet.lone.behaves(**STUCK)
    stream = fleet.stream("lone", max_tokens=60, x_penstock_migration="exact")
    assert stream.headers["x-penstock-migration"] == "none"
    stream.read(5)
    fleet.lone.kill()
    stream.read()
    assert whole.text.startswith(stream.text)
    assert len(stream.text) < len(whole.text)
    assert stream.error["code"] == "stream_broken"
    assert fleet.stream("mixed", max_tokens=2).headers["x-penstock-migration"] is None, "ours is exact"


def test_a_deployment_out_of_requests_for_the_minute_leaves_the_rest_to_the_next(fleet: Fleet) -> None:
    before = fleet.cheap.behaves(), fleet.dear.behaves()
    began = time.monotonic()
    for _ in range(REQUESTS):
        assert fleet.stream("deployed", max_tokens=4).read().why == "length"
    cheap, dear = fleet.cheap.behaves() - before[0], fleet.dear.behaves() - before[1]
    # Each process has its part of the limit, and the kernel chooses the process.
    refilled = int((time.monotonic() - began) * RPM / 60)
    assert RPM // PROCESSES <= cheap <= RPM + refilled
    assert cheap + dear == REQUESTS


@pytest.mark.usefixtures("twins", "mixed")
def test_the_ledger_has_each_once(fleet: Fleet) -> None:
    fleet.server.process.send_signal(signal.SIGINT)
    fleet.server.wait_ended()
    with closing(sqlite3.connect(fleet.place / "ledger" / "usage.sqlite")) as ledger:
        # A request that only found its first worker dead was tried twice too; it has two tokens.
        found = ledger.execute(
            "SELECT served_model, attempts FROM usage WHERE attempts > 1 AND completion_tokens = 60"
        ).fetchall()
    assert sorted(found) == [("mixed", 2), ("twins", 2)]
