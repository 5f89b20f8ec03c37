"""An engine that takes its time instead of computing: steps last what a law says, tokens are made up.

The engine's own scheduler, block pool and protocol are the real ones; only the model is not there, so a benchmark of what is
before the model can have as much of it as it likes. `runner="runner:build_runner"` in a worker's launch, this directory
on PYTHONPATH; MODELLED_FIXED_MS, MODELLED_PREFILL_US (per prompt token) and MODELLED_ROW_US (per decode row) set the law.
"""

import os
import time
from collections.abc import Callable

from penstock.clock import NS_PER_S, Clock
from penstock.config.tree import EngineConfig
from penstock.protocol.worker import ModelInfo
from penstock.schedule.plan import NewRow, Sampled, StepPlan, StepResult
from penstock.types import BLOCK_TOKENS

BLOCKS = 65_536
VOCAB_SIZE = 4096
FIRST_TOKEN = 1000
TOKENS = 64
"""Token ids from the first on that answers are made of: plain text in the demo models' vocabulary."""


class ModelledRunner:
    """Sleeps for a step's time."""

    def __init__(self, name: str, config: EngineConfig, clock: Clock) -> None:
        self.info = ModelInfo(
            model=name,
            architecture="Modelled",
            dtype="bfloat16",
            num_parameters=0,
            vocab_size=VOCAB_SIZE,
            max_model_len=32_768,
            num_blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_running=config.max_running,
        )
        self._clock = clock
        self._fixed_ns = round(float(os.environ.get("MODELLED_FIXED_MS", "20")) * 1e6)
        self._prefill_ns = float(os.environ.get("MODELLED_PREFILL_US", "25")) * 1e3
        self._row_ns = float(os.environ.get("MODELLED_ROW_US", "0")) * 1e3
        self._rows: dict[int, NewRow] = {}

    def warm_up(self) -> None:
        """Nothing is to be warmed."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step: wait as long as it would take, then a token for every row that draws one."""
        began_ns = self._clock.now_ns()
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        self._rows.update((new.row, new) for new in plan.new_rows)
        prefill = sum(work.num_tokens for work in plan.work if work.num_tokens > 1 or not work.samples)
        step_ns = self._fixed_ns + self._prefill_ns * prefill + self._row_ns * len(plan.work)
        sampled = [
            Sampled(work.row, FIRST_TOKEN + (work.num_computed + work.num_tokens) % TOKENS)
            for work in plan.work
            if work.samples
        ]
        time.sleep(max(0.0, began_ns + step_ns - self._clock.now_ns()) / NS_PER_S)
        return StepResult(plan.step, tuple(sampled))


def build_runner(
    model_path: str, config: EngineConfig, clock: Clock, progress: Callable[[str, int, int], None]
) -> ModelledRunner:
    """What a worker calls."""
    progress("modelling", 1, 1)
    return ModelledRunner(os.path.basename(model_path), config, clock)
