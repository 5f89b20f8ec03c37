"""The decoder of `engine/decoder.py` with a whole step as one native call, and the attention that goes with
it.

The torch decoder makes some twelve calls per layer; at batch 1 a small model spends most of a token's time
between them. Here a step is one call that releases the interpreter's lock. `NativeDecoder.forward` and
`NativeAttention.begin` have the faces of `PsDecoder` and `Attention`; who wires the engine picks the pair.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from ctypes import Array, addressof, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.files import Packed
from penstock.engine.adapters.native_layout import NativePacked
from penstock.engine.arrays import Int32Array, Int64Array
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import DecoderLimits, WeightSource
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import rotary_angles
from penstock.engine.native.library import (
    Epilogue,
    KvCache,
    Layer,
    NativeLibrary,
    PsDecoder,
    PsDraft,
    PsMlp,
    PsStep,
    PsWeight,
    Type,
)
from penstock.engine.native.packing import Packing
from penstock.engine.native.weights import (
    Matrix,
    NativeWeight,
    can_stack,
    exact,
    int4,
    int8,
    multiply,
    pack_into,
    pack_stacked,
    quantized,
)
from penstock.engine.quantized import QuantizedMatrix, dense, stacked
from penstock.models.spec import ROUNDED_EXTRA_BYTES, ActivationKind, DecoderSpec, RopeSpec

TYPES = {torch.float32: Type.F32, torch.bfloat16: Type.BF16}
HEAD_DIM_MAX = 256
Precision = Literal["native", "int8", "int4"]
"""`native` keeps the checkpoint's type; `int8` rounds weights once and inputs as they come (W8A8); `int4`
rounds weights to four bits and inputs as they come to int8, with a scale per group, the head to eight
bits."""


class LayerCache:
    """One layer of a KV cache [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], as the kernels
    see it.

    `block_size` is a multiple of 16, `head_dim` of 16 and at most 256; bfloat16 or float32. A rounded cache
    is int8 and has `ROUNDED_EXTRA_BYTES` more in its last dimension (`KVCache`); `dtype` is then that of
    queries.
    """

    def __init__(self, cache: torch.Tensor, layer: int, dtype: torch.dtype | None = None) -> None:
        rounded = cache.dtype == torch.int8 and dtype is not None
        self.dtype = cache.dtype if dtype is None else dtype
        if (
            cache.dim() != 6
            or self.dtype not in TYPES
            or not (rounded or cache.dtype == self.dtype)
            or not cache.is_contiguous()
            or cache.shape[2] != 2
        ):
            raise ValueError(f"not a KV cache: {list(cache.shape)} {cache.dtype}")
        self.num_blocks, num_layers, _, self.block_size, self.num_kv_heads, head_size = cache.shape
        self.head_dim = head_size - ROUNDED_EXTRA_BYTES if rounded else head_size
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer {layer} of {num_layers}")
        if self.block_size % 16 or self.head_dim % 16 or not 16 <= self.head_dim <= HEAD_DIM_MAX:
            raise ValueError(
                f"block_size {self.block_size} and head_dim {self.head_dim} must be multiples of 16"
            )
        self._tensor = cache
        self.struct = KvCache(
            base=cache.data_ptr() + layer * cache.stride(1) * cache.element_size(),
            block_stride=cache.stride(0), kv_stride=cache.stride(2), block_size=self.block_size,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, type=int(TYPES[self.dtype]),
            rounded=int(rounded),
        )  # fmt: skip


@dataclass(slots=True, frozen=True)
class StepRows:
    """A step's rows as the kernels read them: where each row's blocks, queries and positions are."""

    block_tables: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array


class NativeAttention:
    """Holds the step's rows for `NativeDecoder.forward`, which stores and attends inside its one call."""

    def __init__(self) -> None:
        self.rows: StepRows | None = None
        self.adapters: Array[c_void_p] | None = None
        """Addresses of each row's adapter, null for none; None: no row has one."""

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare a step; see `Attention`."""
        starts = np.zeros(len(batch.num_tokens) + 1, np.int32)
        np.cumsum(batch.num_tokens, out=starts[1:])
        lens = np.ascontiguousarray(batch.num_computed + batch.num_tokens, np.int32)
        self.rows = StepRows(np.ascontiguousarray(batch.block_tables, np.int32), starts, lens)

    def adapt(self, adapters: Sequence[Packed | None] | None, num_tokens: Int32Array) -> None:
        """Say which adapter each row of the coming step has."""
        if adapters is None:
            self.adapters = None
            return
        found = (None if each is None else cast(NativePacked, each).address for each in adapters)
        self.adapters = (c_void_p * len(adapters))(*found)


_Part = Tensor | QuantizedMatrix
_Piece = _Part | tuple[Tensor, ...]
"""Several tensors are stacked along the first dimension."""
_Pack = Callable[[_Piece, Tensor | None], NativeWeight]


@dataclass(slots=True, frozen=True)
class _Angles:
    """Addresses of a rotation's tables, `[max_model_len, rotary_dim / 2]` float32."""

    cos: int
    sin: int
    rotary_dim: int


