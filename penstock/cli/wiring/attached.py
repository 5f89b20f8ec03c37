"""Workers at addresses, when a server starts: they have a moment to be there, and who is not is named."""

import asyncio
from collections.abc import Sequence

from penstock.config.presets import served_name
from penstock.config.tree import ModelConfig
from penstock.fleet.desired_worker import worker_id_at
from penstock.fleet.registry import Registry
from penstock.fleet.worker import Worker
from penstock.telemetry.log import Log

CONNECT_TIMEOUT_S = 5.0
"""For all of them together; the others are waited for in the background."""


async def wait_for_attached(registry: Registry, models: Sequence[ModelConfig], log: Log) -> None:
    """Wait until every worker is ready, or for `CONNECT_TIMEOUT_S`.

    That somebody is not there then is no reason not to serve: it is said, by the key of the configuration
    that names him.
    """
    changed = asyncio.Event()

    def listener(_: Worker) -> None:
        changed.set()

    registry.listen(listener)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while not all(worker.is_ready for worker in registry):
                changed.clear()
                await changed.wait()
    except TimeoutError:
        keys = {
            worker_id_at(served_name(model), worker): f"models[{i}].workers[{j}].url"
            for i, model in enumerate(models)
            for j, worker in enumerate(model.workers)
        }
        for worker in registry:
            if not worker.is_ready:
                log.warning(
                    "a worker is not there yet",
                    model=worker.route,
                    worker=worker.id,
                    field=keys.get(worker.id),
                    address=worker.address,
                    stage=worker.stage,
                )
    finally:
        registry.unlisten(listener)
