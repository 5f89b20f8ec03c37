"""Real worker processes under the local launcher."""

import asyncio
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from conformance import Recorder, Requests
from scripted_runner import DIE, HANG, scripted_text
from scripted_worker import Bench, bench

from penstock.backends.base import GenerateRequest
from penstock.backends.silence import HeartbeatTerms
from penstock.errors import StreamBroken, WorkerUnavailable
from penstock.fleet.launchers.process import create_process
from penstock.fleet.launchers.supervised import SupervisedWorker
from penstock.protocol.address import UnixAddress
from penstock.types import FinishReason, RequestId, SamplingParams

LONG = 60_000
STALL_S = 1.5
"""A worker hangs after this long without a step: on a busy machine a good one may need a part of that."""


def run(check: Callable[[Bench], Awaitable[None]], step_s: float = 0.001) -> None:
    async def with_bench() -> None:
        async with bench(step_s) as made, asyncio.timeout(60):
            await check(made)

    asyncio.run(with_bench())


def misbehaving(how: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("bad"), prompt_token_ids=(how,), sampling=SamplingParams(max_tokens=5)
    )


async def answer(worker: SupervisedWorker, requests: Requests) -> str:
    recorder = Recorder()
    worker.backend.generate(requests.make(seed=3, max_tokens=9), recorder)
    assert (await recorder.end()).reason is FinishReason.LENGTH
    return recorder.text


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def test_it_starts_tells_how_far_it_is_and_leaves_nothing() -> None:
    async def check(made: Bench) -> None:
        stages: list[str] = []
        worker = await made.start()
        await worker.wait_ready(lambda status: stages.append(status.stage))
        assert stages[0] == "starting"
        assert made.launcher.list() == (worker,)
        assert await answer(worker, Requests()) == scripted_text(3, 3, 9)
        pid = worker.pid
        assert pid is not None
        directory = Path(made.launcher._directory.name)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        await made.launcher.close(timeout_s=1)
        assert made.launcher.list() == ()
        assert not directory.exists()
        assert worker.backend.status.stage == "stopped"
        assert not Path(f"/proc/{pid}").exists(), "reaped"

    run(check)


def test_a_stop_that_meets_the_clearing_up_behind_an_exit_leaves_nothing_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(made: Bench) -> None:
        worker = await made.start()
        await worker.wait_ready()
        stopped, end, pid = asyncio.Event(), worker._process.end, worker.pid
        stopping: list[asyncio.Task[None]] = []

        async def end_slowly(timeout_s: float) -> None:
            if not stopping:
                stopping.append(
                    asyncio.create_task(made.launcher.stop(worker.spec.worker_id, timeout_s=0.01))
                )
                stopped.set()
                await asyncio.Event().wait()  # Until `stop` cancels it.
            await end(timeout_s)

        monkeypatch.setattr(worker._process, "end", end_slowly)
        assert pid is not None
        assert isinstance(worker.address, UnixAddress)
        os.kill(pid, signal.SIGKILL)
        await stopped.wait()
        await stopping[0]
        assert worker.pid is None
        assert not Path(worker.address.path).exists()
        assert not Path(f"/proc/{pid}").exists(), "reaped"

    run(check)


@pytest.mark.parametrize("how", ["kill -9", "dies in a step"])
def test_a_lost_worker_is_reported_and_comes_back(how: str) -> None:
    async def check(made: Bench) -> None:
        requests = Requests()
        worker = await made.start()
        await worker.wait_ready()
        running, never = Recorder(), Recorder()
        worker.backend.generate(requests.make(max_tokens=LONG), running)
        await running.started.wait()
        old = worker.pid
        assert old is not None
        if how == "kill -9":
            os.kill(old, 9)
        else:
            worker.backend.generate(misbehaving(DIE), never)
            assert isinstance((await never.end()).error, WorkerUnavailable)
        assert isinstance((await running.end()).error, StreamBroken)
        with pytest.raises(WorkerUnavailable):
            worker.backend.generate(requests.make(), Recorder())
        await worker.wait_ready()
        assert worker.pid not in (None, old)
        assert worker.backend.status.restarts == 1
        assert [note.text for note in worker.backend.status.notes] == ["the worker was killed by SIGKILL"]
        assert await answer(worker, requests) == scripted_text(3, 3, 9)

    run(check)


def test_a_hung_worker_is_killed_and_replaced() -> None:
    async def check(made: Bench) -> None:
        worker = await made.start(stall_timeout_s=STALL_S)
        await worker.wait_ready()
        recorder = Recorder()
        worker.backend.generate(misbehaving(HANG), recorder)
        assert isinstance((await recorder.end()).error, WorkerUnavailable)
        await worker.wait_ready()
        (note,) = worker.backend.status.notes
        assert note.text.startswith("the worker exited with code 1: steps have not advanced for ")
        assert any("scripted_runner.py" in line for line in made.lines)  # Where it hung.
        assert await answer(worker, Requests()) == scripted_text(3, 3, 9)

    run(check)


