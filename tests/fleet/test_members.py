"""Joining and leaving while the server runs: the registry follows what is wanted."""

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from conformance import Recorder, Requests
from fake_backend import FakeBackend

from penstock.clock import SystemClock
from penstock.config.checkpoints import with_members
from penstock.config.engine_settings import EngineSettings
from penstock.config.fleet import WorkerConfig
from penstock.config.tree import LogConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.fleet.members import Members, share_of
from penstock.fleet.registry import Registry, Worker
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import FinishReason, WorkerId

CLOCK = SystemClock()


@dataclass(frozen=True)
class Fake:
    """A worker around a backend of its own."""

    id: WorkerId
    setting: int = 0
    broken: bool = False
    made: list[FakeBackend] = field(default_factory=list, compare=False)

    async def open(self, registry: Registry) -> Worker:
        if self.broken:
            raise ConfigError("api_key_env: the environment variable KEY is not set")
        self.made.append(FakeBackend(CLOCK, step_s=0.001))
        return registry.new(self.id, "m", self.made[-1])


def fake(name: str, setting: int = 0, *, broken: bool = False) -> Fake:
    return Fake(WorkerId(name), setting, broken)


def run(check: Callable[[Members, Registry, io.StringIO], Awaitable[None]]) -> None:
    async def with_members() -> None:
        said = io.StringIO()
        log = Log(LogConfig(), CLOCK, stream=said)
        registry = Registry(CLOCK, log, workers_max=8)
        async with asyncio.timeout(20):
            await check(Members(registry, log, drain_timeout_s=10), registry, said)

    asyncio.run(with_members())


def ids(registry: Registry) -> list[str]:
    return [worker.id for worker in registry]


async def until(wanted: Callable[[], bool]) -> None:
    while not wanted():
        await asyncio.sleep(0.001)


def test_what_is_wanted_joins_and_what_is_not_wanted_any_more_drains() -> None:
    async def check(members: Members, registry: Registry, _: io.StringIO) -> None:
        a, b = fake("a"), fake("b")
        await members.apply("config", [a, b])
        await members.apply("dns", [fake("c")])
        assert ids(registry) == ["a", "b", "c"]
        recorder = Recorder()
        a.made[0].generate(Requests().make(max_tokens=30), recorder)
        await members.apply("config", [b])
        assert [worker.state.value for worker in registry] == ["draining", "ready", "ready"]
        await until(lambda: len(registry) == 2)
        assert (recorder.finish and recorder.finish.reason) is FinishReason.LENGTH, (
            "its stream ended by itself"
        )
        await members.apply("config", [b])
        assert len(b.made) == 1, "who stays is left alone"

    run(check)


def test_other_settings_are_another_worker_once_the_old_one_is_gone() -> None:
    async def check(members: Members, registry: Registry, _: io.StringIO) -> None:
        old, new = fake("a", 1), fake("a", 2)
        await members.apply("config", [old])
        recorder = Recorder()
        old.made[0].generate(Requests().make(max_tokens=30), recorder)
        await members.apply("config", [new])
        assert not new.made
        await until(lambda: bool(new.made))
        assert recorder.finish is not None
        assert [worker.state for worker in registry] == [WorkerState.READY]

    run(check)


def test_who_is_wanted_again_while_it_drains_comes_back() -> None:
    async def check(members: Members, registry: Registry, _: io.StringIO) -> None:
        a = fake("a")
        await members.apply("config", [a])
        a.made[0].generate(Requests().make(max_tokens=30), Recorder())
        await members.apply("config", [])
        await members.apply("config", [a])
        await until(lambda: len(a.made) == 2)
        await until(lambda: [worker.state for worker in registry] == [WorkerState.READY])

    run(check)


def test_who_is_down_for_good_is_tried_again_when_it_is_asked_for_again() -> None:
    async def check(members: Members, registry: Registry, _: io.StringIO) -> None:
        a = fake("a")
        await members.apply("config", [a])
        await a.made[0].drain(0)
        assert registry.get(a.id) is not None, "it is shown, with the reason"
        await members.apply("config", [a])
        await until(lambda: len(a.made) == 2)

    run(check)


def test_what_cannot_be_made_is_reported_and_keeps_nobody_else_out() -> None:
    async def check(members: Members, registry: Registry, said: io.StringIO) -> None:
        await members.apply("config", [fake("a", broken=True), fake("b")])
        assert ids(registry) == ["b"]
        assert "a worker cannot be used" in said.getvalue()
        assert "api_key_env" in said.getvalue()
        await members.close(0.0)
        assert ids(registry) == []

    run(check)


def test_a_reload_takes_who_the_workers_are_and_nothing_else() -> None:
    vllm = WorkerConfig(url="http://127.0.0.1:1", engine="vllm")
    running = (ModelConfig(path="p", name="a"), ModelConfig(path="q", name="b"))
    new = (
        ModelConfig(path="other", name="b", replicas=3, workers=(vllm,)),
        ModelConfig(path="r", name="c", replicas=9),
    )
    first, second = with_members(running, new)
    assert first == running[0]
    assert (second.path, second.replicas, second.workers) == ("q", 3, (vllm,))


def test_replicas_share_the_cores_unless_told_otherwise() -> None:
    assert share_of(EngineSettings(), 1, 8).threads == 0
    assert share_of(EngineSettings(), 3, 8).threads == 2
    assert share_of(EngineSettings(), 16, 8).threads == 1
    assert share_of(EngineSettings(threads=5), 3, 8).threads == 5
