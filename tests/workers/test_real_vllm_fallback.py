"""A scripted provider and a real vLLM, each as the other's fallback, behind `penstock serve` with two gateway
processes: which of them answers two tenants, and what is counted.
"""

import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest
from doors import PROCESSES, TENANTS, Door, Told, doors_of
from provider_process import ProviderProcess
from served import Server

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]
ADMIN = "sk-the-operators-key-0003"


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
            f"server: {{port: 0, trust_local: true, processes: {PROCESSES}}}\n"
            f"auth: {{keys: [{', '.join(TENANTS)}], admin_keys: [{ADMIN}]}}\n"
            "admission: {ttft_target_ms: 20000}\n"
            f"ledger: {{directory: {place / 'ledger'}}}\n"
            "models:\n"
            f"  - {{path: {model}, name: big, {worker % first}}}\n"
            f"  - {{path: {model}, name: local, {worker % second}}}\n"
            "routing: {models: [{model: big, fallback: local}]}\n"
            "prices: {models: [{model: big, output: 5}, {model: local, output: 2}]}\n"
        )
        self.server = Server(place, "-c", str(file))
        self.server.wait_ready()
        self.doors = doors_of(self.server)
        for door in self.doors:
            self.server.until(lambda door=door: self.is_ready(door), "not ready")

    def is_ready(self, door: Door) -> bool:
        """As that process sees it."""
        reported = door.get("/admin/workers", {"authorization": f"Bearer {ADMIN}"})
        workers = json.loads(reported.body)["workers"]
        return len(workers) == 2 and all(worker["state"] == "ready" for worker in workers)

    def ask(self, door: Door, **headers: str) -> Told:
        """Eight tokens, of whichever model."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        reported = door.ask("big", headers=headers, ignore_eos=True)
        assert reported.status == 200, reported
        assert json.loads(reported.body)["usage"]["completion_tokens"] == 8
        return reported

    def asked(self, times: int, **headers: str) -> list[list[Told]]:
        """So often at each process."""
        return [[self.ask(door, **headers) for _ in range(times)] for door in self.doors]

    def returns(self) -> None:
        """Wait until the model itself answers, in both processes: its breaker is each one's own."""
        for door in self.doors:
            self.server.until(lambda door=door: self.ask(door).model == "big", "it is not found well again")

    def stop(self) -> list[tuple[object, ...]]:
        """End it; what the ledger has of each request."""
        self.server.process.send_signal(signal.SIGINT)
        self.server.wait_ended()
        with closing(sqlite3.connect(self.place / "ledger" / "usage.sqlite")) as ledger:
            return ledger.execute(
                "SELECT served_model, route_reason, outcome, attempts, completion_tokens, cost_micros, "
                "tenant FROM usage"
            ).fetchall()

    def close(self) -> None:
        """End whatever is left of it."""
        for door in self.doors:
            door.close()
        self.server.close()


@pytest.fixture
def route(tmp_path: Path, vllm_url: str, model_28m: Path) -> Iterator[Route]:
    with ProviderProcess() as provider:
        made = Route(tmp_path, provider, vllm_url, model_28m)
        yield made
        made.close()


def check_counted(rows: list[tuple[object, ...]]) -> None:
    assert {row[2] for row in rows} == {"finished"}
    assert all(row[4] == 8 for row in rows), "tokens count once"
    for served_model, _, _, attempts, _, cost, _ in rows:
        assert cost == 8 * (5 if served_model == "big" else 2), "the model that answered is paid for, once"
        assert attempts <= 2
    for model in ("big", "local"):
        assert len({row[6] for row in rows if row[0] == model}) == len(TENANTS)


def test_a_real_vllm_answers_for_a_provider_until_that_is_well_again(route: Route) -> None:
    assert {reported.model for answers in route.asked(2) for reported in answers} == {"big"}
    route.provider.fails(500)
    for answers in route.asked(8):
        assert {reported.model for reported in answers} == {"local"}
        assert answers[-1].why == "breaker", "the provider is left alone by now"
    route.provider.behaves()
    route.returns()
    rows = route.stop()
    check_counted(rows)
    assert sum(row[0] == "local" for row in rows) >= 8 * PROCESSES


def test_a_provider_that_is_slow_to_its_first_byte_leaves_time_for_the_vllm(route: Route) -> None:
    route.provider.behaves(delay_s=25)
    for answers in route.asked(3, x_penstock_max_wait_ms="4000"):
        for reported in answers:
            assert (reported.model, reported.why) == ("local", "timeout")
            assert reported.took_s < 4, "within what the client waits"
    route.provider.behaves()
    for answers in route.asked(2):
        assert [(reported.model, reported.why) for reported in answers] == [("big", "")] * 2
    rows = route.stop()
    check_counted(rows)
    fallen = [row[:5] for row in rows if row[0] == "local"]
    assert fallen == [("local", "timeout", "finished", 2, 8)] * 3 * PROCESSES


def test_a_provider_answers_for_a_real_vllm_that_stands_still_until_it_goes_on(
    tmp_path: Path, vllm_url: str, model_28m: Path
) -> None:
    with ProviderProcess() as provider, Frozen(vllm_url) as vllm:
        route = Route(tmp_path, provider, vllm_url, model_28m, turned=True)
        try:
            assert {reported.model for answers in route.asked(2) for reported in answers} == {"big"}
            vllm.freeze()
            first = route.ask(route.doors[0], x_penstock_max_wait_ms="4000")
            assert (first.model, first.why) == ("local", "timeout")
            assert first.took_s < 4, "within what the client waits"
            for answers in route.asked(8, x_penstock_max_wait_ms="4000"):
                assert {reported.model for reported in answers} == {"local"}
                assert {reported.why for reported in answers} <= {"timeout", "breaker", "unavailable"}
            vllm.thaw()
            route.returns()
            check_counted(route.stop())
        finally:
            route.close()


@pytest.mark.timeout(1800)  # It starts two of them.
def test_a_provider_answers_for_a_real_vllm_that_is_killed_until_another_one_is_there(
    tmp_path: Path, model_28m: Path, start_vllm: Any
) -> None:
    with ProviderProcess() as provider, contextlib.ExitStack() as stack:
        url, vllm = stack.enter_context(start_vllm())
        route = Route(tmp_path, provider, url, model_28m, turned=True)
        try:
            assert {reported.model for answers in route.asked(2) for reported in answers} == {"big"}
            os.killpg(vllm.pid, signal.SIGKILL)
            vllm.wait()
            for answers in route.asked(8):
                assert {reported.model for reported in answers} == {"local"}
                assert {reported.why for reported in answers} <= {"unavailable", "failure", "breaker"}
            stack.enter_context(start_vllm())
            route.returns()
            check_counted(route.stop())
        finally:
            route.close()


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
