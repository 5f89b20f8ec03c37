"""How a worker that is gone, stopped or cut off is noticed, with a real process and a real socket; and that
it is fenced.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from conformance import TIMEOUT_S, Recorder, Requests
from fault_proxy import FaultProxy, fault_proxy
from msgspec.structs import replace
from scripted_runner import scripted_text
from scripted_worker import Bench, bench

from penstock.backends.engine.backend import EngineBackend
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import SystemClock
from penstock.errors import StreamBroken
from penstock.protocol.address import UnixAddress
from penstock.types import RequestId

QUICK = HeartbeatTerms(interval_s=0.25)
"""A worker is given up after a second of silence: on a busy machine a good one is silent for a part of that.
"""
MANY = 1000
"""Tokens of an answer that is cut at its first, at a thousand a second."""


async def until(backend: EngineBackend, wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not wanted():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def behind_a_proxy(made: Bench) -> AsyncIterator[tuple[FaultProxy, EngineBackend, int]]:
    """A worker process, reached through a proxy by a gateway of its own; and the process's id."""
    worker = await made.start()
    await worker.wait_ready()
    backend = EngineBackend(byte_tokenizer(), SystemClock(), QUICK)
    async with fault_proxy(worker.address) as proxy:
        backend.connect_to(proxy.address)
        await until(backend, lambda: backend.status.ready)
        assert worker.pid is not None
        try:
            yield proxy, backend, worker.pid
        finally:
            await backend.close()


def run(check: Callable[[FaultProxy, EngineBackend, int], Awaitable[None]]) -> None:
    async def main() -> None:
        async with bench() as made, behind_a_proxy(made) as parts:
            await check(*parts)

    uvloop.run(main())


async def goes_on(
    backend: EngineBackend, requests: Requests, cut: Callable[[], object], heal: Callable[[], object]
) -> str:
    """Start a long answer, cut it, heal, and let it go on; why it was cut.

    The text is the same as without.
    """
    request = requests.make(seed=3, max_tokens=MANY)
    first, second = Recorder(), Recorder()
    backend.generate(request, first)
    await first.started.wait()
    cut()
    broken = await first.end()
    assert isinstance(broken.error, StreamBroken)
    assert broken.resume is not None
    heal()
    await until(backend, lambda: backend.status.ready)
    backend.generate(replace(request, request_id=RequestId("again"), resumed=broken.resume), second)
    finish = await second.end()
    assert first.text + second.text == scripted_text(3, 3, MANY)
    assert finish.usage.completion_tokens == MANY
    return str(broken.error)


def test_a_stopped_worker_is_given_up_and_its_late_tokens_reach_nobody() -> None:
    async def check(proxy: FaultProxy, backend: EngineBackend, pid: int) -> None:
        why = await goes_on(
            backend, Requests(), lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT)
        )  # `Recorder` asserts that nothing comes behind the finish.
        assert why == "the worker has given no sign of life for 1 s"
        assert proxy.num_connections >= 2

    run(check)


def test_a_black_hole_is_given_up_and_the_stream_goes_on_when_it_is_healed() -> None:
    async def check(proxy: FaultProxy, backend: EngineBackend, _: int) -> None:
        why = await goes_on(backend, Requests(), proxy.black_hole, proxy.heal)
        assert "no sign of life" in why

    run(check)


@pytest.mark.parametrize("how", ["reset", "half-close", "corrupt"])
def test_what_ends_a_connection_is_seen_at_once(how: str) -> None:
    async def check(proxy: FaultProxy, backend: EngineBackend, _: int) -> None:
        def corrupt() -> None:
            proxy.to_client.corrupt = lambda data: b"\xff" * len(data)

        cut = {"reset": proxy.reset, "half-close": proxy.half_close, "corrupt": corrupt}[how]
        why = await goes_on(backend, Requests(), cut, proxy.heal)
        assert "no sign of life" not in why
        assert ("broke the protocol" in why) == (how == "corrupt")

    run(check)


def test_a_slow_connection_that_comes_in_pieces_is_none_the_worse() -> None:
    async def check(proxy: FaultProxy, backend: EngineBackend, _: int) -> None:
        for faults in (proxy.to_client, proxy.to_upstream):
            faults.latency_s, faults.slice_bytes, faults.bytes_per_s = 0.005, 7, 200_000.0
        recorder = Recorder()
        backend.generate(Requests().make(seed=3, max_tokens=60), recorder)
        await recorder.end()
        assert recorder.text == scripted_text(3, 3, 60)

    run(check)


def test_a_worker_that_accepts_and_never_says_a_word_is_left_for_another_try() -> None:
    async def main() -> None:
        connections = asyncio.Queue[asyncio.StreamWriter]()
        backend = EngineBackend(byte_tokenizer(), SystemClock(), HeartbeatTerms(interval_s=0.01))
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/mute.sock"
            server = await asyncio.start_unix_server(lambda _, writer: connections.put_nowait(writer), path)
            backend.connect_to(UnixAddress(path))
            async with asyncio.timeout(TIMEOUT_S):
                writers = [await connections.get() for _ in range(2)]
            assert not backend.status.ready
            await backend.close()
            for writer in writers:
                writer.close()
            server.close()
            await server.wait_closed()

    asyncio.run(main())
