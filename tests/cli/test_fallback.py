"""Providers that fail, hang or are slow, each in a process of its own, and an idle model of ours that may
answer instead: what two tenants get of `penstock serve` with two gateway processes, over sockets.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from doors import PROCESSES, TENANTS, Door, Told, doors_of
from provider_process import ProviderProcess
from served import Server

pytestmark = pytest.mark.timeout(240)

T = TypeVar("T")

MODELS = (
    "many",
    "failing",
    "busy",
    "refusing",
    "locked-401",
    "locked-403",
    "hanging",
    "mute",
    "slow",
    "breaking",
)
"""A provider's model for each question: what one test did to its own is nothing to the next."""

FIRST_TOKEN_S = 3


class Fleet:
    """Each model is a provider's and falls back to `mini`, which our engine computes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.providers = {model: ProviderProcess() for model in MODELS}
        file = place / "penstock.yaml"
        file.write_text("\n".join([
            f"server: {{port: 0, trust_local: true, processes: {PROCESSES}, lameduck_s: 0}}",
            f"auth: {{keys: [{', '.join(TENANTS)}]}}",
            "admission: {ttft_target_ms: 20000}",
            f"health: {{first_token_s: {FIRST_TOKEN_S}}}",
            f"ledger: {{directory: {place / 'ledger'}}}",
            "models:",
            *(_model(name, provider) for name, provider in self.providers.items()),
            "  - {path: penstock-demo-mini, name: mini, engine: {threads: 1, kv_memory_bytes: 33554432}}",
            "routing:",
            "  models:",
            *(f"    - {{model: {name}, fallback: mini}}" for name in MODELS),
        ]))  # fmt: skip
        self.server = Server(place, "-c", str(file))
        self.server.wait_ready()
        self.doors = doors_of(self.server)
        for door in self.doors:
            self.server.until(lambda door=door: door.get("/ready").status == 200, "not ready")

    def close(self) -> None:
        """End whatever is left of it."""
        for door in self.doors:
            door.close()
        self.server.close()
        for provider in self.providers.values():
            provider.kill()


def _model(name: str, provider: ProviderProcess) -> str:
    worker = f"{{url: '{provider.url}', engine: openai, served_model: served, max_model_len: 512}}"
    return f"  - {{path: penstock-demo-mini, name: {name}, replicas: 0, workers: [{worker}]}}"


@dataclass(slots=True)
class Route:
    """One of the models, and its provider."""

    fleet: Fleet
    model: str

    @property
    def provider(self) -> ProviderProcess:
        return self.fleet.providers[self.model]

    def both(self, ask: Callable[[Door], T]) -> list[T]:
        """The same at both processes at once."""
        with ThreadPoolExecutor(PROCESSES) as pool:
            return list(pool.map(ask, self.fleet.doors))

    def asked(self, times: int, **options: Any) -> list[list[Told]]:
        """So often, one after the other, at each process."""
        return self.both(lambda door: [door.ask(self.model, **options) for _ in range(times)])

    def health(self, door: Door) -> dict[str, Any]:
        """What that process says of the model."""
        found = json.loads(door.get("/health").body)["models"]
        return next(model for model in found if model["name"] == self.model)

    def returns(self) -> None:
        """Wait until both processes ask the provider again: its breaker is each one's own."""
        for door in self.fleet.doors:
            self.fleet.server.until(
                lambda door=door: door.ask(self.model).model == self.model, "it is not probed"
            )

    def until_well(self) -> None:
        for door in self.fleet.doors:
            self.fleet.server.until(
                lambda door=door: door.ask(self.model) and self.health(door)["status"] == "ok", "not well"
            )

    def rows(self, columns: str, where: str = "1") -> list[tuple[Any, ...]]:
        """What the ledger has of the model's requests."""
        with closing(sqlite3.connect(self.fleet.place / "ledger" / "usage.sqlite")) as ledger:
            return ledger.execute(
                f"SELECT {columns} FROM usage WHERE requested_model = ? AND {where}", (self.model,)
            ).fetchall()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("routes"))
    yield made
    made.close()


