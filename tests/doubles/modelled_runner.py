"""A runner that computes nothing and takes the time that a law says: the engine's other half stays real.

`modelled_worker` starts worker processes that name it (`runner=RUNNER`), for modelled_load.py and
bench/sim/fidelity.py. The model is in the environment, as JSON of `Modelled`: `environment` writes it.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.config.engine_settings import EngineSettings
from penstock.planning.roofline import Placed, Roofline, accelerator, model_shape
from penstock.planning.step_time import LinearStepTime, StepTime
from penstock.protocol.address import WorkerLaunch
from penstock.protocol.worker import ModelInfo
from penstock.schedule.plan import RowWork, Sampled, StepPlan, StepResult
from penstock.schedule.step import StepShape
from penstock.types import BLOCK_TOKENS

VARIABLE = "PENSTOCK_MODELLED"
RUNNER = "modelled_runner:build_runner"
VOCAB_SIZE = 16_384
FIRST_TOKEN = 300
SPIN_NS = 1_000_000
"""The last part of a step is spun through: a sleep ends up to a scheduler's tick late."""
END_S = 20.0
"""A worker that ends later than so is killed."""


class OnDevice(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Steps of a model on a named accelerator, by the simulator's roofline."""

    model: str
    device: str

    def law(self) -> StepTime:
        """How long steps take."""
        return Roofline(Placed(model=model_shape(self.model), device=accelerator(self.device)))


class Linear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Steps of a fixed time, and so much for each prompt token."""

    fixed_ns: int
    prefill_ns: int

    def law(self) -> StepTime:
        """How long steps take."""
        return LinearStepTime(fixed_ns=self.fixed_ns, row_ns=0, prefill_ns=self.prefill_ns, kv_ps=0)


class Modelled(msgspec.Struct, frozen=True, kw_only=True):
    """The modelled parts."""

    speed: OnDevice | Linear
    num_blocks: int
    max_model_len: int
    first_token: int = FIRST_TOKEN
    num_tokens: int = 1
    """So many token ids from the first on are what answers are made of, one after the other."""

    def environment(self) -> dict[str, str]:
        """This process's environment, for a worker that models this."""
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, VARIABLE: msgspec.json.encode(self).decode(), "PYTHONPATH": path}


class ModelledRunner:
    """Waits, and makes up tokens."""

    def __init__(self, modelled: Modelled, max_running: int, clock: Clock) -> None:
        self._modelled, self._law, self._clock = modelled, modelled.speed.law(), clock
        self.info = ModelInfo(
            model="modelled", architecture="Modelled", dtype="bfloat16", num_parameters=0,
            vocab_size=VOCAB_SIZE, max_model_len=modelled.max_model_len, num_blocks=modelled.num_blocks,
            block_tokens=BLOCK_TOKENS, max_running=max_running,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Nothing is lazy."""

    def run(self, plan: StepPlan) -> StepResult:
        """Take a step's time from its beginning on: planning it is part of it, as in the simulator."""
        began_ns = plan.planned_ns or self._clock.now_ns()
        due_ns = began_ns + self._law.step_ns(StepShape.of(plan.work))
        while (left_ns := due_ns - self._clock.now_ns()) > 0:
            time.sleep(max(0, left_ns - SPIN_NS) / NS_PER_S)
        return StepResult(plan.step, tuple(self._sampled(work) for work in plan.work if work.samples))

    def _sampled(self, work: RowWork) -> Sampled:
        reported = self._modelled
        return Sampled(
            work.row, reported.first_token + (work.num_computed + work.num_tokens) % reported.num_tokens
        )


def build_runner(
    model_path: str, config: EngineSettings, clock: Clock, progress: Callable[[str, int, int], None]
) -> ModelledRunner:
    """See `RunnerFactory` of the worker."""
    del model_path
    progress("modelling", 0, 0)
    modelled = msgspec.json.decode(os.environ[VARIABLE], type=Modelled)
    return ModelledRunner(modelled, config.max_running, clock)


@contextlib.contextmanager
def modelled_worker(place: Path, launch: WorkerLaunch, environ: Mapping[str, str]) -> Iterator[None]:
    """A worker process, from its launch to its end. Its log is worker.log in `place`."""
    with (place / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.worker"], stdin=subprocess.PIPE, stderr=log, env=environ
        )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()
