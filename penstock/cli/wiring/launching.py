"""Which launcher there is, by the configuration."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from penstock.clock import Clock
from penstock.config.fleet import FleetConfig
from penstock.config.machine import state_directory
from penstock.fleet.launchers.base import Launcher
from penstock.fleet.launchers.local import LocalLauncher
from penstock.fleet.launchers.log_file import WorkerLogs
from penstock.fleet.launchers.process import TakeSpare, no_spare
from penstock.fleet.launchers.ray import RayLauncher


def make_launcher(
    config: FleetConfig, clock: Clock, key: bytes, say: Callable[[str], None], spare: TakeSpare = no_spare
) -> Launcher:
    """The launcher of every replica, which name their KV blocks with `key`; `say` hears what workers print,
    `spare` has processes of this machine that were begun before.

    Raises:
        ConfigError: it needs something that is not installed.
    """
    logs = WorkerLogs(say, log_directory())
    if config.launcher == "ray":
        return RayLauncher(clock, key, config=config, logs=logs)
    return LocalLauncher(clock, key, logs=logs, spare=spare)


def log_directory() -> Path | None:
    """Where workers' words are kept; None where there is no place for them."""
    with contextlib.suppress(RuntimeError):  # There may be no home directory.
        return state_directory() / "workers"
    return None


def shared_cores(config: FleetConfig) -> int:
    """Cores that all replicas share: this machine's, if they run here."""
    return len(os.sched_getaffinity(0)) if config.launcher == "local" else 0
