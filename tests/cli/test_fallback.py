"""A provider that fails, hangs or is slow, in another process, and an idle model of ours that may answer
instead: what clients of `penstock serve` get, over sockets.
"""

import json
import signal
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from provider_process import ProviderProcess
from served import Server

pytestmark = pytest.mark.timeout(240)


class Route:
    """`big` is the provider's and falls back to `mini`, which our engine computes."""

    def __init__(
        self,
        place: Path,
        provider: ProviderProcess,
        *lines: str,
        processes: int = 1,
        keys: Sequence[str] = (),
    ) -> None:
        """`keys`: of so many tenants; none: nobody is asked for one."""
        self.place, self.provider = place, provider
        place.mkdir(parents=True, exist_ok=True)
        worker = (
            f"{{url: '{provider.url}', engine: {provider.engine}, served_model: served, max_model_len: 512}}"
        )
        config = [
            f"server: {{port: 0, trust_local: true, processes: {processes}}}",
            f"auth: {{keys: [{', '.join(keys)}]}}",
            "admission: {ttft_target_ms: 20000}",
            f"ledger: {{directory: {place / 'ledger'}}}",
            "models:",
            f"  - {{path: penstock-demo-mini, name: big, replicas: 0, workers: [{worker}]}}",
            "  - {path: penstock-demo-mini, name: mini, engine: {threads: 1, kv_memory_bytes: 33554432}}",
            "routing: {models: [{model: big, fallback: mini}]}",
            *lines,
        ]
        file = place / "penstock.yaml"
        file.write_text("\n".join(config))
        self.server = Server(place, "-c", str(file), *([] if keys else ["--no-auth"]))
        self.server.wait_ready()
        self.server.until(lambda: self.get("/ready")[0] == 200, "not ready")

    def ask(
        self, *, model: str = "big", timeout_s: float = 60, **options: Any
    ) -> tuple[int, dict[str, str], bytes, float]:
        """One chat: status, headers, body, and how long it took."""
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        body = {"model": model, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8, **options}
        request = urllib.request.Request(
            f"{self.server.url}/chat/completions", json.dumps(body).encode(), headers
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as found:
                text = found.read()
                return found.status, dict(found.headers.items()), text, time.monotonic() - began
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers.items()), error.read(), time.monotonic() - began

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.server.url.removesuffix("/v1") + path, timeout=60) as found:
                return found.status, found.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def health(self) -> dict[str, Any]:
        return json.loads(self.get("/health")[1])

    def stop(self) -> list[tuple[Any, ...]]:
        """End it; what the ledger has of each request."""
        self.server.process.send_signal(signal.SIGINT)
        self.server.wait_ended()
        with sqlite3.connect(self.place / "ledger" / "usage.sqlite") as ledger:
            return ledger.execute(
                "SELECT requested_model, served_model, route_reason, outcome, attempts, completion_tokens "
                "FROM usage"
            ).fetchall()


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Route]:
    with ProviderProcess() as provider:
        made = Route(tmp_path, provider)
        yield made
        made.server.close()


def test_a_provider_that_fails_everything_is_no_dead_end(route: Route) -> None:
    route.provider.fails(500)
    answers = [route.ask() for _ in range(13)]
    assert [status for status, *_ in answers] == [200] * 13
    for _, headers, body, _ in answers:
        assert headers["x-penstock-model"] == "mini"
        assert headers["x-penstock-requested-model"] == "big"
        assert headers["x-penstock-downgrade"] in ("failure", "breaker")
        assert json.loads(body)["model"] == "mini"
    assert answers[-1][1]["x-penstock-downgrade"] == "breaker", "the provider is left alone by now"
    had = route.provider.fails(500)
    assert had < 13
    found = route.health()
    assert found["status"] == "degraded"
    (big,) = (model for model in found["models"] if model["name"] == "big")
    assert "breaker" in big["reasons"][0]
    state = 'penstock_breaker_state{model="big"'  # Gauges are set once a second.
    route.server.until(lambda: state in route.get("/metrics")[1].decode(), "no state of the breaker")
    route.provider.behaves()
    route.server.until(lambda: route.ask()[1].get("x-penstock-model") == "big", "it is probed and comes back")
    route.server.until(lambda: route.ask() and route.health()["status"] == "ok", "all is well again")
    status, _, _, _ = route.ask(headers={"x-penstock-degrade": "never"})
    assert status == 200
    rows = route.stop()
    fallen = [row for row in rows if row[1] == "mini"]
    assert {row[2] for row in fallen} == {"failure", "breaker"}
    assert {row[3:] for row in fallen} <= {("finished", 2, 8), ("finished", 1, 8)}, "tokens count once"
    assert len(rows) == len({*rows}) or len(rows) >= 13


