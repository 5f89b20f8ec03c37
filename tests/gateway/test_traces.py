"""Traces of requests over real sockets, to a collector in another process that reads them with
OpenTelemetry's own messages.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import otlp_receiver
import pytest
from fake_backend import FakeBackend

from penstock.config.tree import TracesConfig
from penstock.telemetry import traces

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=7"}
CANARY = "swordfish-of-the-prompt"
SERVER, CLIENT = 2, 3
"""OTLP's kinds of spans."""


@pytest.fixture(autouse=True)
def _often(monkeypatch) -> None:
    monkeypatch.setattr(traces, "EVERY_S", 0.1)


class CollectorProcess:
    """tests/doubles/otlp_receiver.py."""

    def __init__(self, directory: Path) -> None:
        self._status = directory / "status"
        self.answer(200)
        command = [sys.executable, otlp_receiver.__file__, str(self._status)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}/v1/traces"
        self._spans: queue.Queue[dict] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._spans.put(json.loads(line))

    def answer(self, status: int) -> None:
        self._status.write_text(str(status))

    def tree(self, trace_id: str, *names: str) -> dict[str, dict]:
        """The spans of a trace by name, when these have come."""
        found: dict[str, dict] = {}
        while not found.keys() >= set(names):
            span = self._spans.get(timeout=30)
            if span["trace"] == trace_id:
                found[span["name"]] = span
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    made = CollectorProcess(tmp_path_factory.mktemp("collector"))
    yield made
    made.close()


def traced(kit: types.SimpleNamespace, collector: CollectorProcess, **terms: float):
    traces = TracesConfig(endpoint=collector.endpoint, **terms)
    return msgspec.structs.replace(kit.make_config(), traces=traces)


def test_a_chat_is_one_tree_below_its_callers_span(start, kit, collector) -> None:
    running = start(traced(kit, collector))
    with kit.openai_client(running) as client:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": CANARY}],
            max_tokens=3,
            extra_headers=PARENT,
        )
    found = collector.tree(TRACE, "chat tiny", "admit", "queue", "attempt", "prefill", "decode")
    root, attempt = found["chat tiny"], found["attempt"]
    assert (root["parent"], root["kind"], root["service"], root["error"]) == (SPAN, SERVER, "penstock", "")
    assert (attempt["parent"], attempt["kind"]) == (root["id"], CLIENT)
    assert {found[name]["parent"] for name in ("admit", "queue")} == {root["id"]}
    assert {found[name]["parent"] for name in ("prefill", "decode")} == {attempt["id"]}
    assert (
        root["attributes"]
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.output_tokens": 3,
            "http.response.status_code": 200,
        }
        == root["attributes"]
    )
    starts = [found[name]["start_ns"] for name in ("chat tiny", "admit", "queue", "attempt", "decode")]
    assert starts == sorted(starts)
    assert found["admit"]["end_ns"] == found["queue"]["start_ns"]
    assert found["prefill"]["end_ns"] == found["decode"]["start_ns"] <= root["end_ns"]
    assert not any(CANARY in span["raw"] for span in found.values())
    log = running.log_text.getvalue()
    assert f"trace_id={TRACE}" in log


def test_what_is_refused_is_a_trace_with_its_error(start, kit, collector) -> None:
    running = start(traced(kit, collector, share=0))
    parent = f"00-{TRACE[::-1]}-{SPAN}-00"
    with kit.openai_client(running) as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=-1,
            extra_headers={"traceparent": parent},
        )
    (root,) = (span for name, span in collector.tree(TRACE[::-1], "admit").items() if name != "admit")
    assert (root["error"], root["attributes"]["error.type"]) == ("400", "400")
    assert root["attributes"]["http.response.status_code"] == 400


def test_a_retry_is_an_attempt_beside_the_first(kit, collector) -> None:
    class Two(kit.RunningGateway):
        async def make_backends(self):
            stuck_s = 60.0
            return {"tiny": [FakeBackend(self.clock, script=self._recorded, step_s=stuck_s) for _ in "ab"]}

    def ask() -> None:
        headers = {"traceparent": f"00-{'a' * 32}-{SPAN}-01"}
        with kit.openai_client(running) as client:
            client.completions.create(model="tiny", prompt="x", max_tokens=2, extra_headers=headers)

    running = Two(traced(kit, collector))
    try:
        asking = threading.Thread(target=ask)
        asking.start()
        running.wait_until(lambda: any(backend.num_streams for backend in running.backend))
        lost, other = sorted(running.backend, key=lambda backend: -backend.num_streams)
        running.call(lambda: setattr(other, "_step_s", 0))
        running.call(lost.lose_worker)
        asking.join(20)
    finally:
        running.stop()
    found = collector.tree("a" * 32, "text_completion tiny", "attempt", "retry")
    assert (found["attempt"]["error"], found["retry"]["error"]) == ("WorkerUnavailable", "")
    assert found["retry"]["attributes"]["penstock.attempt"] == 2
    assert found["attempt"]["end_ns"] <= found["retry"]["start_ns"]


@contextlib.contextmanager
def before_a_provider(kit, config) -> Iterator[types.SimpleNamespace]:
    running = kit.BeforeProvider(config)
    try:
        yield running
    finally:
        running.stop()


def ask_provider(kit, running, headers: dict[str, str]) -> dict[str, str]:
    """The headers that the provider got."""
    running.provider.requests.clear()
    with kit.openai_client(running) as client:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2, extra_headers=headers
        )
    (asked,) = (each for each in running.provider.requests if each.method == "POST")
    return asked.headers


def test_an_external_worker_continues_the_trace_below_its_attempt(kit, collector) -> None:
    parent = f"00-{'b' * 32}-{SPAN}-01"
    with before_a_provider(kit, traced(kit, collector)) as running:
        got = ask_provider(kit, running, {"traceparent": parent, "tracestate": "vendor=7"})
        found = collector.tree("b" * 32, "attempt")
    assert got["traceparent"] == f"00-{'b' * 32}-{found['attempt']['id']}-01"
    assert got["tracestate"] == "vendor=7"


def test_without_a_collector_the_callers_trace_goes_on_as_it_came(kit) -> None:
    with before_a_provider(kit, kit.make_config()) as running:
        got = ask_provider(kit, running, PARENT)
        assert (got["traceparent"], got["tracestate"]) == (PARENT["traceparent"], "vendor=7")
        assert "traceparent" not in ask_provider(kit, running, {})
        assert "traceparent" not in ask_provider(kit, running, {"traceparent": "nonsense"})


def test_a_collector_that_fails_costs_no_answer_and_is_said_once(start, kit, collector, capfd) -> None:
    collector.answer(400)
    try:
        running = start(traced(kit, collector, share=1))
        with kit.openai_client(running) as client:
            for _ in range(3):
                client.completions.create(model="tiny", prompt="x", max_tokens=1)
        running.wait_until(lambda: "the collector takes no traces" in running.log_text.getvalue())
        collector.answer(200)
        with kit.openai_client(running) as client:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        running.wait_until(lambda: "the collector takes traces again" in running.log_text.getvalue())
    finally:
        collector.answer(200)
    (line,) = (each for each in running.log_text.getvalue().splitlines() if "takes no traces" in each)
    assert "400" in line, "it says why"
    assert not capfd.readouterr().err, "the library's own lines are not written"
