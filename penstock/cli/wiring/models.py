"""From the configuration to what a gateway needs of each model: tokenizer, template, and where its workers
will be. Workers at given addresses have a moment to be there when a server starts; one that is not is named.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock import rng
from penstock.backends.http.backend import BackendDependencies
from penstock.backends.http.terms import HttpBackendLimits, HttpLimits
from penstock.clock import NS_PER_S, Clock
from penstock.config.checkpoints import resolve, served_name
from penstock.config.tree import Config, ModelConfig
from penstock.errors import CheckpointError
from penstock.fleet.members import worker_id_at
from penstock.fleet.registry import Registry, Worker
from penstock.gateway.models.served import PublicPrefixes, ServedModel
from penstock.models.files import changed_ns, read_config
from penstock.models.registry import check_loads
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import ChatTemplate
from penstock.text.reasoning import reasoning_marks
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_formats import tool_format
from penstock.types import ModelName


@dataclass(slots=True, frozen=True)
class ModelPart:
    """One model: what the gateway sees of it, and what its own workers load."""

    served: ServedModel
    path: str


def make_part(model: ModelConfig, registry: Registry, clock: Clock) -> ModelPart:
    """The parts that serve one model: nothing runs yet.

    Raises:
        ConfigError: there is no such model.
        CheckpointError: its tokenizer or chat template cannot be read, or it is none that our engine loads.
    """
    directory, name = resolve(model.path), ModelName(served_name(model))
    if model.replicas or model.scale.launches:
        check_loads(directory, needs_weights=model.engine.load_format == "safetensors")
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, wall_ns=clock.wall_ns)
    served = ServedModel(
        name=name,
        workers=registry.of(name),
        tokenizer=tokenizer,
        template=template,
        created_s=_changed_s(directory),
        tool_format=tool_format(template.sources.values(), model.tool_format),
        reasoning=reasoning_marks(template.sources.values(), model.reasoning_marks),
        declared_len=_declared_len(model, directory),
        public_prefixes=PublicPrefixes.of(model.public_prefixes, tokenizer, template),
    )
    return ModelPart(served, str(directory))


def make_dependencies(config: Config, metrics: Metrics, clock: Clock) -> BackendDependencies:
    """The shared dependencies of the backends of workers that are not ours."""
    return BackendDependencies(
        config=HttpBackendLimits(http=HttpLimits.of(config.backends)),
        clock=clock,
        meters=metrics.backend,
        draw=rng.stream(rng.fresh_seed(), "probes").random,
    )


def _declared_len(model: ModelConfig, directory: Path) -> int:
    """The context that its workers will have, as far as is said before they are there: the smallest. 0:
    nothing is.
    """
    lengths = [worker.max_model_len for worker in model.workers]
    if model.replicas or model.scale.launches:
        lengths.append(model.engine.max_model_len or _made_for(directory))
    return min((length for length in lengths if length), default=0)


def _made_for(directory: Path) -> int:
    try:
        config = read_config(directory)
    except CheckpointError:  # Its worker will say so, and better.
        return 0
    inner = config.text_config
    return config.max_position_embeddings or (inner.max_position_embeddings if inner else None) or 0


def _changed_s(directory: Path) -> int:
    """When the checkpoint was last changed: OpenAI's `created`."""
    return changed_ns(directory) // NS_PER_S


CONNECT_TIMEOUT_S = 5.0
"""For all workers at addresses together; others are waited for in the background."""


async def wait_for_attached(registry: Registry, models: Sequence[ModelConfig], log: Log) -> None:
    """Wait until every worker that was not launched here is ready, or for `CONNECT_TIMEOUT_S`.

    A worker that is missing then is no reason not to serve: it is said, by the key of the configuration
    that names him.
    """
    changed = asyncio.Event()

    def listener(_: Worker) -> None:
        changed.set()

    registry.listen(listener)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while not all(worker.is_ready for worker in registry if worker.stop is None):
                changed.clear()
                await changed.wait()
    except TimeoutError:
        keys = {
            worker_id_at(served_name(model), worker): f"models[{i}].workers[{j}].url"
            for i, model in enumerate(models)
            for j, worker in enumerate(model.workers)
        }
        for worker in registry:
            if not worker.is_ready and worker.stop is None:
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
