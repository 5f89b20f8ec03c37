"""A runner that computes nothing and takes the time that the simulator's roofline says: the engine's other half stays real.

Named by worker processes that bench/sim_fidelity.py starts (`runner="modelled_runner:build_runner"`). Model, device and rows are
in the environment, as JSON of `Modelled`.
"""

import os
import time
from collections.abc import Callable

import msgspec

from penstock.clock import NS_PER_S, Clock
from penstock.config.tree import EngineConfig
from penstock.protocol.worker import ModelInfo
from penstock.schedule.plan import Sampled, StepPlan, StepResult
from penstock.sim.accelerators import accelerator
from penstock.sim.model_shapes import model_shape
from penstock.sim.roofline import Placed, Roofline
from penstock.sim.step_time import StepShape
from penstock.types import BLOCK_TOKENS

VARIABLE = "PENSTOCK_MODELLED"
VOCAB_SIZE = 16_384
TOKEN = 300
SPIN_NS = 1_000_000
"""The last part of a step is spun through: a sleep ends up to a scheduler's tick late."""


class Modelled(msgspec.Struct, frozen=True, kw_only=True):
    """What is modelled."""

    model: str
    device: str
    num_blocks: int
    max_model_len: int

    def law(self) -> Roofline:
        """How long its steps take."""
        return Roofline(Placed(model=model_shape(self.model), device=accelerator(self.device)))


class ModelledRunner:
    """Waits, and samples always the same token."""

    def __init__(self, modelled: Modelled, max_running: int, clock: Clock) -> None:
        self._law, self._clock = modelled.law(), clock
        self.info = ModelInfo(
            model="modelled", architecture="Modelled", dtype="bfloat16", num_parameters=0, vocab_size=VOCAB_SIZE,
            max_model_len=modelled.max_model_len, num_blocks=modelled.num_blocks, block_tokens=BLOCK_TOKENS,
            max_running=max_running,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Nothing is lazy."""

    def run(self, plan: StepPlan) -> StepResult:
        """Take a step's time from its beginning on: planning it is part of it, as in the simulator."""
        began_ns = plan.planned_ns or self._clock.now_ns()
        due_ns = began_ns + self._law.step_ns(StepShape.of(plan.work))
        while (left_ns := due_ns - self._clock.now_ns()) > 0:
            time.sleep(max(0, left_ns - SPIN_NS) / NS_PER_S)
        return StepResult(plan.step, tuple(Sampled(work.row, TOKEN) for work in plan.work if work.samples))


def build_runner(
    model_path: str, config: EngineConfig, clock: Clock, progress: Callable[[str, int, int], None]
) -> ModelledRunner:
    """See `RunnerFactory` of the worker."""
    del model_path
    progress("modelling", 0, 0)
    modelled = msgspec.json.decode(os.environ[VARIABLE], type=Modelled)
    return ModelledRunner(modelled, config.max_running, clock)
