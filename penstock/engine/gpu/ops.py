"""The operations that a step on a GPU is made of, besides matrix products: one contract, three
implementations.

`TritonOps` launches the kernels. `TorchOps` is its twin: the same arguments, any device, plain torch. Both do
what a captured graph allows: fixed shapes, no answer to the host, results written where the caller says.
`FlashInferOps` attends with FlashInfer's kernels, which plan each step on the host, and leaves the rest to
one of those. Arithmetic is float32 inside, and one rounding to the output's type at the end.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.gpu.packed import MatrixOps
from penstock.engine.gpu.step import DeviceStep, Drawn, Int32Array, RowState
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import RotaryTable
from penstock.models.spec import DecoderSpec


@dataclass(slots=True, frozen=True)
class HeadRotation:
    """The rotation of a layer's query and key heads before attention."""

    table: RotaryTable
    norms: tuple[Tensor, Tensor] | None
    """`[head_dim]` weights for query and key heads, or none."""
    eps: float


@dataclass(slots=True, frozen=True)
class AttentionLayer:
    """How one layer attends."""

    layer: int
    scale: float
    softcap: float
    """0: none."""
    window: int
    """Positions that a query sees, its own included; 0: all."""


@dataclass(slots=True, frozen=True)
class Partials:
    """Scratch for pieces of contexts, shared by all layers."""

    outputs: Tensor
    """`[partials_max, num_heads, head_dim]` float32."""
    logsumexps: Tensor
    """`[partials_max, num_heads]` float32, to base 2; -inf: nothing was seen."""


class Ops(Protocol):
    """See the module. `num_tokens` and `num_samples` are the step's or graph's, padding included."""

    name: str
    captures: bool
    """Whether steps may be captured into graphs: what is launched depends on nothing but sizes."""
    matrices: MatrixOps
    """Products with quantized weights."""

    def check(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """Refuse a model that cannot be computed.

        Raises:
            ConfigError: there is no kernel for it.
        """
        ...

    def plan(self, rows: Int32Array, computed: Int32Array, num_tokens: Int32Array, state: RowState) -> None:
        """Hear from the host of the step that is launched next: all `[num_rows]`, as in `StepBuffer`.

        For what is planned there; kernels that read the step's description in device memory have no use for
        it.
        """
        ...

    def prepare(self, step: DeviceStep, slots_per_block: int) -> None:
        """Fill `step.inputs` from the buffer and the row tables."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """RMSNorm of the rows of `x` to `out`, which may be `x`; all `[num_tokens, size]`."""
        ...

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """`residual += x`, rounded to its type, then RMSNorm of that to `out`, which may be `x`."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """`silu(gate) * up`: `[num_tokens, 2 * size]` to `[num_tokens, size]`."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """`gelu(gate) * up`, tanh approximation: `[num_tokens, 2 * size]` to `[num_tokens, size]`."""
        ...

    def rotate_store(
        self, qkv: Tensor, q: Tensor, cache: KVCache, layer: int, step: DeviceStep, rotation: HeadRotation
    ) -> None:
        """Norm and rotate heads; queries go to `q`, keys and values to the tokens' slots.

        Args:
            qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, contiguous.
            q: `[num_tokens, num_heads, head_dim]`, contiguous.
            cache: written at `step.inputs.slots`; padding writes nothing.
            layer: from 0.
            step: positions and slots.
            rotation: the layer's angles and norms.
        """
        ...

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        cache: KVCache,
        step: DeviceStep,
        how: AttentionLayer,
        partials: Partials,
    ) -> None:
        """Causal grouped-query attention over the cache; `q`, `out`: `[num_tokens, num_heads, head_dim]`.

        Values written for padding mean nothing.
        """
        ...

    def sample(self, logits: Tensor, step: DeviceStep, drawn: Drawn) -> None:
        """Draw every sample's token from `[num_samples, vocab_size]` float32 logits, and append it to its
        row.

        The draws are those of `engine/sampler.py`: the same hash of (seed, position, token id), filters and
        ties. The token is written to `drawn` and to `step.state.token_ids`, where the next `prepare` finds
        it.
        """
        ...
