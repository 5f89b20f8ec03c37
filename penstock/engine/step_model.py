"""A decoder with its attention, as the runner computes steps with it: on the native kernels, or on torch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from penstock.engine.adapters.compute import AdaptedLinear, AdapterRows
from penstock.engine.adapters.files import Packed
from penstock.engine.arrays import Int32Array
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.computing import Computing
from penstock.engine.decoder import Decoder, DecoderLimits, WeightSource
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.native.decoder import NativeAttention, NativeDecoder
from penstock.engine.native.library import PsDraft
from penstock.engine.weight_check import ListedKernels
from penstock.models.adapters import FUSED
from penstock.models.spec import DecoderSpec


class StepModel(Protocol):
    """A decoder with its attention: what the runner computes steps with."""

    kernels: str
    """What computes, for people: "torch", or "native" and the instruction set."""

    weights: Callable[[], list[Tensor]]
    """What it computes with, as it lies in memory."""

    draft: Callable[[PsDraft], None] | None
    """Runs several steps in one native call, each with what the one before has drawn; None: it cannot."""

    def compute(
        self,
        token_ids: Tensor,
        samples: Tensor,
        batch: AttentionBatch,
        adapters: Sequence[Packed | None] | None = None,
    ) -> Tensor:
        """One step: `[num_tokens]` ids and `[num_samples]` indices (int64) to `[num_samples, vocab_size]`
        float32; `adapters` has each row's, and is None where none has one.

        The logits are valid until the next call.
        """
        ...

    def rehearsing(self) -> AbstractContextManager[None]:
        """While this is open, steps ask for all the memory that they would, but what they compute may be
        nonsense.
        """
        ...


class _Begins(Protocol):
    def begin(self, batch: AttentionBatch) -> None: ...


_Adapt = Callable[[Sequence[Packed | None] | None, Int32Array], None]
"""(each row's adapter, each row's tokens)."""
A = TypeVar("A", bound=_Begins)
A_contra = TypeVar("A_contra", contravariant=True)


class _Decodes(Protocol[A_contra]):
    def forward(self, token_ids: Tensor, samples: Tensor, attention: A_contra) -> Tensor: ...


class _Pair(Generic[A]):
    """A decoder and the attention that it understands."""

    def __init__(
        self,
        kernels: str,
        decoder: _Decodes[A],
        attention: A,
        rehearsing: Callable[[], AbstractContextManager[None]] = nullcontext,
        weights: Callable[[], list[Tensor]] = list,
        adapt: _Adapt | None = None,
        draft: Callable[[PsDraft], None] | None = None,
    ) -> None:
        """`adapt` tells the decoder which adapter each row of the coming step has."""
        self.kernels, self.weights, self.draft = kernels, weights, draft
        self._adapt, self._is_adapted = adapt, False
        self._decoder, self._attention = decoder, attention
        self._rehearsing = rehearsing

    def compute(
        self,
        token_ids: Tensor,
        samples: Tensor,
        batch: AttentionBatch,
        adapters: Sequence[Packed | None] | None = None,
    ) -> Tensor:
        """See `StepModel`."""
        if adapters is not None or self._is_adapted:
            assert self._adapt is not None, "only a model that takes adapters is given some"
            self._adapt(adapters, batch.num_tokens)
            self._is_adapted = adapters is not None
        self._attention.begin(batch)
        return self._decoder.forward(token_ids, samples, self._attention)

    def rehearsing(self) -> AbstractContextManager[None]:
        """See `StepModel`."""
        return self._rehearsing()


def wire_model(
    spec: DecoderSpec,
    weights: WeightSource,
    limits: DecoderLimits,
    cache: KVCache,
    computing: Computing,
    *,
    takes_adapters: bool = False,
) -> StepModel:
    """Build the decoder for `cache` on the native kernels, or on torch without them. Takes the weights."""
    native = computing.native
    if native is not None:
        decoder, rows = (
            NativeDecoder(spec, weights, native, limits, cache, computing.precision),
            NativeAttention(),
        )
        return _Pair(
            computing.kernels, decoder, rows, decoder.rehearsing, decoder.weights, rows.adapt, decoder.draft
        )
    kernels = TorchKernels(spec, max_tokens=limits.step_tokens, device=cache.tensor.device)
    listed = ListedKernels(kernels)
    adapted = AdapterRows() if takes_adapters else None
    adapt = None if adapted is None else partial(_adaptable, adapted)
    torch_decoder = Decoder(spec, weights, listed, limits, adapt)
    attention = kernels.attention(cache, torch_decoder.rotary)
    rehearsing = partial(
        attention.rehearsing, max_rows=limits.max_samples, max_model_len=limits.max_model_len
    )
    return _Pair(
        "torch",
        torch_decoder,
        attention,
        rehearsing,
        lambda: [torch_decoder.table, *listed.tensors],
        None if adapted is None else adapted.begin,
    )


def _adaptable(rows: AdapterRows, base: Linear, layer: int, key: str) -> Linear:
    return AdaptedLinear(base, rows, layer, key) if key in FUSED else base
