"""Our engine's own runner, which a test slows down: answers last as long as it wants, on any machine.

For worker processes that tests start (`runner="paced_runner:build_runner"`, with `pace` as their gate).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from step_gate import ENVIRONMENT

from penstock.engine.runner import build_runner as build_real
from penstock.schedule.plan import StepPlan, StepResult

RUNNER = "paced_runner:build_runner"
STEP_S = 0.1


class Pace:
    """A file in a directory that the test and the worker process share."""

    def __init__(self, directory: str | Path) -> None:
        self._file = Path(directory) / "slow"

    def slow(self) -> None:
        """From now on each step takes `STEP_S` more."""
        self._file.touch()

    def full(self) -> None:
        """As fast as it computes, again."""
        self._file.unlink()

    def around(self, run: Callable[[StepPlan], StepResult]) -> Callable[[StepPlan], StepResult]:
        """In the worker."""

        def paced(plan: StepPlan) -> StepResult:
            if self._file.exists():
                time.sleep(STEP_S)
            return run(plan)

        return paced


def build_runner(*args):
    runner = build_real(*args)
    runner.run = Pace(os.environ[ENVIRONMENT]).around(runner.run)
    return runner
