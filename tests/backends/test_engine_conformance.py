"""The conformance suite against a real worker process with a scripted runner.

The worker stays from test to test, as it does for gateways that come and go; whoever takes it away gets
another one.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop
from byte_tokenizer import byte_tokenizer
from conformance import TIMEOUT_S, BackendConformance
from scripted_worker import DOUBLES, RUNNER

from penstock.backends.engine.backend import EngineBackend
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.protocol.address import UnixAddress, WorkerLaunch


class Workers:
    """One worker process at a time."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._num_started = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> UnixAddress:
        """Where one listens, or will in a moment."""
        if self._process is None:
            self._start()
        return UnixAddress(f"{self._directory}/{self._num_started}.sock")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self._num_started += 1
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.worker"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{DOUBLES}",
                "SCRIPTED_STEP_S": "0.001"},
        )  # fmt: skip
        launch = WorkerLaunch(
            model_path="scripted", model_name="scripted", address=str(self.address), hash_key=b"secret" * 4,
            engine=EngineSettings(), runner=RUNNER,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self._process.stdin.flush()


class TestOwnBackend(BackendConformance):
    loop_factory = staticmethod(uvloop.new_event_loop)  # As in production.
    workers: Workers

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def place(cls) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as directory:
            cls.workers = Workers(directory)
            yield
            cls.workers.kill()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EngineBackend]:
        backend = EngineBackend(byte_tokenizer(), SystemClock())
        backend.connect_to(self.workers.address)
        async with asyncio.timeout(TIMEOUT_S):
            while not backend.status.ready:
                await asyncio.sleep(0.01)
        yield backend
        await backend.close()

    async def lose_worker(self, backend: EngineBackend) -> None:
        self.workers.kill()
