"""Puts a device's engine together: weights straight into its memory, buffers, the largest step, and the rest
for the KV cache.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from penstock.clock import Clock
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import EngineConfig
from penstock.engine.decoder import Decoder, DecoderLimits, WeightSource
from penstock.engine.device_speed import cost_floor, device_name, device_uuid, measured_speed
from penstock.engine.fingerprint import RANDOM_SEED, identify, name_of, torch_kernels
from penstock.engine.gpu.flashinfer_ops import flashinfer_ops
from penstock.engine.gpu.graphs import GraphLimits
from penstock.engine.gpu.layers import DeviceKernels
from penstock.engine.gpu.ops import Ops
from penstock.engine.gpu.packed import QuantizedLinears, RoundedWeights
from penstock.engine.gpu.platform import CudaPlatform, Platform
from penstock.engine.gpu.runner import DeviceParts, DeviceRunner
from penstock.engine.gpu.step import StepLimits
from penstock.engine.gpu.torch_ops import TorchOps
from penstock.engine.gpu.worklist import WorkListLimits
from penstock.engine.kv_cache import KVCache, host_store
from penstock.engine.loader import load_weights, random_weights
from penstock.engine.memory import (
    KVBudget,
    blocks_of,
    free_memory_bytes,
    largest_step,
    plan_host_blocks,
    plan_kv,
)
from penstock.engine.weight_check import ListedKernels
from penstock.errors import ConfigError
from penstock.models.quantization import Quantization
from penstock.models.registry import read_spec, stored_quantization
from penstock.models.spec import DecoderSpec
from penstock.protocol.worker import LOADING_WEIGHTS, ModelInfo
from penstock.schedule.batch import resolve_max_running
from penstock.schedule.plan import SCORED_TOKENS_MAX
from penstock.types import BLOCK_TOKENS

OnStage = Callable[[str, int, int], None]
"""Called with (stage in words, done, total)."""
_cuda = cast(Any, torch.cuda)  # Its stubs leave most types open.

KEPT_BITS = frozenset({4, 8})
"""Widths of integers that a device computes with as the checkpoint has them."""
GRAPH_TOKENS_MAX = 2048
"""Steps of more tokens than this are not captured into graphs, unless all their rows decode."""
GRAPH_MEMORY_BYTES_MAX = 1024 * 1024 * 1024
"""GPU memory set aside for graphs."""


@dataclass(slots=True, frozen=True)
class Target:
    """The target that a model is built for."""

    config: EngineSettings
    platform: Platform
    ops: Ops
    clock: Clock


def cuda_target(config: EngineSettings, clock: Clock) -> Target | None:
    """The CUDA device, if the config wants one or leaves it open and torch sees one.

    Raises:
        ConfigError: the config insists on a device that is not there, or on kernels that it does not have.
    """
    if config.device == "cpu":
        _check_cpu_attention(config)
        return None
    if not _cuda.is_available():
        if config.device == "cuda":
            raise ConfigError(
                f"engine.device is cuda, but torch sees no CUDA device (torch {torch.__version__})"
            )
        _check_cpu_attention(config)
        return None
    if config.kernels == "native":
        raise ConfigError("engine.kernels is native, but engine.device is cuda: those kernels are for CPUs")
    device = torch.device("cuda", _cuda.current_device())
    return Target(config, CudaPlatform(device), _cuda_ops(config, device), clock)


def load_on_device(model_path: Path, target: Target, on_progress: OnStage) -> DeviceRunner:
    """Load the model in `model_path` and wire a runner for it. `warm_up` is left to the caller.

    Raises:
        CheckpointError: the directory does not hold a model that can be served.
        ConfigError: a setting that is impossible on this device or with this model.
    """
    config, device = target.config, target.platform.device
    if config.kv_dtype == "int8":
        raise ConfigError(
            "engine.kv_dtype is int8, but a GPU keeps its cache in the type of the model, or in fp8"
        )
    if config.speculation != "off":
        raise ConfigError(
            f"engine.speculation is {config.speculation}, but drafts are computed on the CPU only"
        )
    spec, names = read_spec(model_path)
    dtype = device_dtype(config, device)
    target.ops.check(spec, dtype)

    def on_bytes(done: int, total: int) -> None:
        on_progress(LOADING_WEIGHTS, done, total)

    if config.load_format == "random":
        stored = None
        weights = random_weights(spec, dtype, RANDOM_SEED, on_bytes, device)
    else:
        stored = stored_quantization(model_path)
        weights = load_weights(
            model_path, spec, names, dtype, on_bytes, device, quantization=stored, kept_bits=KEPT_BITS,
            keeps_float8=target.ops.matrices.float8,
        )  # fmt: skip
    on_progress("preparing kernels", 0, 0)
    kernels = f"{torch_kernels()} {_device_name(device)} {target.ops.name}"
    identity = identify(model_path, config, dtype=name_of(dtype), kernels=kernels)
    named = Named(model_path.name, identity, stored)
    return build_on_device(named, spec, weights, target)


@dataclass(slots=True, frozen=True)
class Named:
    """A model's name and identity, and the form of its checkpoint."""

    name: str
    identity: str = ""
    stored: Quantization | None = None


