"""The name of a worker's device, and how fast it moves bytes and multiplies: measured once, when the
model is loaded.

A few milliseconds each, the best of a few tries: other work on the machine only makes a device look slower,
and so what is measured against it look better than it is.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from penstock.clock import NS_PER_S, Clock, SystemClock
from penstock.models.spec import DecoderSpec
from penstock.planning.roofline import Accelerator, CostFloor, ModelShape, Placed
from penstock.protocol.worker import ModelInfo

_CPU_BYTES, _CPU_SIZE = 32 * 1024 * 1024, 256
"""More than a processor keeps in its caches, and a product that it computes in less than a millisecond."""
_GPU_BYTES, _GPU_SIZE = 256 * 1024 * 1024, 4096
_cuda = cast(Any, torch.cuda)  # Its stubs leave most types open.


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return str(_cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def device_uuid(device: torch.device) -> str:
    """Of a GPU, as its driver writes it; of anything else empty."""
    return f"GPU-{_cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def cost_floor(
    spec: DecoderSpec,
    info: ModelInfo,
    device: torch.device,
    *,
    itemsize: int,
    kept_bits: int = 0,
    rounded_kv: bool = False,
    kv_itemsize: int | None = None,
) -> CostFloor:
    """The floor of a model's cost on this device. `itemsize` is that of its activations and KV cache,
    unless that is rounded to int8 or has a `kv_itemsize` of its own; `kept_bits` the width of weights that
    are computed with as the checkpoint has them; 0: they are not.
    """
    dtype = "fp32" if itemsize == 4 else "bf16"
    weights = f"int{kept_bits}" if kept_bits else info.quantization
    weights = weights if weights in ("int8", "int4") else dtype
    bandwidth, rate = measured_speed(device)
    speed = Accelerator(
        name=info.device,
        memory_bytes=0,
        bandwidth=bandwidth,
        # Data sheets give twice the rate for half the bits.
        peak={dtype: rate, "int8": 2 * rate},
        link=1.0,
        price_per_hour=0.0,
        source="measured",
        overhead_ns=0,
    )
    token_bytes = spec.kv_bytes_per_token(kv_itemsize or itemsize, rounded=rounded_kv)
    kv_bytes = token_bytes / (2 * spec.num_layers * spec.kv_size)
    placed = Placed(model=_shape(spec), device=speed, dtype=weights, kv_bytes=kv_bytes)
    kv_tokens = max(1, info.num_blocks * info.block_tokens)
    return CostFloor(placed, rows=info.max_running, kv_tokens=kv_tokens)


@cache
def measured_speed(device: torch.device) -> tuple[float, float]:
    """Bytes that it reads per second, and operations per second of a product of matrices. Call it before a
    GPU's memory is full.
    """
    clock = SystemClock()
    speed = _bandwidth(device, clock), _rate(device, clock)
    if device.type == "cuda":
        _cuda.empty_cache()
    return speed


def _shape(spec: DecoderSpec) -> ModelShape:
    experts = spec.moe
    return ModelShape(
        name=spec.architecture,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        num_experts=experts.num_experts if experts is not None else 0,
        top_k=experts.top_k if experts is not None else 0,
        tied_head=spec.tied_head or spec.embeds,
    )


def _bandwidth(device: torch.device, clock: Clock) -> float:
    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size * NS_PER_S / _best_ns(data.sum, device, clock, tries=3)


def _rate(device: torch.device, clock: Clock) -> float:
    """In the type in which products are fast there: many processors only emulate bfloat16."""
    is_gpu = device.type == "cuda"
    size, dtype = (_GPU_SIZE, torch.bfloat16) if is_gpu else (_CPU_SIZE, torch.float32)
    one = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 * NS_PER_S / _best_ns(lambda: one @ one, device, clock, tries=8)


def _best_ns(work: Callable[[], object], device: torch.device, clock: Clock, *, tries: int) -> int:
    best = 0
    for _ in range(tries):  # The first sets up.
        started_ns = clock.now_ns()
        work()
        if device.type == "cuda":
            _cuda.synchronize(device)
        took_ns = max(1, clock.now_ns() - started_ns)
        best = min(best or took_ns, took_ns)
    return best