class _Packer:
    """Rounds and packs a model's weights, until `finish`; which precision is chosen once."""

    def __init__(
        self, packing: Packing, precision: Precision, activation: ActivationKind, dtype: torch.dtype
    ) -> None:
        self._packing, self.dtype, kernels = packing, dtype, packing.kernels
        self.finish = self._packing.finish
        """Its weights can be computed with after that."""
        self._gate = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}[activation]
        rounded_8, rounded_4 = partial(int8, kernels), partial(int4, kernels)
        self._inner = {"native": exact, "int8": rounded_8, "int4": rounded_4}[precision]
        # A head in four bits costs more quality than it saves time.
        self._head = exact if precision == "native" else rounded_8 if kernels.supports(Type.I8) else exact

    def plain(self, weight: _Piece, bias: Tensor | None) -> NativeWeight:
        """A weight by itself."""
        if not isinstance(weight, tuple):
            return pack_into(self._packing, self._matrix(weight, bias))
        return pack_stacked(self._packing, [self._inner(part) for part in weight], bias)

    def gate_up(self, gate: _Piece, up: _Piece, bias: Tensor | None) -> NativeWeight:
        """Gate and up as one weight; the gate's bias comes first."""
        assert not isinstance(gate, tuple) and not isinstance(up, tuple), "they are two"  # noqa: PT018
        biases = (None, None) if bias is None else bias.chunk(2)
        if not _are_alike((gate, up)):
            gate, up = (dense(part, self.dtype) for part in (gate, up))
        gate_matrix, up_matrix = self._matrix(gate, biases[0]), self._matrix(up, biases[1])
        return pack_into(self._packing, gate_matrix, up_matrix, self._gate)

    def router(self, weight: _Piece, bias: Tensor | None) -> NativeWeight:
        """The weights that choose experts: small, and never rounded, since a wrong choice costs more than a
        wrong digit.
        """
        assert not isinstance(weight, tuple), "it is one"
        return pack_into(self._packing, exact(dense(weight, self.dtype), bias))

    def head(self, weight: _Part) -> NativeWeight:
        """The output projection."""
        if isinstance(weight, QuantizedMatrix):
            return pack_into(self._packing, quantized(weight))
        return pack_into(self._packing, self._head(weight))

    def _matrix(self, weight: _Part, bias: Tensor | None) -> Matrix:
        return quantized(weight, bias) if isinstance(weight, QuantizedMatrix) else self._inner(weight, bias)


