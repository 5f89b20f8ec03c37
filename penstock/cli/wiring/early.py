"""What `penstock serve` does first: it begins its workers, and only then imports the gateway."""

import asyncio
import os
from collections.abc import Callable

import uvloop

from penstock.clock import Clock
from penstock.config.engine_settings import share_of
from penstock.config.tree import Config
from penstock.fleet.launchers.spares import Spares


def serve_until_stopped(config: Config, clock: Clock, started_ns: int, reread: Callable[[], Config]) -> int:
    """Serve until told to stop; the exit code.

    `reread` makes the configuration anew from where it came, for SIGHUP.

    Raises:
        OperatorError: the configuration or a model cannot be served.
        WorkerUnavailable: a worker does not come up.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, clock, started_ns, reread))


async def _serve(config: Config, clock: Clock, started_ns: int, reread: Callable[[], Config]) -> int:
    spares = Spares()
    try:
        await spares.begin(early_threads(config))
        from penstock.cli.wiring.serving import Serving  # Takes as long as a worker's imports.

        return await Serving(config, clock, started_ns, reread, spares).run()
    finally:
        await spares.close()


def early_threads(config: Config) -> list[int]:
    """The threads of each worker that is worth beginning early: those of this machine, and no more than it
    has cores.
    """
    cores = len(os.sched_getaffinity(0))
    if config.fleet.launcher != "local":
        return []
    threads = [
        share_of(model.engine, model.replicas, cores).threads
        for model in config.models
        for _ in range(model.replicas)
    ]
    return threads[:cores]
