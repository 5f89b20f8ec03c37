"""The worker of `lora_zipf.py`: ours, but to read an adapter again takes a fixed time at least, and what
every request waited for its adapter is written down.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.config.tree import EngineConfig
from penstock.engine.adapters.files import Packed, never
from penstock.engine.core import StepRunner, TakesAdapters
from penstock.engine.pooling.load import build_any_runner
from penstock.engine.runner import OnProgress
from penstock.schedule.adapters import AdapterPool, Released

CLOCK = SystemClock()
SLOW = "slow"
"""A file of this name: from now on loads take their time."""


def _noted(
    change: Callable[..., Released[Any]], write: Callable[[str], object]
) -> Callable[..., Released[Any]]:
    @wraps(change)
    def noting(pool: AdapterPool[Any], *given: object) -> Released[Any]:
        released, now_ns = change(pool, *given), CLOCK.now_ns()
        for each in released.ready:
            write(f"{time.time():.3f} {now_ns - each.arrived_ns}\n")
        return released

    return noting


def build_runner(model_path: str, config: EngineConfig, clock: Clock, on_progress: OnProgress) -> StepRunner:
    """As `penstock.protocol.address.REAL_RUNNER` names it, with an adapter reader that takes its time."""
    load_s, place = float(os.environ["BENCH_LOAD_S"]), Path(os.environ["BENCH_PLACE"])
    slow = place / SLOW
    waits = (place / f"waits-{os.getpid()}").open("a", buffering=1)
    for name in ("submit", "finished", "take", "unload"):
        setattr(AdapterPool, name, _noted(getattr(AdapterPool, name), waits.write))
    runner = build_any_runner(model_path, config, clock, on_progress)
    assert isinstance(runner, TakesAdapters), "the model takes adapters"
    reader = runner.adapters
    assert reader is not None
    read = reader.read

    def slowly(directory: Path, digest: str = "", pause: Callable[[], None] = never) -> tuple[str, Packed]:
        begun = time.monotonic()
        found = read(directory, digest, pause)
        if digest and slow.exists():  # Not when it is read for the first time, to see whether it can be.
            time.sleep(max(0.0, load_s - (time.monotonic() - begun)))
        return found

    reader.read = slowly
    return runner