def test_many_fall_back_at_once_although_the_retry_budget_is_for_few(fleet: Fleet) -> None:
    """The first of these tests: what ends well pays into a process's budget."""
    route = Route(fleet, "many")
    route.provider.behaves(status=[500, {}, ""], delay_s=0.3)
    doors = [Door(door.port, door.process) for door in fleet.doors for _ in range(12)]
    for number, door in enumerate(doors):
        door.num_asked = number  # Both tenants at both processes.
        door.get("/health")
    with ThreadPoolExecutor(len(doors)) as pool:
        found = list(pool.map(lambda door: door.ask("many"), doors))
    for door in doors:
        door.close()
    assert [(reported.status, reported.model) for reported in found] == [(200, "mini")] * len(doors)
    route.provider.behaves()
    route.returns()
    fleet.server.until(lambda: len(route.rows("1")) > len(doors), "no records")
    assert {*route.rows("outcome, completion_tokens")} == {("finished", 8)}, "tokens count once"


def test_a_provider_that_fails_everything_is_no_dead_end(fleet: Fleet) -> None:
    """The example of docs/failures.md, "Another model answers"."""
    route = Route(fleet, "failing")
    before = route.provider.fails(500)
    for answers in route.asked(13):
        assert [reported.status for reported in answers] == [200] * 13
        for reported in answers:
            assert (reported.model, reported.headers["x-penstock-requested-model"]) == ("mini", "failing")
            assert json.loads(reported.body)["model"] == "mini"
        whys = [reported.why for reported in answers]
        assert whys[:5] == ["failure"] * 5, "five are tried there"
        # Those that are a probe, after five seconds on a busy machine, fail as well.
        assert whys[5] == "breaker", "then it is left alone"
    assert before + 5 * PROCESSES <= route.provider.fails(500) < before + 13 * PROCESSES
    at = route.provider.url.partition("://")[2]
    for found in route.both(route.health):
        assert found["status"] == "degraded"
        said = re.sub(r"breaker is half-open", "breaker is open", found["reasons"][0])
        assert said.startswith(f"failing@{at} is left alone: its breaker is open: its attempts fail")
    state = 'penstock_breaker_state{model="failing"'  # Gauges are set once a second.
    fleet.server.until(lambda: state in fleet.doors[0].get("/metrics").body.decode(), "no breaker's state")
    route.provider.behaves()
    route.returns()
    route.until_well()
    assert {reported[0].status for reported in route.asked(1, headers={"x-penstock-degrade": "never"})} == {
        200
    }
    fleet.server.until(lambda: len(route.rows("1", "served_model = 'mini'")) >= 13 * PROCESSES, "no records")
    fallen = route.rows("route_reason, outcome, attempts, completion_tokens", "served_model = 'mini'")
    assert {row[0] for row in fallen} == {"failure", "breaker"}
    assert {row[1:] for row in fallen} <= {("finished", 2, 8), ("finished", 1, 8)}, "tokens count once"
    assert len({*route.rows("tenant", "served_model = 'mini'")}) == len(TENANTS)


def test_a_providers_429_is_load_its_time_is_kept_and_the_next_answers(fleet: Fleet) -> None:
    route = Route(fleet, "busy")
    assert {reported[0].model for reported in route.asked(1)} == {"busy"}
    before = route.provider.fails(429, **{"retry-after": "5"})
    for answers in route.asked(2):
        assert [(reported.status, reported.why) for reported in answers] == [(200, "busy")] * 2
    assert route.provider.behaves() == before + PROCESSES, "each asks it once, and then leaves it alone"
    assert all("no room" in str(found) for found in route.both(route.health))
    hasty = {"x-penstock-degrade": "never", "x-penstock-max-wait-ms": "500"}
    for (reported,) in route.asked(1, headers=hasty):
        assert reported.status == 429
        assert int(reported.headers["retry-after"]) in range(1, 6)
        assert reported.took_s < 2.5, "it is not waited for"
    for (reported,) in route.asked(1, headers={"x-penstock-degrade": "never"}):
        assert (reported.status, reported.model) == (200, "busy"), "who has time waits for it"
        assert reported.took_s < 20
    assert {found["status"] for found in route.both(route.health)} == {"ok"}, "load is no failure"


