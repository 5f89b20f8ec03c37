"""What every launcher must do, as a test class: subclass it and say how to open one.

Workers are real processes of ours with the scripted runner, on this machine: so the tests can look whether
they are there.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Recorder, Requests
from raw_worker import wait_gone
from scripted_runner import DIE, scripted_text

from penstock.backends.base import GenerateRequest
from penstock.backends.engine.backend import EngineBackend
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.errors import CheckpointError, StreamBroken, WorkerUnavailable
from penstock.fleet.launchers.base import LaunchedWorker, Launcher, WorkerSpec
from penstock.fleet.members import worker_key
from penstock.protocol.address import UnixAddress
from penstock.types import FinishReason, ModelName, RequestId, SamplingParams, WorkerId

DOUBLES = str(Path(__file__).parents[1] / "doubles")
RUNNER = "scripted_runner:build_runner"
LONG = 60_000


@dataclass(slots=True)
class Place:
    """A launcher under test, what its workers said, and where that is kept."""

    launcher: Launcher
    log_directory: Path
    lines: list[str] = field(default_factory=list)

    async def start(self, name: str = "w0", *, model_path: str = "scripted", **engine: object):
        spec = WorkerSpec(
            worker_id=WorkerId(name),
            model_path=model_path,
            model_name=ModelName("scripted"),
            engine=EngineSettings(**engine),
            runner=RUNNER,
        )
        return await self.launcher.start(
            spec, EngineBackend(byte_tokenizer(), SystemClock(), key=worker_key(self.launcher.link_key))
        )

    def log_of(self, name: str) -> str:
        return (self.log_directory / f"{name}.log").read_text()


async def answer(worker: LaunchedWorker) -> str:
    recorder = Recorder()
    worker.backend.generate(Requests().make(seed=3, max_tokens=9), recorder)
    assert (await recorder.end()).reason is FinishReason.LENGTH
    return recorder.text


async def long_stream(worker: LaunchedWorker, max_tokens: int = LONG) -> Recorder:
    recorder = Recorder()
    worker.backend.generate(Requests().make(max_tokens=max_tokens), recorder)
    await recorder.started.wait()
    return recorder


async def make_it_die(worker: LaunchedWorker) -> None:
    recorder = Recorder()
    worker.backend.generate(
        GenerateRequest(
            request_id=RequestId("bad"), prompt_token_ids=(DIE,), sampling=SamplingParams(max_tokens=5)
        ),
        recorder,
    )
    assert isinstance((await recorder.end()).error, WorkerUnavailable)


def pid_of(worker: LaunchedWorker) -> int:
    assert worker.pid is not None
    return worker.pid


class LauncherConformance:
    """Subclass this, with a name that pytest collects, and define `open`."""

    TIMEOUT_S = 60.0

    def open(self, directory: Path) -> AbstractAsyncContextManager[Place]:
        """A launcher that keeps logs in the directory; closed afterwards."""
        raise NotImplementedError

    def run(self, directory: Path, check: Callable[[Place], Awaitable[None]]) -> None:
        async def with_place() -> None:
            async with asyncio.timeout(self.TIMEOUT_S), self.open(directory) as place:
                await check(place)

        asyncio.run(with_place())

    def test_it_starts_says_how_far_it_is_and_answers(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            stages: list[str] = []
            worker = await place.start()
            assert place.launcher.list() == (worker,)
            assert not worker.backend.status.ready
            with pytest.raises(WorkerUnavailable):
                worker.backend.generate(Requests().make(), Recorder())
            await worker.wait_ready(lambda status: stages.append(status.stage))
            assert stages[0] == "starting"
            assert await answer(worker) == scripted_text(3, 3, 9)

        self.run(tmp_path, check)

    def test_whoever_can_reach_a_port_and_has_no_key_is_kept_out(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start()
            await worker.wait_ready()
            stranger = EngineBackend(byte_tokenizer(), SystemClock())
            stranger.connect_to(worker.address)
            try:
                if isinstance(worker.address, UnixAddress):  # Its directory keeps strangers out.
                    return
                async with asyncio.timeout(10):
                    while "key" not in stranger.status.stage:
                        await asyncio.sleep(0.01)
                assert not stranger.status.ready
                assert await answer(worker) == scripted_text(3, 3, 9)
            finally:
                await stranger.close()

        self.run(tmp_path, check)

    def test_two_workers_do_not_touch_each_other(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            first, second = [await place.start(name) for name in ("a", "b")]
            await asyncio.gather(first.wait_ready(), second.wait_ready())
            assert first.address != second.address
            await place.launcher.stop(first.spec.worker_id, timeout_s=1)
            await place.launcher.stop(first.spec.worker_id, timeout_s=1)  # Once more changes nothing.
            assert place.launcher.list() == (second,)
            assert await answer(second) == scripted_text(3, 3, 9)

        self.run(tmp_path, check)

    def test_a_crash_is_told_and_it_comes_back_at_its_address(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start()
            await worker.wait_ready()
            address, old = worker.address, pid_of(worker)
            running = await long_stream(worker)
            os.kill(old, 9)
            assert isinstance((await running.end()).error, StreamBroken)
            await worker.wait_ready()
            assert pid_of(worker) != old
            assert worker.address == address
            assert worker.backend.status.restarts == 1
            assert [note.text for note in worker.backend.status.notes] == ["the worker was killed by SIGKILL"]
            assert await answer(worker) == scripted_text(3, 3, 9)

        self.run(tmp_path, check)

    def test_it_waits_longer_before_each_restart_and_then_gives_up(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start(restarts_max=2)
            stages: list[str] = []
            for _ in range(3):
                await worker.wait_ready(lambda status: stages.append(status.stage))
                await make_it_die(worker)
            with pytest.raises(WorkerUnavailable, match="2 restarts were in vain"):
                await worker.wait_ready(lambda status: stages.append(status.stage))
            waits = [stage.partition("; ")[2] for stage in stages if "; restart" in stage]
            assert list(dict.fromkeys(waits)) == ["restart 1 in 0.25 s", "restart 2 in 0.5 s"]

        self.run(tmp_path, check)

    def test_a_model_that_cannot_be_served_is_the_operators_error(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start(model_path="missing")
            with pytest.raises(CheckpointError, match="no such file"):
                await worker.wait_ready()
            assert worker.backend.status.restarts == 0

        self.run(tmp_path, check)

    def test_stop_lets_streams_end_and_takes_nothing_new(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start()
            await worker.wait_ready()
            running = await long_stream(worker, max_tokens=200)
            stopping = asyncio.create_task(place.launcher.stop(worker.spec.worker_id, timeout_s=20))
            await asyncio.sleep(0)
            with pytest.raises(WorkerUnavailable):
                worker.backend.generate(Requests().make(), Recorder())
            await stopping
            assert running.finish is not None
            assert running.finish.reason is FinishReason.LENGTH
            assert worker.backend.status.restarts == 0

        self.run(tmp_path, check)

    def test_nothing_is_left_after_stop_but_the_logs(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start()
            await worker.wait_ready()
            pid = pid_of(worker)
            running = await long_stream(worker)
            await place.launcher.stop(worker.spec.worker_id, timeout_s=0.1)
            assert (await running.end()).reason is FinishReason.ABORT
            wait_gone(pid)
            assert worker.pid is None
            assert place.launcher.list() == ()
            assert worker.backend.status.stage == "stopped"
            again = await place.start()  # The name is free again, and so is the place.
            await again.wait_ready()
            assert await answer(again) == scripted_text(3, 3, 9)

        self.run(tmp_path, check)

    def test_stopping_while_it_loads_does_not_wait_for_the_model(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start(model_path="never-ready")
            waiting = asyncio.create_task(worker.wait_ready())
            while worker.backend.status.stage != "importing":
                await asyncio.sleep(0.01)
            pid = pid_of(worker)
            await place.launcher.stop(worker.spec.worker_id, timeout_s=20)
            wait_gone(pid)
            with pytest.raises(WorkerUnavailable, match="stopped"):
                await waiting

        self.run(tmp_path, check)

    def test_what_it_prints_is_told_and_kept(self, tmp_path) -> None:
        async def check(place: Place) -> None:
            worker = await place.start("a/b", model_path="missing")
            with pytest.raises(CheckpointError):
                await worker.wait_ready()
            assert any(line.startswith("[a/b] CheckpointError: ") for line in place.lines)
            await place.launcher.stop(worker.spec.worker_id, timeout_s=1)
            assert "no such file" in place.log_of("a%2Fb")

        self.run(tmp_path, check)
