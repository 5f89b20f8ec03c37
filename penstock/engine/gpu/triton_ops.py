# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
"""Launches the Triton kernels: sizes, grids and tile shapes. See `Ops` for what each computes.

Those of quantized weights (`MatrixOps`) and the library's FP8 product are launched here, too. Tile shapes are
the fastest of those tried on an H100 or H200; `docs/design/004-gpu-execution.md` has the figures.
Importing this needs triton, which torch for CUDA brings along.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from triton import next_power_of_2

from penstock.engine.gpu.kernels import attention, layers, prepare, sampler
from penstock.engine.gpu.kernels import packed as kernels
from penstock.engine.gpu.ops import AttentionLayer, HeadRotation, Partials
from penstock.engine.gpu.packed import MatrixOps, PackedWeight
from penstock.engine.gpu.step import (
    NUM_CHUNKS,
    NUM_COMBINES,
    NUM_ITEMS,
    NUM_SAMPLES,
    NUM_TOKENS,
    DeviceStep,
    Drawn,
    Int32Array,
    RowState,
)
from penstock.engine.gpu.worklist import (
    CHUNK_ROWS,
    COMBINE_FIELDS,
    ITEM_FIELDS,
    KV_TILE,
    SINGLE_ROWS,
    SPLITS_MAX,
)
from penstock.engine.kv_cache import KVCache
from penstock.engine.quantized import FLOAT8_BLOCK, Float8Matrix
from penstock.engine.sampler import GREEDY_BELOW
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

_torch = cast(Any, torch)  # `_scaled_mm` has no public name yet.
_FLOAT8_CAPABILITY = (8, 9)
_MIDDLE = {torch.bfloat16: 136.0, torch.float16: 1032.0, torch.float32: 8.0}
"""Eight, beside what unpacking adds in types of which it only fills in bits."""
_ADD_BLOCK = 1024
_ROUND_BLOCK = 1024
_UNPACK_ROWS = 64


@dataclass(slots=True, frozen=True)
class Tiles:
    """How a product is cut."""

    outputs: int
    rows: int
    warps: int
    stages: int
    splits: int


class TritonMatrixOps:
    """See `MatrixOps`."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 4
        self.float8 = not is_cuda or torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY

    def multiply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        """See `MatrixOps`."""
        (rows, k), n, group = x.shape, weight.shape[0], weight.group
        tiles = self._tiles(rows, weight)
        grid = (-(-n // tiles.outputs), -(-rows // tiles.rows), tiles.splits)
        is_split = tiles.splits > 1
        target = x.new_empty(tiles.splits, rows, n, dtype=torch.float32) if is_split else out
        zeros = weight.zeros
        added = weight.scales if bias is None else bias
        kernels.matmul[grid](
            x, weight.words, weight.scales, weight.scales if zeros is None else zeros, added, target, rows, n,
            k, -(-(k // weight.tile) // tiles.splits), weight.words.stride(0), weight.scales.stride(0),
            GROUP=group, QUARTER=weight.tile // 4, MIDDLE=_MIDDLE[x.dtype],
            FOUR=weight.is_four_bits, SCALES=_scales(weight), OFFSET=_offset(weight), BIAS=bias is not None,
            SPLITS=tiles.splits, BLOCK_N=tiles.outputs, BLOCK_M=tiles.rows, BF16=x.dtype == torch.bfloat16,
            FP16=x.dtype == torch.float16, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if is_split:
            kernels.add_splits[(-(-rows * n // _ADD_BLOCK),)](
                target, added, out, rows * n, n, BIAS=bias is not None, SPLITS=tiles.splits, BLOCK=_ADD_BLOCK,
                num_warps=4,
            )  # fmt: skip

    def _tiles(self, rows: int, weight: PackedWeight) -> Tiles:
        n, k = weight.shape
        return tiles_for(rows, n, k // weight.tile, self._processors, weight.words.dtype)

    def unpack(self, weight: PackedWeight, out: Tensor) -> None:
        """See `MatrixOps`."""
        n, k = weight.shape
        zeros = weight.scales if weight.zeros is None else weight.zeros
        kernels.unpack[(-(-n // _UNPACK_ROWS), k // weight.tile)](
            weight.words, weight.scales, zeros, out, n, k, weight.words.stride(0), weight.scales.stride(0),
            GROUP=weight.group, QUARTER=weight.tile // 4,
            FOUR=weight.is_four_bits, SCALES=_scales(weight), OFFSET=_offset(weight),
            ROWS=_UNPACK_ROWS, num_warps=4,
        )  # fmt: skip

    def round_rows(self, x: Tensor, out: Tensor, scales: Tensor) -> None:
        """See `MatrixOps`."""
        rows, k = x.shape
        whole = scales.dim() == 1
        grid = (rows,) if whole else (rows, k // FLOAT8_BLOCK)
        kernels.round_rows[grid](
            x, out, scales, k, scales.shape[-1], BLOCK=_ROUND_BLOCK if whole else FLOAT8_BLOCK, WHOLE=whole,
            num_warps=4 if whole else 1,
        )  # fmt: skip

    def multiply_float8(
        self, x: tuple[Tensor, Tensor], weight: Float8Matrix, bias: Tensor | None, out: Tensor
    ) -> None:
        """See `MatrixOps`."""
        values, scales = x
        of_rows, of_outputs = (
            (scales[:, None], weight.scale.t()) if scales.dim() == 1 else (scales.t(), weight.scale.t())
        )
        _torch._scaled_mm(
            values, weight.values.t(), of_rows, of_outputs, bias=bias, out_dtype=out.dtype,
            use_fast_accum=scales.dim() == 1, out=out,
        )  # fmt: skip


def _offset(weight: PackedWeight) -> int:
    if weight.zeros is None:
        return 0
    return 1 if weight.zeros.dtype == torch.int8 else 2


def _scales(weight: PackedWeight) -> int:
    """As `kernels.matmul` counts them."""
    return int(weight.scales.dim() == 2)


_FEW = {torch.int16: (64, 6), torch.int8: (32, 4)}
"""Outputs of a tile, and programs wanted for each multiprocessor."""


def tiles_for(rows: int, outputs: int, num_tiles: int, processors: int, words: torch.dtype) -> Tiles:
    """Inputs are cut into pieces until there are enough programs: few rows wait for memory, many compute.

    Words that take more instructions to unpack want larger tiles of outputs.
    """
    if rows > 64:
        programs = -(-outputs // 128) * -(-rows // 64)
        return Tiles(128, 64, 8, 3, 1 if programs >= 2 * processors else 2)
    if rows > 16:
        programs = -(-outputs // 64)
        if programs >= 3 * processors:
            return Tiles(128, 64, 8, 3, 1)
        return Tiles(64, 64, 4, 4, _splits(programs, num_tiles, 3 * processors // 2))
    tile, waves = _FEW.get(words, (64, 3))
    return Tiles(tile, 16, 4, 4, _splits(-(-outputs // tile), num_tiles, waves * processors))


def _splits(programs: int, num_tiles: int, wanted: int) -> int:
    splits = 1
    while splits < 8 and programs * splits < wanted and num_tiles >= 4 * splits:
        splits *= 2
    return splits


_PROGRAMS_PER_PROCESSOR = 2
"""As many as fit by registers: up to 255 per thread (compiled for sm_90)."""
_DECODE_STAGES, _CHUNK_STAGES = 5, 2
"""How far loads run ahead. Rows that decode wait for memory; more than 2 make tiles of chunks slower
(measured on an H100)."""
_DECODE_WARPS, _CHUNK_WARPS = 4, 8
_GATE_BLOCK = 1024
_HEADS_PER_PROGRAM = 8
_TOKENS_PER_PROGRAM = 128
_SAMPLER_BLOCK, _SAMPLER_WARPS = 2048, 16
CANDIDATES_MAX = 8192
"""Tokens that the filters of a row look at closely; a row with more of them near its cut takes all of its
logits."""


class TritonOps:
    """See `Ops`."""

    name = "triton"
    captures = True

    def check(self, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """See `Ops`: every model."""

    def plan(self, rows: Int32Array, computed: Int32Array, num_tokens: Int32Array, state: RowState) -> None:
        """See `Ops`: nothing is planned on the host."""

    def __init__(
        self, device: torch.device, *, num_programs: int = 0, candidates_max: int = CANDIDATES_MAX
    ) -> None:
        """`num_programs`: the grid of attention; 0: what fills the device."""
        if not num_programs:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            num_programs = processors * _PROGRAMS_PER_PROCESSOR
        self._num_programs = num_programs
        self.matrices: MatrixOps = TritonMatrixOps(device)
        self._listed_logits = torch.empty(0, candidates_max, device=device)
        self._listed_ids = torch.empty(0, candidates_max, dtype=torch.int32, device=device)

    def prepare(self, step: DeviceStep, slots_per_block: int) -> None:
        """See `Ops`."""
        buffer, state, inputs = step.buffer, step.state, step.inputs
        num_tokens, num_samples = inputs.token_ids.shape[0], inputs.sample_rows.shape[0]
        programs = -(-num_tokens // _TOKENS_PER_PROGRAM) + -(-num_samples // _TOKENS_PER_PROGRAM)
        max_rows = buffer.rows.shape[0]
        prepare.prepare[(programs,)](
            buffer.counts, buffer.rows, buffer.computed, buffer.starts, buffer.sampled, max_rows,
            state.token_ids, state.block_tables, state.unused_row, state.token_ids.stride(0),
            state.block_tables.stride(0), slots_per_block, inputs.token_ids, inputs.positions, inputs.slots,
            inputs.token_rows, inputs.sample_tokens, inputs.sample_rows, inputs.sample_positions, num_tokens,
            num_samples, BLOCK=_TOKENS_PER_PROGRAM, BLOCK_TOKENS=BLOCK_TOKENS, STEPS=max_rows.bit_length(),
            NUM_TOKENS=NUM_TOKENS, NUM_SAMPLES=NUM_SAMPLES, num_warps=4,
        )  # fmt: skip

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        self._norm(x, x, weight, eps, out, add=False)

    def add_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Ops`."""
        self._norm(residual, x, weight, eps, out, add=True)

    def _norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, add: bool
    ) -> None:
        block = next_power_of_2(x.shape[1])
        layers.norm[(x.shape[0],)](
            residual, x, weight, out, x.shape[1], eps, BLOCK=block, ADD=add,
            num_warps=min(max(block // 512, 1), 16)
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        self._gate(gate_up, out, gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See `Ops`."""
        self._gate(gate_up, out, gelu=True)

    def _gate(self, gate_up: Tensor, out: Tensor, *, gelu: bool) -> None:
        num_tokens, size = out.shape
        layers.gate_mul[(num_tokens, -(-size // _GATE_BLOCK))](
            gate_up, out, size, BLOCK=_GATE_BLOCK, GELU=gelu, num_warps=4
        )

    def rotate_store(
        self, qkv: Tensor, q: Tensor, cache: KVCache, layer: int, step: DeviceStep, rotation: HeadRotation
    ) -> None:
        """See `Ops`."""
        table, norms = rotation.table, rotation.norms
        q_norm, k_norm = norms if norms is not None else (table.cos, table.cos)
        grid = (qkv.shape[0], -(-qkv.shape[1] // _HEADS_PER_PROGRAM))
        layers.rotate_store[grid](
            qkv, q, cache.tensor, step.inputs.slots, step.inputs.positions, table.cos, table.sin, q_norm,
            k_norm, layer, rotation.eps, NUM_HEADS=q.shape[1], KV_HEADS=cache.num_kv_heads,
            HEAD_DIM=cache.head_dim, DIM=next_power_of_2(cache.head_dim), ROTARY_DIM=table.rotary_dim,
            BLOCK_TOKENS=BLOCK_TOKENS, HEADS=_HEADS_PER_PROGRAM, NORM=norms is not None,
            FLOAT8=cache.tensor.dtype == torch.float8_e4m3fn, num_warps=4,
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        cache: KVCache,
        step: DeviceStep,
        how: AttentionLayer,
        partials: Partials,
    ) -> None:
        """See `Ops`."""
        buffer, tables = step.buffer, step.state.block_tables
        num_heads, head_dim = q.shape[1], cache.head_dim
        dim = max(next_power_of_2(head_dim), 16)
        group = num_heads // cache.num_kv_heads
        single = max(next_power_of_2(group), SINGLE_ROWS)
        scale = how.scale if how.softcap else how.scale * math.log2(math.e)
        for chunks in (False,) if step.decode_only else (True, False):
            attention.attend[(self._num_programs,)](
                q, out, cache.tensor, tables, buffer.items, buffer.counts, partials.outputs,
                partials.logsumexps, how.layer, scale, how.softcap, how.window, tables.stride(0),
                cache.tensor.stride(0), NUM_HEADS=num_heads, KV_HEADS=cache.num_kv_heads, HEAD_DIM=head_dim,
                DIM=dim, BLOCK_TOKENS=BLOCK_TOKENS, TILE=KV_TILE,
                ROWS=max(CHUNK_ROWS, single) if chunks else single, ITEM_FIELDS=ITEM_FIELDS,
                NUM_ITEMS=NUM_ITEMS, NUM_CHUNKS=NUM_CHUNKS, CHUNKS=chunks, SOFTCAP=how.softcap > 0,
                WINDOW=how.window > 0, num_warps=_CHUNK_WARPS if chunks else _DECODE_WARPS,
                num_stages=_CHUNK_STAGES if chunks or dim > 128 else _DECODE_STAGES,
            )  # fmt: skip
        attention.combine[(self._num_programs,)](
            out, buffer.combines, buffer.counts, partials.outputs, partials.logsumexps, NUM_HEADS=num_heads,
            HEAD_DIM=head_dim, DIM=dim, SPLITS=SPLITS_MAX, COMBINE_FIELDS=COMBINE_FIELDS,
            NUM_COMBINES=NUM_COMBINES, num_warps=2,
        )  # fmt: skip

    def sample(self, logits: Tensor, step: DeviceStep, drawn: Drawn) -> None:
        """See `Ops`."""
        state, inputs = step.state, step.inputs
        num_samples, size = logits.shape
        if num_samples > self._listed_logits.shape[0]:
            # The largest step runs first, so no graph is captured before the lists have their final place.
            rows = max(num_samples, state.unused_row)
            self._listed_logits = self._listed_logits.new_empty(rows, self._listed_logits.shape[1])
            self._listed_ids = self._listed_ids.new_empty(rows, self._listed_ids.shape[1])
        block = min(_SAMPLER_BLOCK, next_power_of_2(size))
        sampler.sample[(num_samples,)](
            logits, inputs.sample_rows, inputs.sample_positions, state.temperature, state.top_k, state.top_p,
            state.min_p, state.seed, state.token_ids, drawn.token_ids, drawn.healthy, self._listed_logits,
            self._listed_ids, size, state.token_ids.stride(0), GREEDY_BELOW=GREEDY_BELOW,
            CAPACITY=self._listed_logits.shape[1], BLOCK=block, num_warps=_SAMPLER_WARPS,
        )  # fmt: skip
