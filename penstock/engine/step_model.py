"""A decoder with its attention, as the runner computes steps with it; and which code that is, and in which
precision: the native kernels where they can, else torch. Chosen once, here.

    NativeDecoder + NativeAttention     one call per step, any SIMD level from AVX2 up
    Decoder + CpuAttention              torch alone, any machine; the twin that the other is tested against
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.config.tree import EngineConfig
from penstock.engine.adapters.compute import AdaptedLinear, AdapterRows
from penstock.engine.adapters.files import Packed
from penstock.engine.arrays import Int32Array
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import Decoder, DecoderLimits, WeightSource
from penstock.engine.fingerprint import torch_kernels
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.native.decoder import NativeAttention, NativeDecoder, Precision, unsupported
from penstock.engine.native.library import KernelsUnavailable, NativeLibrary, PsDraft, Type
from penstock.engine.quantized import KEPT_GROUPS
from penstock.engine.weight_check import ListedKernels
from penstock.errors import ConfigError
from penstock.models.adapters import FUSED
from penstock.models.spec import DecoderSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Computing:
    """The code that computes a model, and the precision."""

    native: NativeLibrary | None
    """None: torch."""
    dtype: torch.dtype
    """Of activations and the KV cache, and of weights that are not quantized."""
    precision: Precision = "native"
    """Of the weights."""

    @property
    def products(self) -> torch.dtype:
        """The type in which torch multiplies: wider than `dtype` where the processor has no instruction for
        that.
        """
        return self.dtype if self.native is not None or _multiplies_bfloat16() else torch.float32

    @property
    def kept_bits(self) -> frozenset[int]:
        """Widths of a checkpoint's own integers that are computed with; others are made dense."""
        if self.native is None or self.precision != "native":
            return frozenset()
        widths = ((4, Type.I4), (8, Type.I8))
        return frozenset(bits for bits, kind in widths if self.native.supports(kind))

    @property
    def kernels(self) -> str:
        """Names them, and what their bits depend on."""
        return torch_kernels() if self.native is None else f"native {self.native.isa}"


def choose_computing(config: EngineConfig, spec: DecoderSpec) -> Computing:
    """The native kernels if the config wants them and they can compute this model here, else torch.

    Raises:
        ConfigError: the config insists on what cannot be done here, by the setting's name.
    """
    if config.kv_dtype == "fp8":
        raise ConfigError("engine.kv_dtype is fp8, which needs a CUDA device; this engine runs on the CPU")
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    precision: Precision = "native" if config.quantization == "none" else config.quantization
    native, reason = _native_kernels(config, spec, dtype, precision)
    if native is not None:
        return Computing(native, dtype, precision)
    for setting, insists in (
        (f"engine.kernels is {config.kernels}", config.kernels == "native"),
        (f"engine.quantization is {config.quantization}", config.quantization != "none"),
    ):
        if insists:
            raise ConfigError(f"{setting}, but {reason}")
    if config.kernels == "auto":
        _log.info("computing with torch, which is slower than the native kernels: %s", reason)
    by_default = torch.bfloat16 if _multiplies_bfloat16() else torch.float32
    return Computing(None, by_default if config.dtype == "auto" else dtype)


def _native_kernels(
    config: EngineConfig, spec: DecoderSpec, dtype: torch.dtype, precision: Precision
) -> tuple[NativeLibrary | None, str]:
    """The kernels, or why there are none."""
    if config.kernels == "torch":
        return None, "engine.kernels is torch, which computes with whole weights only"
    try:
        kernels = NativeLibrary()
    except KernelsUnavailable as error:
        return None, str(error)
    reason = unsupported(spec, dtype, kernels, precision)
    return (kernels, "") if reason is None else (None, reason)


def _multiplies_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 by the processor's own instructions: elsewhere it does so many times
    slower than float32.
    """
    capabilities = torch.cpu.get_capabilities()
    there = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
    # As much of the processor as torch was told to use.
    return bool(there) and torch.backends.cpu.get_cpu_capability() == "AVX512"


class StepModel(Protocol):
    """A decoder with its attention: what the runner computes steps with."""

    kernels: str
    """The name of the kernels, for people: "torch", or "native" and the instruction set."""

    weights: Callable[[], list[Tensor]]
    """The weights that it computes with, as they lie in memory."""

    draft: Callable[[PsDraft], None] | None
    """Runs several steps in one native call, each with what the one before has drawn; None: it cannot."""

    head: Callable[[Tensor, Tensor], None]
    """Writes logits `[num_rows, vocab_size]` (float32) of states `[num_rows, hidden_size]`, of as many rows
    as a step samples at most. Without a soft cap."""

    def compute(
        self,
        token_ids: Tensor,
        samples: Tensor,
        batch: AttentionBatch,
        adapters: Sequence[Packed | None] | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """One step: `[num_tokens]` ids and `[num_samples]` indices (int64) to `[num_samples, vocab_size]`
        float32; `adapters` has each row's, and is None where none has one; `states`: see `Decoder.forward`.

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
    def forward(
        self, token_ids: Tensor, samples: Tensor, attention: A_contra, states: Tensor | None = None
    ) -> Tensor: ...

    def head(self, states: Tensor, out: Tensor) -> None: ...


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
        self.kernels, self.weights, self.draft, self.head = kernels, weights, draft, decoder.head
        self._adapt, self._is_adapted = adapt, False
        self._decoder, self._attention = decoder, attention
        self._rehearsing = rehearsing

    def compute(
        self,
        token_ids: Tensor,
        samples: Tensor,
        batch: AttentionBatch,
        adapters: Sequence[Packed | None] | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """See `StepModel`."""
        if adapters is not None or self._is_adapted:
            assert self._adapt is not None, "only a model that takes adapters is given some"
            self._adapt(adapters, batch.num_tokens)
            self._is_adapted = adapters is not None
        self._attention.begin(batch)
        return self._decoder.forward(token_ids, samples, self._attention, states)

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
    on_copies: Callable[[], None] | None = None,
) -> StepModel:
    """Build the decoder for `cache` on the native kernels, or on torch without them. Takes the weights.

    The native kernels call `on_copies` when weights that were taken are about to be read.
    """
    native = computing.native
    if native is not None:
        decoder, rows = (
            NativeDecoder(spec, weights, native, limits, cache, computing.precision, on_copies),
            NativeAttention(),
        )
        return _Pair(
            computing.kernels, decoder, rows, decoder.rehearsing, decoder.weights, rows.adapt, decoder.draft
        )
    kernels = TorchKernels(
        spec, max_tokens=limits.step_tokens, device=cache.tensor.device, products=computing.products
    )
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