def test_a_worker_that_stood_still_so_long_that_it_was_cut_off_is_killed_and_replaced() -> None:
    async def check(made: Bench) -> None:
        made.heartbeat = HeartbeatTerms(interval_s=0.25)
        worker = await made.start(stall_timeout_s=STALL_S)
        await worker.wait_ready()
        old = worker.pid
        assert old is not None
        os.kill(old, signal.SIGSTOP)  # It has no work, so nobody waits for a step of it.
        while worker.pid == old:
            await asyncio.sleep(0.02)
        await worker.wait_ready()
        assert [note.text for note in worker.backend.status.notes] == ["the worker hung: no answer in 3 s"]
        assert await answer(worker, Requests()) == scripted_text(3, 3, 9)

    run(check)


def test_a_stopped_worker_is_killed_and_replaced() -> None:
    async def check(made: Bench) -> None:
        made.heartbeat = HeartbeatTerms(suspect_after=60, lost_after=120)
        worker = await made.start(stall_timeout_s=STALL_S)
        await worker.wait_ready()
        recorder = Recorder()
        worker.backend.generate(Requests().make(max_tokens=50_000), recorder)
        await recorder.started.wait()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)  # Its own watchdog stands still as well.
        assert isinstance((await recorder.end()).error, StreamBroken)
        await worker.wait_ready()
        assert [note.text for note in worker.backend.status.notes] == ["the worker hung: no step in 3 s"]
        assert await answer(worker, Requests()) == scripted_text(3, 3, 9)

    run(check)


def test_a_worker_that_does_not_get_ready_is_given_up() -> None:
    """After `engine.startup_timeout_s`."""

    async def check(made: Bench) -> None:
        worker = await made.start(model_path="never-ready", startup_timeout_s=0.3, stall_timeout_s=0.2)
        with pytest.raises(WorkerUnavailable, match="not ready within"):
            await worker.wait_ready()

    run(check)


def test_a_worker_that_dies_while_it_loads_is_told_of_and_starts_again() -> None:
    async def check(made: Bench) -> None:
        worker = await made.start()
        while worker.pid is None:
            await asyncio.sleep(0)
        os.kill(worker.pid, 9)
        with pytest.raises(WorkerUnavailable, match="killed by SIGKILL"):
            await worker.wait_ready()
        assert "restart 1 in 0.25 s" in worker.backend.status.stage
        while not worker.backend.status.ready:
            await asyncio.sleep(0.01)
        await worker.wait_ready()
        assert worker.backend.status.restarts == 1
        assert await answer(worker, Requests()) == scripted_text(3, 3, 9)

    run(check)


def children() -> set[str]:
    """The process ids of this process's children: earlier tests may have left some that rest."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {pid for each in tasks for pid in each.read_text().split()}


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("turns", [0, 1, 5])
def test_stopping_while_it_starts_leaves_no_process(
    turns: int, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def check() -> None:
        async with bench() as made:
            before = children()
            worker = await made.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            await made.launcher.stop(worker.spec.worker_id, timeout_s=1)
            assert children() <= before

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(check())


def test_stopping_during_the_back_off_starts_nothing_more() -> None:
    async def check(made: Bench) -> None:
        worker = await made.start()
        await worker.wait_ready()
        assert worker.pid is not None
        os.kill(worker.pid, 9)
        while worker.backend.status.restarts == 0:
            await asyncio.sleep(0)
        await made.launcher.stop(worker.spec.worker_id, timeout_s=1)
        assert worker.pid is None

    run(check)


def test_the_worker_has_a_session_of_its_own() -> None:
    """So Ctrl-C in the terminal reaches the parent alone, also while the worker's Python still starts."""

    async def check(made: Bench) -> None:
        worker = await made.start()
        await worker.wait_ready()
        assert worker.pid is not None
        assert os.getsid(worker.pid) == worker.pid

    run(check)


def test_abort_frees_the_blocks_on_the_worker() -> None:
    async def check(made: Bench) -> None:
        worker = await made.start()
        await worker.wait_ready()
        recorder = Recorder()
        generation = worker.backend.generate(requests.make(max_tokens=LONG), recorder)
        await recorder.started.wait()
        generation.abort()
        assert await answer(worker, requests)
        while (stats := worker.backend.status.stats) is None or stats.running or not stats.step:
            await asyncio.sleep(0)
        assert stats.blocks_used == 0
        assert stats.generated_tokens < LONG

    requests = Requests()
    run(check)


def test_another_threads_process_in_the_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop makes one at a time in a program, and refuses a second loop meanwhile."""
    tries, made = list[object](), object()

    async def create(*_command: str, **_how: object) -> object:
        tries.append(_command)
        if len(tries) < 3:
            raise RuntimeError("Racing with another loop to spawn a process.")
        if len(tries) == 4:
            raise RuntimeError("no loop")
        return made

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    assert asyncio.run(create_process({})) is made
    with pytest.raises(RuntimeError, match="no loop"):
        asyncio.run(create_process({}))