def unsupported(
    spec: DecoderSpec, dtype: torch.dtype, kernels: NativeLibrary, precision: Precision
) -> str | None:
    """Why the kernels cannot compute this model, in words; None if they can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"native kernels compute in bfloat16 or float32, not {dtype}"
    if spec.head_dim % 16 or not 16 <= spec.head_dim <= HEAD_DIM_MAX:
        return (
            f"native attention wants a head size that is a multiple of 16 up to {HEAD_DIM_MAX}, not "
            f"{spec.head_dim}"
        )
    if precision == "int8" and not kernels.supports(Type.I8):
        return f"int8 weights need dot-product instructions that this CPU ({kernels.isa}) lacks"
    return None


def _pieces(parts: Sequence[_Part], count: int, dtype: torch.dtype) -> Sequence[_Piece]:
    """A weight cut into `count` equal pieces along the first dimension; without a copy where the checkpoint
    has it so, or where its parts can be packed one by one.
    """
    if len(parts) == count:
        return parts
    if _are_alike(parts):
        matrix = stacked(cast(Sequence[QuantizedMatrix], parts))
        rows = matrix.shape[0] // count
        return [matrix.rows(first, first + rows) for first in range(0, rows * count, rows)]
    whole = [dense(part, dtype) for part in parts]
    if count == 1 and can_stack(whole):
        return [tuple(whole)]
    return (whole[0] if len(whole) == 1 else torch.cat(whole)).chunk(count)


def _are_alike(parts: Sequence[_Part]) -> bool:
    """Whether all are quantized, and so that they can be one matrix or the two sides of a gate."""
    first = parts[0]
    return isinstance(first, QuantizedMatrix) and all(
        isinstance(part, QuantizedMatrix) and first.is_like(part) for part in parts
    )


class NativeDecoder:
    """The model, ready to run steps natively. Logits are valid until the next `forward`.

    Ask `unsupported` first: weights are given away once.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        kernels: NativeLibrary,
        limits: DecoderLimits,
        cache: KVCache,
        precision: Precision = "native",
        on_copies: Callable[[], None] | None = None,
    ) -> None:
        """`on_copies`: see `Packing`."""
        self._kernels = kernels
        self._kept: list[
            Tensor | NativeWeight | Array[Layer] | Array[PsMlp]
        ] = []  # The memory that the structs point into.
        embedding = dense(weights.take_parts("embedding")[0], cache.dtype)
        packing = Packing(kernels, on_copies=on_copies)
        packer = _Packer(packing, precision, spec.activation, embedding.dtype)
        angles = self._angles(spec, limits.max_model_len)
        layers = (Layer * spec.num_layers)(
            *(
                self._layer(spec, weights, packer, angles[spec.layer_rope(i)], i)
                for i in range(spec.num_layers)
            )
        )
        self._head: NativeWeight | None = None
        head, is_table = PsWeight(), False
        if not spec.embeds:
            self._head = packer.head(embedding if spec.tied_head else weights.take_parts("head")[0])
            head, is_table = self._head.struct, spec.tied_head and self._head.kind is not Type.I8
            self._kept.append(self._head)
        final_norm = self._norm(spec, weights, "final_norm")
        packer.finish()
        # A tied table is not kept twice: rows are read back out of the packed head, unless that was rounded.
        self._kept += [layers, cache.tensor]
        self._cache, self._cache_dtype = cache.tensor, cache.dtype
        kernels.advise_huge(cache.tensor.data_ptr(), cache.tensor.nbytes)
        self._struct = PsDecoder(
            layers=layers, embedding=None if is_table else self._keep(embedding.clone()), head=head,
            final_norm=final_norm,
            cache=LayerCache(cache.tensor, 0, cache.dtype).struct,
            layer_stride=cache.tensor.stride(1), num_layers=spec.num_layers, hidden=spec.hidden_size,
            intermediate=spec.intermediate_size, num_blocks=cache.tensor.shape[0],
            num_positions=limits.max_model_len, num_q_heads=spec.num_heads, eps=spec.norm_eps,
            scale=spec.attention.scale or spec.head_dim**-0.5, softcap=spec.attention.softcap,
            # As in `ScaledEmbedding`: the factor has the table's precision.
            embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=embedding.dtype)),
            logit_softcap=0.0 if spec.embeds else spec.logit_softcap,
            top_k=0 if spec.moe is None else spec.moe.top_k,
            normalise=spec.moe is not None and spec.moe.normalise, vocab=spec.vocab_size,
        )  # fmt: skip
        self._logits = torch.zeros(limits.max_samples, spec.output_size)
        self.part_ns: Int64Array | None = None
        """Set to `[len(STEP_PARTS)]` zeros, every step adds what its parts took to it."""

    def forward(
        self, token_ids: Tensor, samples: Tensor, attention: NativeAttention, states: Tensor | None = None
    ) -> Tensor:
        """Compute one step; `attention.begin` has been called for it.

        Token ids, samples and states are as in `Decoder.forward`; positions follow from the rows. Returns
        `[num_samples, vocab_size]` float32 logits; of a model that embeds, `[num_samples, hidden_size]`.
        """
        rows = attention.rows
        assert rows is not None, "begin comes before forward"
        assert token_ids.is_contiguous()
        assert samples.is_contiguous()
        assert states is None or (states.is_contiguous() and states.dtype == self._cache_dtype)
        logits = self._logits[: len(samples)]
        self._kernels.step(
            self._struct,
            PsStep(
                token_ids=token_ids.data_ptr(), samples=samples.data_ptr(),
                block_tables=rows.block_tables.ctypes.data, query_starts=rows.query_starts.ctypes.data,
                context_lens=rows.context_lens.ctypes.data, logits=logits.data_ptr(),
                part_ns=None if self.part_ns is None else self.part_ns.ctypes.data, t=len(token_ids),
                rows=len(rows.context_lens), ld_tables=rows.block_tables.shape[1], num_samples=len(samples),
                adapters=None if attention.adapters is None else addressof(attention.adapters),
                states=None if states is None else states.data_ptr(),
            ),
        )  # fmt: skip
        return logits

    def head(self, states: Tensor, out: Tensor) -> None:
        """See `StepModel`."""
        assert self._head is not None, "a model that embeds says nothing"
        multiply(self._kernels, self._head, states, out)

    def draft(self, job: PsDraft) -> None:
        """Compute several steps of rows, each with what the one before has drawn."""
        assert job.num_rows <= len(self._logits), "more rows than there are rows of logits"
        job.logits = self._logits.data_ptr()
        self._kernels.draft(self._struct, job)

    def weights(self) -> list[Tensor]:
        """The weights that it computes with, as they lie in memory."""
        found = list[Tensor]()
        for each in self._kept:
            if isinstance(each, NativeWeight):
                found += each.tensors
            elif isinstance(each, Tensor) and each is not self._cache:
                found.append(each)
        return found

    @contextmanager
    def rehearsing(self) -> Generator[None]:
        """Compute the first layer only: all share their scratch memory, so a step asks for as much as with
        all of them.
        """
        num_layers = int(self._struct.num_layers)
        self._struct.num_layers = 1
        try:
            yield
        finally:
            self._struct.num_layers = num_layers

    def _angles(self, spec: DecoderSpec, max_len: int) -> dict[RopeSpec, _Angles]:
        """Where the tables of every kind of rotation are; layers that turn alike share theirs."""
        found: dict[RopeSpec, _Angles] = {}
        for rope in {spec.layer_rope(i) for i in range(spec.num_layers)}:
            cos, sin = rotary_angles(rope, spec.head_dim, max_len)
            found[rope] = _Angles(self._keep(cos), self._keep(sin), 2 * cos.shape[1])
        return found

    def _layer(
        self, spec: DecoderSpec, weights: WeightSource, packer: _Packer, angles: _Angles, i: int
    ) -> Layer:
        def bias(key: str, has_bias: bool) -> Tensor | None:
            return weights.take(f"{i}.{key}_bias") if has_bias else None

        def packed(key: str, has_bias: bool, pack: _Pack, count: int = 1) -> Sequence[NativeWeight]:
            """A weight, or `count` of them that are stacked along the first dimension."""
            pieces = _pieces(weights.take_parts(f"{i}.{key}"), count, packer.dtype)
            made = [pack(piece, bias(key, has_bias)) for piece in pieces]
            self._kept += made
            return made

        def gates(has_bias: bool, count: int) -> Sequence[NativeWeight]:
            """Gate and up, or `count` pairs of them, gate first."""
            pieces = _pieces(weights.take_parts(f"{i}.gate_up"), 2 * count, packer.dtype)
            pairs = zip(pieces[::2], pieces[1::2], strict=True)
            made = [packer.gate_up(gate, up, bias("gate_up", has_bias)) for gate, up in pairs]
            self._kept += made
            return made

        def norm(key: str, has_norm: bool = True) -> int | None:
            return self._norm(spec, weights, f"{i}.{key}") if has_norm else None

        [qkv], [o] = packed("qkv", spec.qkv_bias, packer.plain), packed("o", spec.o_bias, packer.plain)
        count, has_bias, router = 1, spec.mlp_bias, PsWeight()
        if spec.moe is not None:
            count, has_bias, router = (
                spec.moe.num_experts,
                False,
                packed("router", False, packer.router)[0].struct,
            )
        gate_up, down = gates(has_bias, count), packed("down", has_bias, packer.plain, count)
        mlps = (PsMlp * count)(
            *(PsMlp(into.struct, back.struct) for into, back in zip(gate_up, down, strict=True))
        )
        self._kept.append(mlps)
        return Layer(
            qkv=qkv.struct, o=o.struct, router=router, mlp=mlps,
            input_norm=norm("input_norm"), post_attention_norm=norm("post_attention_norm"),
            attention_out_norm=norm("attention_out_norm", spec.sublayer_norms),
            mlp_out_norm=norm("mlp_out_norm", spec.sublayer_norms),
            q_norm=norm("q_norm", spec.qk_norm), k_norm=norm("k_norm", spec.qk_norm),
            cos=angles.cos, sin=angles.sin, rotary_dim=angles.rotary_dim, window=spec.attention.window(i),
        )  # fmt: skip

    def _norm(self, spec: DecoderSpec, weights: WeightSource, key: str) -> int:
        # The sum stays in float32: near 1 the checkpoint's type would lose most of what was learned.
        return self._keep(weights.take(key).float() + spec.norm_offset)

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
