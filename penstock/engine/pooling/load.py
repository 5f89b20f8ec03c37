"""Puts together what computes a model directory, whichever kind of model it holds."""

import os
from pathlib import Path

import torch
from msgspec.structs import replace

from penstock.clock import Clock
from penstock.config.tree import EngineConfig
from penstock.engine import runner as decoders
from penstock.engine.core import StepRunner
from penstock.engine.device_speed import device_name
from penstock.engine.fingerprint import identify, name_of, torch_kernels
from penstock.engine.loader import load_named
from penstock.engine.pooling.runner import Encoder, EncoderRunner, PoolingRunner
from penstock.engine.runner import OnProgress, Runner, build_runner
from penstock.errors import ConfigError
from penstock.models.registry import read_spec, stored_pooling
from penstock.models.vectors import EncoderSpec, PoolingSpec, stored_encoder
from penstock.protocol.worker import LOADING_WEIGHTS, ModelInfo
from penstock.schedule.batch import resolve_max_running
from penstock.types import BLOCK_TOKENS, VECTOR_CAPABILITIES, Capability


def build_any_runner(
    model_path: str | Path, config: EngineConfig, clock: Clock, on_progress: OnProgress
) -> StepRunner:
    """Called by a worker process at its start: the runner of a model that generates text, or makes vectors.

    Raises:
        CheckpointError: the directory does not hold a model that can be served.
        ConfigError: a setting that is impossible on this machine or with this model.
    """
    path = Path(model_path)
    if (encoder := stored_encoder(path)) is not None:
        return _load_encoder(path, config, encoder, on_progress)
    if (pooling := stored_pooling(path)) is None:
        return build_runner(path, config, clock, on_progress)
    runner = build_runner(path, _config_for(path, config, pooling), clock, on_progress)
    assert isinstance(runner, Runner), "it computes on the processor"
    return PoolingRunner(runner.parts, _reported(runner.info, pooling), pooling)


def plan_model(model_path: str | Path, config: EngineConfig, clock: Clock) -> ModelInfo | None:
    """The model that `build_any_runner` would load, as `runner.plan_model` describes it.

    Raises:
        CheckpointError, ConfigError: as `build_any_runner`.
    """
    path = Path(model_path)
    if (encoder := stored_encoder(path)) is not None:
        return _encoder_info(path, config, encoder)
    if (pooling := stored_pooling(path)) is None:
        return decoders.plan_model(path, config, clock)
    info = decoders.plan_model(path, _config_for(path, config, pooling), clock)
    return None if info is None else _reported(info, pooling)


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


def _reported(info: ModelInfo, pooling: PoolingSpec) -> ModelInfo:
    """The reported pooling, in the place of the decoder's facts."""
    return replace(
        info, pooling=pooling.kind, dimensions=pooling.dimensions, capabilities=VECTOR_CAPABILITIES
    )


def _load_encoder(
    path: Path, config: EngineConfig, encoder: tuple[EncoderSpec, PoolingSpec], on_progress: OnProgress
) -> EncoderRunner:
    info, (spec, pooling) = _encoder_info(path, config, encoder), encoder
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    on_progress(LOADING_WEIGHTS, 0, 0)
    weights = load_named(path, spec.shapes(), spec.prefix, _dtype(config))
    return EncoderRunner(Encoder(spec, weights), info, pooling, step_tokens=config.step_tokens)


def _encoder_info(path: Path, config: EngineConfig, encoder: tuple[EncoderSpec, PoolingSpec]) -> ModelInfo:
    """The reported facts of an encoder. Its KV blocks are none: as many as its rows could ask for are
    counted.

    Raises:
        ConfigError: a setting that is impossible with an encoder.
    """
    spec, pooling = encoder
    on_processor(config)
    for name, is_wrong in (
        (f"engine.quantization is {config.quantization}", config.quantization != "none"),
        (f"engine.load_format is {config.load_format}", config.load_format != "safetensors"),
        ("engine.kernels is native", config.kernels == "native"),
    ):
        if is_wrong:
            raise ConfigError(f"{name}, but encoders are computed by torch, with the weights of their files")
    longest = min(spec.max_position, pooling.tokens_max or spec.max_position)
    if config.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but the model takes {longest} tokens"
        )
    max_len = config.max_model_len or longest
    max_running, dtype = resolve_max_running(config.max_running, config.step_tokens), _dtype(config)
    return ModelInfo(
        model=path.name,
        identity=identify(path, config, dtype=name_of(dtype), kernels=torch_kernels()),
        architecture=spec.architecture,
        dtype=name_of(dtype),
        num_parameters=spec.num_parameters,
        vocab_size=spec.vocab_size,
        max_model_len=max_len,
        num_blocks=max_running * -(-max_len // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_running=max_running,
        capabilities=frozenset({Capability.SCORES}) if spec.scores else VECTOR_CAPABILITIES,
        device=device_name(torch.device("cpu")),
        kernels=torch_kernels(),
        pooling="scores" if spec.scores else pooling.kind,
        vector_size=1 if spec.scores else spec.hidden_size,
        dimensions=pooling.dimensions,
        weight_bytes=spec.num_parameters * dtype.itemsize,
    )


def _dtype(config: EngineConfig) -> torch.dtype:
    """float32 unless something else is asked for: encoders are small, and their vectors are compared."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