def test_a_providers_429_is_load_its_time_is_kept_and_the_next_answers(route: Route) -> None:
    assert route.ask()[1]["x-penstock-model"] == "big"
    before = route.provider.fails(429, **{"retry-after": "3"})
    first, second = route.ask(), route.ask()
    assert (first[0], first[1]["x-penstock-downgrade"]) == (200, "busy")
    assert (second[0], second[1]["x-penstock-downgrade"]) == (200, "busy")
    assert route.provider.behaves() == before + 1, "it is asked once, and then left alone"
    assert "no room" in str(route.health())
    status, headers, _, took_s = route.ask(
        headers={"x-penstock-degrade": "never", "x-penstock-max-wait-ms": "500"}
    )
    assert status == 429
    assert int(headers["retry-after"]) in (1, 2, 3)
    assert took_s < 2.5, "it is not waited for"
    status, headers, _, took_s = route.ask(headers={"x-penstock-degrade": "never"})
    assert (status, headers["x-penstock-model"]) == (200, "big"), "who has time waits for it"
    assert took_s < 20
    assert route.health()["status"] == "ok", "load is no failure"


def test_a_bad_request_is_not_tried_elsewhere_and_blames_nobody(route: Route) -> None:
    before = route.provider.fails(400)
    answers = [route.ask() for _ in range(12)]
    assert {status for status, *_ in answers} == {400}
    assert route.provider.behaves() == before + 12
    assert route.health()["status"] == "ok"
    assert route.ask()[1]["x-penstock-model"] == "big"


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_not_accepted_opens_the_breaker_at_once(route: Route, status: int) -> None:
    before = route.provider.fails(status)
    answers = [route.ask() for _ in range(4)]
    assert [each[0] for each in answers] == [200] * 4
    assert [each[1]["x-penstock-downgrade"] for each in answers] == ["failure", *["breaker"] * 3]
    assert route.provider.fails(status) == before + 1
    assert "does not accept the key" in str(route.health())


def test_many_of_two_tenants_fall_back_in_two_processes_although_the_retry_budget_is_for_few(
    tmp_path: Path,
) -> None:
    keys = ("sk-one-tenant-0000000001", "sk-another-tenant-000002")
    with ProviderProcess() as provider:
        route = Route(tmp_path, provider, processes=2, keys=keys)
        try:
            provider.behaves(status=[500, {}, ""], delay_s=0.3)
            found: list[tuple[int, str]] = []

            def ask(number: int) -> None:
                status, headers, *_ = route.ask(headers={"authorization": f"Bearer {keys[number % 2]}"})
                found.append((status, headers.get("x-penstock-model", "")))

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == [(200, "mini")] * 24
            provider.behaves()
            for key in keys:  # Each process has breakers of its own, which probe the provider.
                name = {"authorization": f"Bearer {key}"}
                route.server.until(
                    lambda name=name: route.ask(headers=name)[1].get("x-penstock-model") == "big", "not back"
                )
            rows = route.stop()
            assert {row[3] for row in rows} == {"finished"}
            assert {row[5] for row in rows} == {8}, "tokens count once"
        finally:
            route.server.close()


def test_a_provider_that_hangs_is_waited_for_half_of_what_the_client_has(route: Route) -> None:
    route.provider.behaves(delay_s=25)
    for _ in range(3):
        status, headers, _, took_s = route.ask(headers={"x-penstock-max-wait-ms": "1000"})
        assert (status, headers["x-penstock-downgrade"]) == (200, "timeout")
        assert 0.4 < took_s < 20
    status, _, body, took_s = route.ask(
        headers={"x-penstock-max-wait-ms": "1000", "x-penstock-degrade": "never"}
    )
    assert status == 503
    assert b"as long as the client waits" in body
    assert took_s < 20
    assert 'penstock_attempt_timeouts_total{model="big"} 3' in route.get("/metrics")[1].decode()
    assert route.health()["status"] == "ok", "nothing is known of it, so it is not blamed for clients' haste"


def test_a_provider_that_turns_slow_is_held_against_its_own_history(route: Route) -> None:
    assert {route.ask()[1]["x-penstock-model"] for _ in range(24)} == {"big"}
    route.provider.behaves(delay_s=25)
    answers = [route.ask() for _ in range(6)]
    assert [each[0] for each in answers] == [200] * 6
    assert [each[1]["x-penstock-downgrade"] for each in answers] == [*["timeout"] * 5, "breaker"]
    assert max(each[3] for each in answers) < 5
    assert answers[-1][3] < 2
    route.provider.behaves()
    route.server.until(lambda: route.ask()[1].get("x-penstock-model") == "big", "it is probed and comes back")


def test_behind_the_first_byte_there_is_a_typed_last_event_and_no_fallback(route: Route) -> None:
    for _ in range(12):
        assert route.ask(max_tokens=16)[0] == 200
    before = route.provider.behaves(after=4, hang=True)
    status, headers, body, took_s = route.ask(stream=True, max_tokens=16)
    assert (status, headers["x-penstock-model"]) == (200, "big")
    *_, last, _, _ = body.split(b"\n\n") if body.endswith(b"[DONE]\n\n") else [*body.split(b"\n\n"), b""]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
    assert 9 < took_s < 50, "its streams were never silent for long, so sixty seconds are not waited"
    assert route.provider.behaves() == before + 1
    (broken,) = (row for row in route.stop() if row[3] != "finished")
    assert broken[:5] == ("big", "big", "", "failed", 1)
    assert 0 < broken[5] < 16
