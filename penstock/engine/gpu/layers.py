"""`Kernels` and `Attention` for a device: matrix products by torch (cuBLAS on a GPU), everything else by
`Ops`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.gpu.ops import AttentionLayer, HeadRotation, Ops, Partials
from penstock.engine.gpu.packed import QuantizedLinears
from penstock.engine.gpu.step import DeviceStep, DeviceStepInputs, RowState, StepBuffer, StepLimits
from penstock.engine.gpu.worklist import WorkList
from penstock.engine.kernels import Activation
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.rowwise import RotaryWeights
from penstock.engine.quantized import Kept
from penstock.models.spec import AttentionSpec, DecoderSpec
from penstock.types import BLOCK_TOKENS


class DeviceAttention:
    """See `Attention`. Two ways to begin a step:

    - `use(step)` takes the runner's own device buffers, already filled and prepared: nothing is copied, and a
      graph captured after it reads whatever the buffers hold when it is replayed;
    - `begin(batch)`, the contract's, fills buffers of its own: for callers that compute steps without row
      tables on the device (tests, and the plain runner).

    The promise of `Attention` is kept in a weaker form: a token's bits do not depend on the other rows, but a
    token that is computed in a chunk may differ in rounding from the same token computed alone, since matrix
    units sum tiles of other shapes in other orders.
    """

    def __init__(
        self,
        ops: Ops,
        cache: KVCache,
        rotary: RotaryWeights,
        spec: AttentionSpec,
        limits: StepLimits,
    ) -> None:
        self._ops, self._cache, self._limits = ops, cache, limits
        scale = cache.head_dim**-0.5 if spec.scale is None else spec.scale
        layers = range(cache.num_layers)
        self._layers = [AttentionLayer(i, scale, spec.softcap, spec.window(i)) for i in layers]
        self._rotations = [
            HeadRotation(
                rotary.tables[i], rotary.head_norms[i] if rotary.head_norms else None, rotary.norm_eps
            )
            for i in layers
        ]
        device, heads = cache.tensor.device, (limits.work.partials_max, rotary.num_heads)
        self._partials = Partials(
            torch.zeros(*heads, cache.head_dim, device=device), torch.zeros(*heads, device=device)
        )
        self._own: _OwnStep | None = None
        self._step: DeviceStep | None = None

    @property
    def slots_per_block(self) -> int:
        """The factor by which `Ops.prepare` multiplies block ids."""
        return self._cache.pages_per_block * BLOCK_TOKENS

    def use(self, step: DeviceStep) -> None:
        """Attend with these buffers from now on; valid until the next `use` or `begin`."""
        self._step = step

    def begin(self, batch: AttentionBatch) -> None:
        """See `Attention`."""
        if self._own is None:
            self._own = _OwnStep(self._limits, self._cache.tensor.device)
        self._step = self._own.fill(batch, self._limits)
        self._own.plan(self._ops, batch)
        self._ops.prepare(self._step, self.slots_per_block)

    def store(self, layer: int, qkv: Tensor, q: Tensor) -> None:
        """See `Attention`."""
        assert self._step is not None, "begin a step first"
        self._ops.rotate_store(qkv, q, self._cache, layer, self._step, self._rotations[layer])

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """See `Attention`."""
        assert self._step is not None, "begin a step first"
        self._ops.attend(q, out, self._cache, self._step, self._layers[layer], self._partials)


class _OwnStep:
    """Buffers for steps that come as host arrays: a row of the step is that row of the tables."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._host = StepBuffer(limits, torch.device("cpu"))
        self._device = StepBuffer(limits, device)
        self._state = RowState.allocate(limits, device)
        self._inputs = DeviceStepInputs.allocate(limits, device)

    def plan(self, ops: Ops, batch: AttentionBatch) -> None:
        """Report to the planner on the host."""
        rows = np.arange(len(batch.num_tokens), dtype=np.int32)
        ops.plan(rows, batch.num_computed, batch.num_tokens, self._state)

    def fill(self, batch: AttentionBatch, limits: StepLimits) -> DeviceStep:
        """Describe the batch on the device."""
        count, width = batch.block_tables.shape
        rows = np.arange(count, dtype=np.int32)
        self._state.block_tables[:count, :width] = torch.as_tensor(batch.block_tables)
        work = WorkList.of(rows, batch.num_computed, batch.num_tokens, limits.work)
        self._host.fill(rows, batch.num_computed, batch.num_tokens, rows[:0], work)
        self._device.flat.copy_(self._host.flat)
        decode_only = bool((batch.num_tokens == 1).all())
        return DeviceStep(
            self._device, self._state, self._inputs.head(int(batch.num_tokens.sum()), 0), decode_only
        )


class DeviceLinear:
    """A dense weight, multiplied by whatever library torch brings for the device.

    Rows may depend on how many there are: the library picks its kernel by shape.
    """

    __slots__ = ("_bias", "_transposed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed, self._bias = weight.t(), bias

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it computes with: the weight, and the bias."""
        return (self._transposed,) if self._bias is None else (self._transposed, self._bias)

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

    def __init__(
        self,
        ops: Ops,
        spec: DecoderSpec,
        limits: StepLimits,
        quantized: QuantizedLinears | None = None,
    ) -> None:
        """`quantized` makes the layers of weights that are not dense."""
        self._ops, self._spec, self._limits, self._quantized = ops, spec, limits, quantized

    def linear(self, weight: Tensor | Kept, bias: Tensor | None, *, rows_max: int) -> Linear:
        """See `Kernels`."""
        if isinstance(weight, Tensor):
            return DeviceLinear(weight, bias)
        assert self._quantized is not None, "whoever keeps weights can compute with them"
        made = self._quantized.linear(weight, bias, rows_max=rows_max)
        return DeviceLinear(self._quantized.dense(weight), bias) if made is None else made

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
