"""The workers that the configuration names: replicas to launch, and workers at addresses."""

from collections.abc import Iterator

from penstock.backends.heartbeat import HeartbeatTerms
from penstock.backends.http.external import BackendDependencies
from penstock.clock import Clock
from penstock.config.engine_settings import EngineSettings, share_of
from penstock.config.presets import served_name
from penstock.config.tree import ModelConfig
from penstock.fleet.desired_worker import Attached, Launched, worker_id_at
from penstock.fleet.launchers.base import Launcher, WorkerSpec
from penstock.text.tokenizer import Tokenizer
from penstock.types import ModelName, WorkerId


def launched(
    model: ModelConfig,
    path: str,
    launcher: Launcher,
    tokenizer: Tokenizer,
    clock: Clock,
    *,
    heartbeat: HeartbeatTerms = HeartbeatTerms(),  # noqa: B008 - it is frozen.
    cores: int = 0,
) -> Iterator[Launched]:
    """The replicas of one model; `path` is its directory.

    They share `cores`; 0: each has those of its place.
    """
    name = served_name(model)
    for number in range(model.replicas):
        spec = WorkerSpec(
            worker_id=WorkerId(f"{name}-{number}"),
            model_path=path,
            model_name=ModelName(name),
            engine=EngineSettings.of(share_of(model.engine, model.replicas, cores)),
        )
        yield Launched(
            engine=model.engine,
            spec=spec,
            launcher=launcher,
            tokenizer=tokenizer,
            clock=clock,
            heartbeat=heartbeat,
        )


def attached(model: ModelConfig, tokenizer: Tokenizer, tools: BackendDependencies) -> Iterator[Attached]:
    """The workers of one model that run somewhere already."""
    name = served_name(model)
    for config in model.workers:
        yield Attached(
            id=worker_id_at(name, config), route=name, config=config, tokenizer=tokenizer, tools=tools
        )
