import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from conformance import BackendConformance, Recorder, Requests
from fake_backend import FakeBackend

from penstock.clock import ManualClock
from penstock.errors import EngineFault
from penstock.types import FinishReason


class TestFakeBackend(BackendConformance):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[FakeBackend]:
        backend = FakeBackend(ManualClock())
        yield backend
        await backend.drain(0)

    async def lose_worker(self, backend: FakeBackend) -> None:
        backend.lose_worker()


def test_a_script_that_ends_is_an_answer_that_stops() -> None:
    async def check() -> None:
        backend = FakeBackend(ManualClock(), script=lambda request: iter(["Hel", "lo"]), step_s=0.001)
        recorder = Recorder()
        backend.generate(Requests().make(stop=("lox",)), recorder)
        finish = await recorder.end()
        assert (recorder.text, finish.reason, finish.stop) == ("Hello", FinishReason.STOP, None)
        assert finish.usage.completion_tokens == 2

    asyncio.run(check())


def test_one_stream_can_fail_alone() -> None:
    async def check() -> None:
        backend, requests = FakeBackend(ManualClock()), Requests()
        broken, whole = Recorder(), Recorder()
        request = requests.make()
        backend.generate(request, broken)
        backend.generate(requests.make(), whole)
        backend.fail(request.request_id, EngineFault("the logits are not numbers"))
        assert isinstance((await broken.end()).error, EngineFault)
        assert (await whole.end()).reason is FinishReason.LENGTH

    asyncio.run(check())


def test_a_recovered_worker_serves_again() -> None:
    async def check() -> None:
        backend = FakeBackend(ManualClock())
        backend.lose_worker("pulled the plug")
        assert backend.status.stage == "pulled the plug"
        backend.recover()
        recorder = Recorder()
        backend.generate(Requests().make(), recorder)
        assert (await recorder.end()).reason is FinishReason.LENGTH
        assert backend.status.restarts == 1

    asyncio.run(check())