def build_on_device(named: Named, spec: DecoderSpec, weights: WeightSource, target: Target) -> DeviceRunner:
    """A runner for `weights`, which it takes. Dtype and device are those of the weights.

    Raises:
        ConfigError: a setting that is impossible on this device or with this model.
    """
    builder = _Builder(named, spec, weights, target)
    return builder.runner(builder.budget(), builder.num_host_blocks())


def device_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The config's type, or bfloat16 on a GPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


class _Builder:
    """The model on its device, around which runners with caches of any size can be made."""

    @torch.inference_mode()
    def __init__(self, named: Named, spec: DecoderSpec, weights: WeightSource, target: Target) -> None:
        self._named, self._spec, self._target = named, spec, target
        measured_speed(target.platform.device)  # While there is memory for it.
        # Before weights are read: with them a thread begins to read the vocabulary into the host's memory.
        self._free_host_bytes = free_memory_bytes()
        config = target.config
        self._max_running = resolve_max_running(config.max_running, config.step_tokens)
        # The longest context that may be asked for; what the memory allows may be less.
        self._limits = self._step_limits(min(config.max_model_len or spec.max_position, spec.max_position))
        device, dtype = target.platform.device, device_dtype(config, target.platform.device)
        like = torch.empty(0, dtype=dtype, device=device)
        linears = QuantizedLinears(target.ops.matrices, like)
        self._kernels = DeviceKernels(target.ops, spec, self._limits, linears)
        if config.quantization != "none":
            weights = RoundedWeights(weights, 4 if config.quantization == "int4" else 8)
        sizes = DecoderLimits(
            step_tokens=config.step_tokens,
            max_samples=self._max_running + SCORED_TOKENS_MAX,
            max_model_len=self._limits.max_model_len,
        )
        self._listed = ListedKernels(self._kernels)
        self._decoder = Decoder(spec, weights, self._listed, sizes)
        self._dtype = self._decoder.dtype

    def budget(self) -> KVBudget:
        """How many blocks the memory allows, after everything else has had its part."""
        target = self._target
        # First the steps, so that what they set up once and for all is not counted as free.
        taken = target.platform.peak_bytes(self._run_largest_step)
        graphs = GRAPH_MEMORY_BYTES_MAX if taken and target.config.graphs_max else 0
        return plan_kv(
            target.config,
            self._spec,
            bytes_per_value=self._dtype.itemsize,
            free_bytes=max(target.platform.free_bytes() - taken - graphs, 0),
            share=target.platform.share,
        )

    @torch.inference_mode()
    def runner(self, budget: KVBudget, num_host_blocks: int = 0) -> DeviceRunner:
        """A runner with its own cache and buffers, and a host tier of that many blocks behind it."""
        target, config, spec = self._target, self._target.config, self._spec
        limits = self._step_limits(budget.max_model_len)
        device, stored = target.platform.device, self._named.stored
        float8 = config.kv_dtype == "fp8"
        cache = KVCache(spec, budget.num_blocks, self._dtype, device, float8=float8)
        info = ModelInfo(
            model=self._named.name,
            identity=self._named.identity,
            architecture=spec.architecture,
            dtype=name_of(self._dtype),
            quantization=config.quantization if stored is None else stored.name,
            num_parameters=spec.num_parameters,
            vocab_size=spec.vocab_size,
            max_model_len=budget.max_model_len,
            num_blocks=budget.num_blocks,
            block_tokens=BLOCK_TOKENS,
            max_running=self._max_running,
            num_host_blocks=num_host_blocks,
            device=device_name(device),
            device_uuid=device_uuid(device),
        )
        graphs = GraphLimits(
            max_running=self._max_running,
            tokens_max=min(GRAPH_TOKENS_MAX, config.step_tokens),
            # A router of experts asks the device how many tokens each has: that cannot be captured.
            count_max=0 if spec.moe is not None or not target.ops.captures else config.graphs_max,
            memory_bytes_max=GRAPH_MEMORY_BYTES_MAX,
        )
        floor = cost_floor(
            spec, info, device, itemsize=self._dtype.itemsize, kv_itemsize=1 if float8 else None,
            kept_bits=0 if stored is None else stored.kept(KEPT_BITS),
        )  # fmt: skip
        parts = DeviceParts(
            info=info,
            platform=target.platform,
            ops=target.ops,
            decoder=self._decoder,
            weights=lambda: [self._decoder.table, *self._listed.tensors],
            cache=cache,
            host=host_store(cache, num_host_blocks),
            attention=self._kernels.attention(cache, self._decoder.rotary),
            limits=limits,
            graphs=graphs,
            clock=target.clock,
            floor=floor,
        )
        return DeviceRunner(parts)

    def num_host_blocks(self) -> int:
        """Blocks that the host tier has memory for."""
        size = self._dtype.itemsize
        free_bytes = self._free_host_bytes
        return plan_host_blocks(self._target.config, self._spec, bytes_per_value=size, free_bytes=free_bytes)

    def _run_largest_step(self) -> None:
        """With the tables of the longest context, and a cache for this step only: it is taken for a
        margin.
        """
        plan = largest_step(self._limits, self._max_running + -(-self._limits.step_tokens // BLOCK_TOKENS))
        self.runner(KVBudget(blocks_of(plan), self._limits.max_model_len)).run(plan)

    def _step_limits(self, max_model_len: int) -> StepLimits:
        step_tokens = self._target.config.step_tokens
        work = WorkListLimits.of(
            max_running=self._max_running,
            step_tokens=step_tokens,
            group_size=self._spec.group_size,
        )
        return StepLimits(
            max_running=self._max_running, step_tokens=step_tokens, max_model_len=max_model_len, work=work
        )


def _device_name(device: torch.device) -> str:
    return str(_cuda.get_device_name(device)) if device.type == "cuda" else device.type


def _check_cpu_attention(config: EngineConfig) -> None:
    if config.attention != "auto":
        raise ConfigError(
            f"engine.attention is {config.attention}, which needs a CUDA device; this engine runs on the CPU"
        )


def _cuda_ops(config: EngineConfig, device: torch.device) -> Ops:
    """Triton's kernels, or their twins in torch if the config says so; attention by FlashInfer where that is
    asked for.
    """
    others = _own_ops(config, device)
    return flashinfer_ops(others, device) if config.attention == "flashinfer" else others


def _own_ops(config: EngineConfig, device: torch.device) -> Ops:
    if config.kernels == "torch":
        if config.attention == "triton":
            raise ConfigError("engine.attention is triton, but engine.kernels is torch")
        return TorchOps()
    try:
        module = importlib.import_module("penstock.engine.gpu.triton_ops")
    except ImportError as error:
        raise ConfigError(f"engine.device is cuda, but its kernels need triton: {error}") from error
    return cast(Ops, module.TritonOps(device))
