"""The worker of `lora_zipf.py`: ours, but to read an adapter again takes a fixed time at least, and what
every request waited for its adapter, and every load, is written down.
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
from penstock.schedule.adapters import AdapterPool, PooledAdapter, Released

CLOCK = SystemClock()
SLOW = "slow"
"""A file of this name: from now on loads take their time."""
PIECE_S = 0.005
"""Of that time, between pauses."""


def _noted(
    change: Callable[..., Released[Any]], write: Callable[[str], object]
) -> Callable[..., Released[Any]]:
    """Each request that goes on: when, what it waited, and whether it was there when its adapter was not."""

    @wraps(change)
    def noting(pool: AdapterPool[Any], *given: object) -> Released[Any]:
        released, now_ns = change(pool, *given), CLOCK.now_ns()
        for each in released.ready:
            had_to_wait = change.__name__ != "submit" or each.key != given[0]
            write(f"{time.time():.3f} request {now_ns - each.arrived_ns} {had_to_wait:d}\n")
        return released

    return noting


def _loads_noted(
    take: Callable[..., Released[Any]], began: Callable[[], float], write: Callable[[str], object]
) -> Callable[..., Released[Any]]:
    """Each load: when, what it took until the pool knew of it, and whether a request had waited for it."""

    @wraps(take)
    def noting(pool: AdapterPool[Any], entry: PooledAdapter, *given: object) -> Released[Any]:
        took_s = time.monotonic() - began()  # Before the pool begins the next one.
        released = take(pool, entry, *given)
        awaited = any(each.entry is entry for each in released.ready)
        write(f"{time.time():.3f} load {int(took_s * 1e9)} {awaited:d}\n")
        return released

    return noting


def build_runner(model_path: str, config: EngineConfig, clock: Clock, on_progress: OnProgress) -> StepRunner:
    """As `penstock.protocol.address.REAL_RUNNER` names it, with an adapter reader that takes its time."""
    load_s, place = float(os.environ["BENCH_LOAD_S"]), Path(os.environ["BENCH_PLACE"])
    slow = place / SLOW
    noted = (place / f"noted-{os.getpid()}").open("a", buffering=1)
    for name in ("submit", "finished", "take", "unload"):
        setattr(AdapterPool, name, _noted(getattr(AdapterPool, name), noted.write))
    AdapterPool.take = _loads_noted(AdapterPool.take, lambda: begun[0], noted.write)
    runner = build_any_runner(model_path, config, clock, on_progress)
    assert isinstance(runner, TakesAdapters), "the model takes adapters"
    begun = [0.0]
    reader = runner.adapters
    assert reader is not None
    read = reader.read

    def slowly(directory: Path, digest: str = "", pause: Callable[[], None] = never) -> tuple[str, Packed]:
        begun[0] = time.monotonic()  # One at a time.
        found = read(directory, digest, pause)
        if digest and slow.exists():  # Not when it is read for the first time, to see whether it can be.
            while (left_s := load_s - (time.monotonic() - begun[0])) > 0:
                time.sleep(min(left_s, PIECE_S))
                pause()
        return found

    reader.read = slowly
    return runner
