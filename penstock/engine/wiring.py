"""Which code computes the decoder: the native kernels where they can, else torch. Chosen once, here.

NativeDecoder + NativeAttention     one call per step, any SIMD level from AVX2 up
Decoder + CpuAttention              torch alone, any machine; the twin that the other is tested against
"""

import logging
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.config.tree import EngineConfig
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.models.decoder import Decoder, DecoderLimits, WeightSource
from penstock.engine.models.spec import DecoderSpec
from penstock.engine.native.decoder import NativeAttention, NativeDecoder, unsupported
from penstock.engine.native.library import Kernels as NativeKernels
from penstock.engine.native.library import KernelsUnavailable
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)


class StepModel(Protocol):
    """A decoder with its attention: what the runner computes steps with."""

    kernels: str
    """What computes, for people: "torch", or "native" and the instruction set."""

    def compute(self, token_ids: Tensor, samples: Tensor, batch: AttentionBatch) -> Tensor:
        """One step: `[num_tokens]` ids and `[num_samples]` indices (int64) to `[num_samples, vocab_size]` float32.

        The logits are valid until the next call.
        """
        ...


class _Begins(Protocol):
    def begin(self, batch: AttentionBatch) -> None: ...


A = TypeVar("A", bound=_Begins)
A_contra = TypeVar("A_contra", contravariant=True)


class _Decodes(Protocol[A_contra]):
    def forward(self, token_ids: Tensor, samples: Tensor, attention: A_contra) -> Tensor: ...


class _Pair(Generic[A]):
    """A decoder and the attention that it understands."""

    def __init__(self, kernels: str, decoder: _Decodes[A], attention: A) -> None:
        self.kernels = kernels
        self._decoder, self._attention = decoder, attention

    def compute(self, token_ids: Tensor, samples: Tensor, batch: AttentionBatch) -> Tensor:
        """See `StepModel`."""
        self._attention.begin(batch)
        return self._decoder.forward(token_ids, samples, self._attention)


def native_kernels(config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype) -> NativeKernels | None:
    """The native kernels, if the config wants them and they can compute this model here.

    Raises:
        ConfigError: the config insists on them, and they cannot.
    """
    if config.kernels == "torch":
        return None
    try:
        kernels = NativeKernels()
        reason = unsupported(spec, dtype, kernels, "native")
        if reason is None:
            return kernels
    except KernelsUnavailable as error:
        reason = str(error)
    if config.kernels == "native":
        raise ConfigError(f"engine.kernels is native, but {reason}")
    _log.info("computing with torch, which is slower than the native kernels: %s", reason)
    return None


def wire_model(
    spec: DecoderSpec,
    weights: WeightSource,
    limits: DecoderLimits,
    cache: KVCache,
    native: NativeKernels | None,
) -> StepModel:
    """Build the decoder for `cache` on the native kernels, or on torch without them. Takes the weights."""
    if native is not None:
        decoder = NativeDecoder(spec, weights, native, limits, cache)
        return _Pair(f"native {native.isa}", decoder, NativeAttention())
    kernels = TorchKernels(spec, max_tokens=limits.step_tokens, device=cache.tensor.device)
    torch_decoder = Decoder(spec, weights, kernels, limits)
    return _Pair("torch", torch_decoder, kernels.attention(cache, torch_decoder.rotary))
