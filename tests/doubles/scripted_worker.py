"""A launched worker process with the scripted runner, for tests that need a real one."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from byte_tokenizer import byte_tokenizer
from step_gate import ENVIRONMENT

from penstock.backends.engine.backend import EngineBackend
from penstock.backends.silence import HeartbeatTerms
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.fleet.launchers.base import WorkerSpec
from penstock.fleet.launchers.process import WorkerLogs
from penstock.fleet.launchers.supervised import LocalLauncher, SupervisedWorker
from penstock.types import ModelName, WorkerId

DOUBLES = str(Path(__file__).parent)
RUNNER = "scripted_runner:build_runner"


class Bench:
    """One launcher, what its workers said, and how to start another worker."""

    def __init__(self, step_s: float, gate: str) -> None:
        self.lines: list[str] = []
        self.heartbeat = HeartbeatTerms()
        environment = {"PYTHONPATH": DOUBLES, "SCRIPTED_STEP_S": str(step_s), ENVIRONMENT: gate}
        self.launcher = LocalLauncher(
            SystemClock(), b"secret" * 4, environment=environment, logs=WorkerLogs(self.lines.append)
        )

    async def start(self, *, model_path: str = "scripted", **engine: object) -> SupervisedWorker:
        spec = WorkerSpec(
            worker_id=WorkerId(f"w{len(self.launcher.list())}"),
            model_path=model_path,
            model_name=ModelName("scripted"),
            engine=EngineSettings(**engine),
            runner=RUNNER,
        )
        backend = EngineBackend(byte_tokenizer(), SystemClock(), self.heartbeat)
        return await self.launcher.start(spec, backend)


@contextlib.asynccontextmanager
async def bench(step_s: float = 0.001, *, gate: str = "") -> AsyncIterator[Bench]:
    """`gate`: the directory of a `StepGate`."""
    made = Bench(step_s, gate)
    try:
        yield made
    finally:
        await made.launcher.close(timeout_s=0.1)
