"""Worker processes that are begun early: taken by the first worker of their kind, and never left behind."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from byte_tokenizer import byte_tokenizer
from scripted_worker import DOUBLES, RUNNER

from penstock.backends.engine.backend import EngineBackend
from penstock.cli.commands.serve import early_threads
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.config.fleet import FleetConfig
from penstock.config.tree import Config, EngineConfig, ModelConfig
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import Spares
from penstock.fleet.launchers.supervised import LocalLauncher, SupervisedWorker
from penstock.types import ModelName, WorkerId


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((DOUBLES, os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("SCRIPTED_STEP_S", "0.001")


class Place:
    def __init__(self, module: str) -> None:
        self.spares = Spares(module)
        self.launcher = LocalLauncher(SystemClock(), b"secret" * 4, spare=self.spares.take)

    async def start(self, name: str, threads: int = 1) -> SupervisedWorker:
        spec = WorkerSpec(
            worker_id=WorkerId(name),
            model_path="scripted",
            model_name=ModelName("scripted"),
            engine=EngineSettings(threads=threads),
            runner=RUNNER,
        )
        worker = await self.launcher.start(spec, EngineBackend(byte_tokenizer(), SystemClock()))
        await worker.wait_ready(lambda _: None)
        return worker

    @property
    def waiting(self) -> list[int]:
        return [process.pid for _, process in self.spares._waiting]


@asynccontextmanager
async def place(module: str = "json") -> AsyncIterator[Place]:
    made = Place(module)
    try:
        yield made
    finally:
        await made.launcher.close(timeout_s=0.1)
        await made.spares.close()


def test_a_worker_takes_a_spare_of_its_kind_and_the_next_starts_anew() -> None:
    async def run() -> None:
        async with place() as here:
            await here.spares.begin([2, 1])
            other, spare = here.waiting
            assert (await here.start("first")).pid == spare
            assert (await here.start("second")).pid not in (spare, other)
            assert here.waiting == [other], "begun with another number of threads"

    asyncio.run(run())


def test_a_crashed_worker_that_was_a_spare_starts_again() -> None:
    async def run() -> None:
        async with place() as here:
            await here.spares.begin([1])
            worker = await here.start("first")
            before = worker.pid
            assert before is not None
            os.kill(before, 9)
            async with asyncio.timeout(20):
                while worker.pid in (before, None):
                    await asyncio.sleep(0.01)
            await worker.wait_ready(lambda _: None)

    asyncio.run(run())


@pytest.mark.parametrize("module", ["no_such_module", "json"])
def test_what_a_spare_cannot_import_is_no_reason_to_fail(module: str) -> None:
    async def run() -> None:
        async with place(module) as here:
            await here.spares.begin([1])
            (spare,) = here.waiting
            assert (await here.start("first")).pid == spare

    asyncio.run(run())


def test_spares_that_nobody_took_are_ended_and_dead_ones_not_taken() -> None:
    async def run() -> None:
        async with place() as here:
            await here.spares.begin([1, 1])
            (_, dead), (_, left) = here.spares._waiting
            dead.kill()
            await dead.wait()
            assert (await here.start("first")).pid == left.pid
            await here.spares.begin([1])
            ((_, unused),) = [each for each in here.spares._waiting if each[1] is not dead]
            await here.spares.close()
            assert unused.returncode == -9
            assert here.waiting == []

    asyncio.run(run())


def test_only_workers_of_this_machine_are_begun_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    one, two = ModelConfig(path="a"), ModelConfig(path="b", replicas=2)
    none, many = ModelConfig(path="c", replicas=0), ModelConfig(path="d", replicas=9)
    own = ModelConfig(path="e", engine=EngineConfig(threads=3))
    assert early_threads(Config(models=(one, none, two, own))) == [0, 2, 2, 3]
    assert early_threads(Config(models=(many,))) == [1, 1, 1, 1]
    assert early_threads(Config(models=(one,), fleet=FleetConfig(launcher="ray"))) == []
