"""Shadow traffic: a new version gets copies of requests, which nobody notices, and is judged by them."""

import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec
import pytest
from fake_backend import FakeBackend, endless_words

from penstock.backends.base import GenerateRequest
from penstock.errors import EngineFault, WorkerUnavailable

CHAT = "/v1/chat/completions"
OLD, NEW = "tiny@1", "tiny@2"
PLAN = {
    "model": "tiny", "candidate": NEW, "shadow": 100, "steps": [50], "requests_min": 10_000,
    "warm_up_requests": 0,
}  # fmt: skip


class Held(FakeBackend):
    """On demand nothing goes on there; or every stream breaks, with this error."""

    is_held, breaks = False, None

    def _step(self) -> None:
        self._timer = None
        for stream in list(self._streams.values()):
            if self.breaks:
                stream.break_off(self.breaks)
            elif not self.is_held:
                stream.step()
        if self._streams and self._timer is None:
            self._schedule()


@pytest.fixture
def versions(kit) -> Iterator[Callable[..., object]]:
    """Makes a gateway before one worker of each version; the new one's has so many rows."""

    class Versions(kit.RunningGateway):
        async def make_backends(self):
            self.asked: dict[str, list[GenerateRequest]] = {OLD: [], NEW: []}
            return {OLD: self.worker(OLD, 64), NEW: self.worker(NEW, self.rows)}

        def worker(self, version: str, rows: int) -> Held:
            def script(request: GenerateRequest) -> Iterator[str]:
                self.asked[version].append(request)
                return islice(endless_words(request), 40)

            return Held(self.clock, script=script, max_running=rows, step_s=0.001)

        def ask(self, path: str, body: object = None) -> bytes:
            data = None if body is None else msgspec.json.encode(body)
            headers = {"authorization": f"Bearer {kit.KEY}", "content-type": "application/json"}
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read()

        def begin(self, **changes: object) -> None:
            assert b'"running"' in self.ask("/admin/rollouts", PLAN | changes)

        def rollout(self) -> dict:
            return msgspec.json.decode(self.ask("/admin/rollouts"))["rollouts"][0]

        def chat(self, number: int, **changes: object) -> dict:
            return msgspec.json.decode(
                self.ask(CHAT, kit.chat(user=f"user-{number}", max_tokens=12, **changes))
            )

        def num(self, outcome: str) -> int:
            page = self.ask("/metrics").decode()
            pattern = rf'penstock_shadow_requests_total{{model="tiny@2",outcome="{outcome}"}} (\d+)'
            found = re.search(pattern, page)
            return int(found[1]) if found else 0

        def until(self, check: Callable[[], bool]) -> None:
            """Not on the loop: the check asks over HTTP."""
            for _ in range(3000):
                if check():
                    return
                self.call(lambda: None)
                threading.Event().wait(0.01)
            raise AssertionError(self.ask("/metrics").decode())

    made = []

    def make(rows: int = 16) -> Versions:
        config = kit.replace(
            kit.make_config(), auth={"admin_keys": (kit.KEY,)}, limits={"concurrent_max": 200},
            admission=kit.NO_PROMISES, health={"probe_s": 0.0},
        )  # fmt: skip
        Versions.rows = rows
        made.append(Versions(config, names=(OLD, NEW)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_each_request_is_answered_by_the_old_version_and_copied_to_the_new_one(versions) -> None:
    running = versions()
    running.begin()
    answers = [running.chat(number) for number in range(20)]
    assert {each["model"] for each in answers} == {OLD}
    running.until(lambda: running.num("compared") == 20)
    copies, asked = running.asked[NEW], running.asked[OLD]
    assert [each.prompt_token_ids for each in copies] == [each.prompt_token_ids for each in asked]
    assert {each.fairness_key for each in copies} == {"platform"}
    assert {each.cache_salt for each in copies} == {each.cache_salt for each in asked}
    assert min(each.priority for each in copies) > max(each.priority for each in asked)
    running.until(lambda: running.rollout()["metrics"][0]["canary_requests"] == 20)
    found = running.rollout()
    assert (found["step"], found["shadow"], found["percent"]) == (-1, 100, 0)
    assert all(each["canary_requests"] == each["control_requests"] == 20 for each in found["metrics"])
    running.until(lambda: "had rows to spare for; there were 20" in running.rollout()["why"])


def test_a_copy_is_no_request_for_limits_ledger_and_metrics(versions) -> None:
    running = versions()
    running.begin()
    for number in range(8):
        running.chat(number)
    running.until(lambda: running.num("compared") == 8)
    page = running.ask("/metrics").decode()
    assert f'penstock_requests_total{{endpoint="chat",model="{OLD}",outcome="length"}} 8' in page
    counted = rf'penstock_requests_total{{endpoint="chat",model="{NEW}",outcome="[a-z_]+"}} (\S+)'
    assert {float(each) for each in re.findall(counted, page)} == {0.0}
    listed = msgspec.json.decode(running.ask("/admin/requests"))["requests"]
    assert [each["model"] for each in listed if each["endpoint"] == "chat"] == [OLD] * 8
    assert running.call(lambda: running.gateway._services.trials.num_copies) == 0


@pytest.mark.parametrize(
    "error", [EngineFault("it computes no numbers"), WorkerUnavailable("its engine answers 500")]
)
def test_a_broken_version_is_found_out_and_nobody_has_got_an_error(versions, error) -> None:
    running = versions()
    running.backends[NEW].breaks = error
    running.begin()
    answers = [running.chat(number) for number in range(40)]
    assert {each["choices"][0]["finish_reason"] for each in answers} == {"length"}
    running.until(lambda: running.rollout()["state"] == "rolled_back")
    assert "of its last 10 requests failed" in running.rollout()["why"]
    before = len(running.asked[NEW])
    running.chat(99)
    assert len(running.asked[NEW]) == before, "it gets nothing more"


def test_a_version_without_rows_to_spare_gets_no_copies(versions) -> None:
    running = versions(rows=1)
    running.begin()
    for number in range(4):
        running.chat(number)
    assert running.num("no_room") == 4
    assert not running.asked[NEW]


def test_copies_end_when_requests_need_their_rows(versions, kit) -> None:
    running = versions(rows=4)
    running.begin()
    running.backends[NEW].is_held = True
    for number in range(5):
        running.chat(number)
    running.until(lambda: running.num("no_room") == 2)
    assert running.backends[NEW].num_streams == 3, "a quarter of its rows stays free"
    clients = [kit.Raw(running) for _ in range(3)]
    for client in clients:
        client.send(kit.post(CHAT, kit.chat(model=NEW, max_tokens=5), "Connection: close"))
    running.until(lambda: running.num("made_room") == 2)
    running.call(lambda: setattr(running.backends[NEW], "is_held", False))
    for client in clients:
        assert b"HTTP/1.1 200" in client.read_all()
        client.close()
    running.until(lambda: running.num("compared") == 1)


def test_a_copy_ends_with_the_client_that_does_not_wait(versions, kit) -> None:
    running = versions()
    running.begin()
    running.backends[OLD].is_held = running.backends[NEW].is_held = True
    client = kit.Raw(running)
    client.send(kit.post(CHAT, kit.chat(max_tokens=30, stream=True)))
    running.until(lambda: running.backends[NEW].num_streams == 1)
    client.close()
    running.until(lambda: running.num("dropped") == 1)
    running.until(lambda: running.backends[NEW].num_streams == 0)
    assert running.rollout()["metrics"][0]["canary_requests"] == 0


def test_the_end_of_the_rollout_ends_its_copies(versions) -> None:
    running = versions()
    running.begin()
    running.backends[NEW].is_held = True
    running.chat(1)
    running.until(lambda: running.backends[NEW].num_streams == 1)
    running.ask("/admin/rollouts/tiny/abort", {})
    running.until(lambda: running.num("dropped") == 1)
    running.until(lambda: running.backends[NEW].num_streams == 0)


def test_a_request_for_several_answers_is_not_copied(versions) -> None:
    running = versions()
    running.begin()
    running.chat(1, n=2)
    running.chat(2)
    running.until(lambda: running.num("compared") == 1)
    assert len(running.asked[NEW]) == 1


def test_behind_the_shadow_the_first_step_begins(versions) -> None:
    running = versions()
    running.begin(requests_min=4, step_s=0.2)
    number = iter(range(10_000))

    def has_begun() -> bool:
        running.chat(next(number))
        return running.rollout()["step"] == 0

    running.until(has_begun)
    found = running.rollout()
    assert (found["percent"], found["shadow"]) == (50, 0)
    assert {running.chat(number)["model"] for number in range(40)} == {OLD, NEW}