def reserved_bytes(spec: DecoderSpec, num_bytes: int, computing: Computing, limits: DecoderLimits) -> int:
    """Memory of a decoder whose weights are read as so many bytes."""
    native, size = computing.native, computing.dtype.itemsize
    num_bytes += _beside_bytes(spec, limits, itemsize=size, native=native is not None)
    if native is None:
        return num_bytes + _widened_bytes(spec, computing.products.itemsize - size)
    if computing.precision == "native":
        return num_bytes
    bits, int8_head = 8 if computing.precision == "int8" else 4, native.supports(Type.I8)
    return _rounded_bytes(spec, num_bytes, itemsize=size, bits=bits, int8_head=int8_head)


# --- the memory that a decoder takes, before a weight of it is read: shapes and widths, no device -------


def _beside_bytes(spec: DecoderSpec, limits: DecoderLimits, *, itemsize: int, native: bool) -> int:
    """A decoder's memory beside its weights as they are read: tables of the rotation, a step's logits, and
    what the native kernels widen to float32.
    """
    max_len, logits = limits.max_model_len, limits.max_samples * spec.output_size * 4
    kinds = len({spec.layer_rope(layer) for layer in range(spec.num_layers)})
    rotation = kinds * max_len * spec.head_dim * (4 if native else 8)
    if not native:  # A head that is the table too is kept a second time in another order.
        logits += limits.max_samples * spec.output_size * itemsize
        tied = spec.tied_head and not spec.embeds
        return rotation + logits + tied * spec.vocab_size * spec.hidden_size * itemsize
    outputs = (spec.q_size + 2 * spec.kv_size) * spec.qkv_bias + spec.hidden_size * spec.o_bias
    outputs += (2 * spec.intermediate_size + spec.hidden_size) * spec.mlp_bias
    norms = spec.hidden_size * (4 if spec.sublayer_norms else 2) + 2 * spec.head_dim * spec.qk_norm
    widened = spec.num_layers * (outputs + norms) + spec.hidden_size
    return rotation + logits + widened * (4 - itemsize)


def layer_shapes(spec: DecoderSpec) -> list[tuple[int, int]]:
    """Of a layer's matrices, outputs first; a router is as good as nothing."""
    inner, experts = spec.intermediate_size, 1 if spec.moe is None else spec.moe.num_experts
    shapes = [(spec.q_size + 2 * spec.kv_size, spec.hidden_size), (spec.hidden_size, spec.q_size)]
    return shapes + [(2 * inner, spec.hidden_size), (spec.hidden_size, inner)] * experts


def _widened_bytes(spec: DecoderSpec, more: int) -> int:
    """Bytes that the matrices take more in a type with so many more bytes per number."""
    layer = sum(n * k for n, k in layer_shapes(spec))
    head = 0 if spec.embeds else spec.vocab_size * spec.hidden_size
    return more * (spec.num_layers * layer + head)


def _rounded_bytes(spec: DecoderSpec, num_bytes: int, *, itemsize: int, bits: int, int8_head: bool) -> int:
    """Memory of dense weights that take `num_bytes`, when they are rounded while they are loaded.

    Args:
        spec: of the model.
        num_bytes: of all weights as they are read.
        itemsize: bytes of a weight as it is read.
        bits: 8 or 4, of the layers' weights.
        int8_head: the head is rounded to eight bits; the table that tokens are looked up in never is.
    """
    for n, k in layer_shapes(spec):
        group = next((group for group in KEPT_GROUPS if k % group == 0), KEPT_GROUPS[-1])
        kept = n * k + 8 * n if bits == 8 else n * k // 2 + 4 * n * -(-k // group)
        num_bytes += spec.num_layers * (kept - n * k * itemsize)
    if int8_head and not spec.embeds:
        table = spec.vocab_size * spec.hidden_size
        num_bytes += table + 8 * spec.vocab_size - (0 if spec.tied_head else table * itemsize)
    return num_bytes
