"""Puts together what computes a model directory, whichever kind of model it holds."""

from pathlib import Path

from msgspec.structs import replace

from penstock.clock import Clock
from penstock.config.tree import EngineConfig
from penstock.engine import runner as decoders
from penstock.engine.core import StepRunner
from penstock.engine.pooling.runner import PoolingRunner
from penstock.engine.runner import OnProgress, Runner, build_runner
from penstock.errors import ConfigError
from penstock.models.pooling import PoolingSpec
from penstock.models.registry import read_spec, stored_pooling
from penstock.protocol.worker import ModelInfo
from penstock.types import VECTOR_CAPABILITIES


def build_any_runner(
    model_path: str | Path, config: EngineConfig, clock: Clock, on_progress: OnProgress
) -> StepRunner:
    """What a worker process calls at its start: the runner of a model that generates text, or makes vectors.

    Raises:
        CheckpointError: the directory does not hold a model that can be served.
        ConfigError: a setting that is impossible on this machine or with this model.
    """
    path = Path(model_path)
    if (pooling := stored_pooling(path)) is None:
        return build_runner(path, config, clock, on_progress)
    runner = build_runner(path, _config_for(path, config, pooling), clock, on_progress)
    assert isinstance(runner, Runner), "it computes on the processor"
    return PoolingRunner(runner.parts, _told(runner.info, pooling), pooling)


def plan_model(model_path: str | Path, config: EngineConfig, clock: Clock) -> ModelInfo | None:
    """What `build_any_runner` would load, as `runner.plan_model` says it.

    Raises:
        CheckpointError, ConfigError: as `build_any_runner`.
    """
    path = Path(model_path)
    if (pooling := stored_pooling(path)) is None:
        return decoders.plan_model(path, config, clock)
    info = decoders.plan_model(path, _config_for(path, config, pooling), clock)
    return None if info is None else _told(info, pooling)


def on_processor(config: EngineConfig) -> EngineConfig:
    """The configuration of a model that is computed on the processor only.

    Raises:
        ConfigError: it insists on another device.
    """
    if config.device == "cuda":
        raise ConfigError("engine.device is cuda, but models that make vectors run on the CPU only")
    return replace(config, device="cpu")


def _config_for(path: Path, config: EngineConfig, pooling: PoolingSpec) -> EngineConfig:
    """The configuration of a decoder whose hidden states are pooled."""
    config = replace(on_processor(config), adapter_slots=0)
    if 0 < pooling.tokens_max < read_spec(path)[0].max_position and not config.max_model_len:
        config = replace(config, max_model_len=pooling.tokens_max)
    return config


def _told(info: ModelInfo, pooling: PoolingSpec) -> ModelInfo:
    """What is told of it, in the place of what its decoder is."""
    return replace(
        info, pooling=pooling.kind, dimensions=pooling.dimensions, capabilities=VECTOR_CAPABILITIES
    )