def test_a_bad_request_is_not_tried_elsewhere_and_blames_nobody(fleet: Fleet) -> None:
    route = Route(fleet, "refusing")
    before = route.provider.fails(400)
    assert {reported.status for answers in route.asked(12) for reported in answers} == {400}
    assert route.provider.behaves() == before + 12 * PROCESSES
    assert {found["status"] for found in route.both(route.health)} == {"ok"}
    assert {reported[0].model for reported in route.asked(1)} == {"refusing"}


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_not_accepted_opens_the_breaker_at_once(fleet: Fleet, status: int) -> None:
    route = Route(fleet, f"locked-{status}")
    before = route.provider.fails(status)
    for answers in route.asked(4):
        assert [reported.status for reported in answers] == [200] * 4
        assert [reported.why for reported in answers] == ["failure", *["breaker"] * 3]
    assert route.provider.fails(status) == before + PROCESSES
    assert all("does not accept the key" in str(found) for found in route.both(route.health))


def test_a_provider_that_hangs_is_waited_for_half_of_what_the_client_has(fleet: Fleet) -> None:
    route = Route(fleet, "hanging")
    route.provider.behaves(delay_s=25)
    hasty = {"x-penstock-max-wait-ms": "1000"}
    for answers in route.asked(3, headers=hasty):
        for reported in answers:
            assert (reported.status, reported.why) == (200, "timeout")
            assert 0.4 < reported.took_s < 20
    for (reported,) in route.asked(1, headers=hasty | {"x-penstock-degrade": "never"}):
        assert reported.status == 503
        assert b"as long as the client waits" in reported.body
        assert reported.took_s < 20
    counted = f'penstock_attempt_timeouts_total{{model="hanging"}} {3 * PROCESSES}'
    fleet.server.until(lambda: counted in fleet.doors[0].get("/metrics").body.decode(), counted)
    found = route.both(route.health)
    assert {each["status"] for each in found} == {"ok"}, "nothing is known of it: clients' haste is no fault"


def test_a_provider_that_hangs_from_its_first_request_on_is_no_dead_end(fleet: Fleet) -> None:
    route = Route(fleet, "mute")
    route.provider.behaves(delay_s=60)
    doors = [Door(door.port, door.process) for door in fleet.doors for _ in range(5)]
    for number, door in enumerate(doors):
        door.num_asked = number
        door.get("/health")
    with ThreadPoolExecutor(len(doors)) as pool:
        found = list(pool.map(lambda door: door.ask("mute"), doors))
    for door in doors:
        door.close()
    assert {(reported.status, reported.model, reported.why) for reported in found} == {
        (200, "mini", "timeout")
    }
    assert min(reported.took_s for reported in found) >= FIRST_TOKEN_S
    for (reported,) in route.asked(1):
        assert (reported.status, reported.why) == (200, "breaker"), "five in a row: it is left alone"


def test_a_provider_that_turns_slow_is_held_against_its_own_history(fleet: Fleet) -> None:
    route = Route(fleet, "slow")
    assert {reported.model for answers in route.asked(24) for reported in answers} == {"slow"}
    route.provider.behaves(delay_s=25)
    for answers in route.asked(6):
        assert [reported.status for reported in answers] == [200] * 6
        assert [reported.why for reported in answers] == [*["timeout"] * 5, "breaker"]
        assert max(reported.took_s for reported in answers) < 5
        assert answers[-1].took_s < 2
    route.provider.behaves()
    route.returns()


def test_behind_the_first_byte_there_is_a_typed_last_event_and_no_fallback(fleet: Fleet) -> None:
    route = Route(fleet, "breaking")
    assert {reported.status for answers in route.asked(12, max_tokens=16) for reported in answers} == {200}
    before = route.provider.behaves(after=4, hang=True)
    for (reported,) in route.asked(1, stream=True, max_tokens=16):
        assert (reported.status, reported.model) == (200, "breaking")
        last = [line for line in reported.body.split(b"\n\n") if line.startswith(b"data: {")][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
        assert 9 < reported.took_s < 50, (
            "its streams were never silent for long: sixty seconds are not waited"
        )
    assert route.provider.behaves() == before + PROCESSES
    fleet.server.until(lambda: len(route.rows("1", "outcome != 'finished'")) == PROCESSES, "no records")
    for *row, tokens in route.rows(
        "served_model, route_reason, outcome, attempts, completion_tokens", "outcome != 'finished'"
    ):
        assert row == ["breaking", "", "failed", 1]
        assert 0 < tokens < 16
