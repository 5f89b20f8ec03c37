"""Which implementation computes what: chosen once, where the engine is wired.

A device or a native library brings another `Kernels`; the decoder does not know which one it runs on.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.attention.base import Attention
from penstock.engine.attention.cpu import CpuAttention
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Calls, Linear, torch_linear, torch_linears
from penstock.engine.layers.mlp import GeluTanhMul, SiluMul
from penstock.engine.layers.rowwise import RMSNorm, RotaryWeights
from penstock.engine.quantized import Kept
from penstock.models.spec import DecoderSpec


class Norm(Protocol):
    """RMSNorm with its weight inside."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised rows of `x` `[num_tokens, hidden]` to `out`, which may be `x`."""
        ...

    def add(self, residual: Tensor, x: Tensor, out: Tensor) -> None:
        """`residual += x`, then write the normalised `residual` to `out`; all `[num_tokens, hidden]`."""
        ...


class Activation(Protocol):
    """The gate of the feed-forward layer."""

    def __call__(self, gate_up: Tensor, out: Tensor) -> None:
        """From `[num_tokens, 2 * size]` to `[num_tokens, size]`."""
        ...


class Kernels(Protocol):
    """Makes the objects that compute, each with its weights and scratch inside."""

    def linear(self, weight: Tensor | Kept, bias: Tensor | None, *, rows_max: int) -> Linear:
        """`weight` is `[out, in]`, `bias` `[out]`; both may be kept or repacked.

        Weights come as the checkpoint has them only where `load_weights` was told to keep them.
        """
        ...

    def linears(self, weight: Tensor, *, count: int, rows_max: int) -> Sequence[Linear]:
        """`count` weights (experts) stacked along the first dimension; they may share scratch."""
        ...

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """`weight` is `[size]`."""
        ...

    def activation(self) -> Activation:
        """The gate that the model has, with its inner size."""
        ...

    def attention(self, cache: KVCache, rotary: RotaryWeights) -> Attention:
        """Attention over `cache` for all layers, with the model's rotation, head norms and
        `AttentionSpec`.
        """
        ...


class TorchKernels:
    """Everything in torch on the CPU; shares scratch between layers, since they run one after another."""

    def __init__(
        self, spec: DecoderSpec, *, max_tokens: int, device: torch.device, products: torch.dtype
    ) -> None:
        """`products`: the type that matrices are multiplied in, the model's or a wider one."""
        self._max_tokens = max_tokens
        self._attention = spec.attention
        self._calls = Calls(products)
        gate = {"silu": SiluMul, "gelu_tanh": GeluTanhMul}[spec.activation]
        self._activation = gate(spec.intermediate_size, max_tokens, device)

    def linear(self, weight: Tensor | Kept, bias: Tensor | None, *, rows_max: int) -> Linear:
        """See `Kernels`."""
        assert isinstance(weight, Tensor), "torch on the CPU has no products of quantized weights"
        return torch_linear(weight, bias, rows_max=rows_max, calls=self._calls)

    def linears(self, weight: Tensor, *, count: int, rows_max: int) -> Sequence[Linear]:
        """See `Kernels`."""
        return torch_linears(weight, None, count=count, rows_max=rows_max, calls=self._calls)

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """See `Kernels`."""
        return RMSNorm(weight, eps)

    def activation(self) -> Activation:
        """See `Kernels`."""
        return self._activation

    def attention(self, cache: KVCache, rotary: RotaryWeights) -> CpuAttention:
        """See `Kernels`."""
        return CpuAttention(cache, rotary, self._attention, max_tokens=self._max_tokens)
