"""`Kernels` for a device: matrix products by torch (cuBLAS on a GPU), everything else by `Ops`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.gpu.attention import DeviceAttention
from penstock.engine.gpu.ops import Ops
from penstock.engine.gpu.step import StepLimits
from penstock.engine.kernels import Activation
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.rotary import RotaryWeights
from penstock.models.spec import DecoderSpec


class DeviceLinear:
    """A dense weight, multiplied by whatever library torch brings for the device.

    Rows may depend on how many there are: the library picks its kernel by shape.
    """

    __slots__ = ("_bias", "_transposed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed, self._bias = weight.t(), bias

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Linear`."""
        if self._bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self._bias, x, self._transposed, out=out)


class DeviceNorm:
    """See `Norm`."""

    __slots__ = ("_eps", "_ops", "_weight")

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops, self._weight, self._eps = ops, weight, eps

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Norm`."""
        self._ops.norm(x, self._weight, self._eps, out)

    def add(self, residual: Tensor, x: Tensor, out: Tensor) -> None:
        """See `Norm`."""
        self._ops.add_norm(residual, x, self._weight, self._eps, out)


class DeviceKernels:
    """See `Kernels`."""

    def __init__(self, ops: Ops, spec: DecoderSpec, limits: StepLimits) -> None:
        self._ops, self._spec, self._limits = ops, spec, limits

    def linear(self, weight: Tensor, bias: Tensor | None, *, rows_max: int) -> Linear:
        """See `Kernels`."""
        return DeviceLinear(weight, bias)

    def linears(self, weight: Tensor, *, count: int, rows_max: int) -> Sequence[Linear]:
        """See `Kernels`."""
        return [DeviceLinear(part, None) for part in weight.chunk(count)]

    def norm(self, weight: Tensor, eps: float) -> DeviceNorm:
        """See `Kernels`."""
        return DeviceNorm(self._ops, weight, eps)

    def activation(self) -> Activation:
        """See `Kernels`."""
        return self._ops.silu_mul if self._spec.activation == "silu" else self._ops.gelu_tanh_mul

    def attention(self, cache: KVCache, rotary: RotaryWeights) -> DeviceAttention:
        """See `Kernels`."""
        return DeviceAttention(self._ops, cache, rotary, self._spec.attention, self._limits)
