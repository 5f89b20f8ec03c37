"""A scripted provider and a real vLLM, each as the other's fallback, behind `penstock serve`: which of them
answers, and what is counted.
"""

import contextlib
import json
import os
import signal
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from provider_process import ProviderProcess
from served import Server

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]


class Route:
    """`big` is the provider's and falls back to `local`, a real vLLM's; `turned`: the other way round."""

    def __init__(
        self, place: Path, provider: ProviderProcess, vllm_url: str, model: Path, *, turned: bool = False
    ) -> None:
        self.place, self.provider = place, provider
        file = place / "penstock.yaml"
        engines = (provider.url, "openai"), (vllm_url, "vllm")
        first, second = reversed(engines) if turned else engines
        worker = "replicas: 0, workers: [{url: '%s', engine: %s, served_model: served, max_model_len: 512}]"
        file.write_text(
            "server: {port: 0, trust_local: true}\n"
            "admission: {ttft_target_ms: 20000}\n"
            f"ledger: {{directory: {place / 'ledger'}}}\n"
            "models:\n"
            f"  - {{path: {model}, name: big, {worker % first}}}\n"
            f"  - {{path: {model}, name: local, {worker % second}}}\n"
            "routing: {models: [{model: big, fallback: local}]}\n"
            "prices: {models: [{model: big, output: 5}, {model: local, output: 2}]}\n"
        )
        self.server = Server(place, "-c", str(file), "--no-auth")
        self.server.wait_ready()
        self.server.until(self.is_ready, "not ready")

    def is_ready(self) -> bool:
        url = f"{self.server.url.removesuffix('/v1')}/admin/workers"
        with urllib.request.urlopen(url, timeout=60) as found:
            workers = json.load(found)["workers"]
        return len(workers) == 2 and all(worker["state"] == "ready" for worker in workers)

    def ask(self, **headers: str) -> tuple[str, str, float]:
        """Which model answered eight tokens, why another one did, and after how long."""
        body = {"model": "big", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            f"{self.server.url}/chat/completions",
            json.dumps({**body, "ignore_eos": True}).encode(),
            {"content-type": "application/json", **headers},
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
            told = answer.headers
        took_s = time.monotonic() - began
        return told["x-penstock-model"], told.get("x-penstock-downgrade", ""), took_s

    def stop(self) -> list[tuple[object, ...]]:
        """End it; what the ledger has of each request."""
        self.server.process.terminate()
        self.server.wait_ended()
        with sqlite3.connect(self.place / "ledger" / "usage.sqlite") as ledger:
            return ledger.execute(
                "SELECT served_model, route_reason, outcome, attempts, completion_tokens, cost_micros "
                "FROM usage"
            ).fetchall()


@pytest.fixture
def route(tmp_path: Path, vllm_url: str, model_28m: Path) -> Iterator[Route]:
    with ProviderProcess() as provider:
        made = Route(tmp_path, provider, vllm_url, model_28m)
        yield made
        made.server.close()


def test_a_real_vllm_answers_for_a_provider_until_that_is_well_again(route: Route) -> None:
    assert route.ask()[:2] == ("big", "")
    route.provider.fails(500)
    failed = [route.ask()[:2] for _ in range(8)]
    assert {model for model, _ in failed} == {"local"}
    assert [why for _, why in failed][-1] == "breaker", "the provider is left alone by now"
    route.provider.behaves()
    route.server.until(lambda: route.ask()[0] == "big", "a probe finds it well")
    rows = route.stop()
    assert {row[2] for row in rows} == {"finished"}
    assert all(row[4] == 8 for row in rows), "tokens count once"
    for served_model, _, _, attempts, _, cost in rows:
        assert cost == 8 * (5 if served_model == "big" else 2), "the model that answered is paid for, once"
        assert attempts <= 2
    assert sum(row[0] == "local" for row in rows) >= 8


def test_a_provider_that_is_slow_to_its_first_byte_leaves_time_for_the_vllm(route: Route) -> None:
    route.provider.behaves(delay_s=25)
    for _ in range(3):
        model, why, took_s = route.ask(x_penstock_max_wait_ms="4000")
        assert (model, why) == ("local", "timeout")
        assert took_s < 4, "within what the client waits"
    route.provider.behaves()
    assert route.ask()[:2] == ("big", "")
    rows = route.stop()
    assert [row[:5] for row in rows if row[0] == "local"] == [("local", "timeout", "finished", 2, 8)] * 3


def test_a_provider_answers_for_a_real_vllm_that_stands_still_until_it_goes_on(
    tmp_path: Path, vllm_url: str, model_28m: Path
) -> None:
    with ProviderProcess() as provider, Frozen(vllm_url) as vllm:
        route = Route(tmp_path, provider, vllm_url, model_28m, turned=True)
        try:
            assert route.ask()[:2] == ("big", "")
            vllm.freeze()
            model, why, took_s = route.ask(x_penstock_max_wait_ms="4000")
            assert (model, why) == ("local", "timeout")
            assert took_s < 4, "within what the client waits"
            answered = [route.ask(x_penstock_max_wait_ms="4000")[:2] for _ in range(8)]
            assert {model for model, _ in answered} == {"local"}
            assert {why for _, why in answered} <= {"timeout", "breaker", "unavailable"}
            vllm.thaw()
            route.server.until(lambda: route.ask()[0] == "big", "it is found well again")
            rows = route.stop()
        finally:
            route.server.close()
    assert {row[2] for row in rows} == {"finished"}
    assert all(row[4] == 8 for row in rows), "tokens count once"
    for served_model, _, _, attempts, _, cost in rows:
        assert cost == 8 * (5 if served_model == "big" else 2), "the model that answered is paid for, once"
        assert attempts <= 2


@pytest.mark.timeout(1800)  # It starts two of them.
def test_a_provider_answers_for_a_real_vllm_that_is_killed_until_another_one_is_there(
    tmp_path: Path, model_28m: Path, start_vllm: Any
) -> None:
    with ProviderProcess() as provider, contextlib.ExitStack() as stack:
        url, vllm = stack.enter_context(start_vllm())
        route = Route(tmp_path, provider, url, model_28m, turned=True)
        try:
            assert route.ask()[:2] == ("big", "")
            os.killpg(vllm.pid, signal.SIGKILL)
            vllm.wait()
            answered = [route.ask()[:2] for _ in range(8)]
            assert {model for model, _ in answered} == {"local"}
            assert {why for _, why in answered} <= {"unavailable", "failure", "breaker"}
            stack.enter_context(start_vllm())
            route.server.until(lambda: route.ask()[0] == "big", "the next one is not found")
            rows = route.stop()
        finally:
            route.server.close()
    assert {row[2] for row in rows} == {"finished"}
    assert all(row[4] == 8 for row in rows), "tokens count once"
    assert all(row[5] == 8 * (5 if row[0] == "big" else 2) for row in rows), "and are paid for once"


class Frozen:
    """Whatever listens at an address of this machine, to be stopped (SIGSTOP) for a while: its connections
    stay, and nothing is answered.
    """

    def __init__(self, url: str) -> None:
        port = int(url.rpartition(":")[2].partition("/")[0])
        self._pid = _listening(port)

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()


def _listening(port: int) -> int:
    """The process that listens on that port, by /proc."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    names = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(place.readlink()) in names:
                return int(place.parts[2])
        except OSError:
            continue  # It is gone, or another user's.
    raise AssertionError(f"no process listens on port {port}")
