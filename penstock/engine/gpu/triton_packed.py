# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
"""Launches the kernels of quantized weights, and the library's FP8 product. See `MatrixOps`.

Tile shapes are the fastest of those tried on an H100 or H200; `docs/design/004-gpu-execution.md` has the
figures. Importing this needs triton.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from penstock.engine.gpu.kernels import packed as kernels
from penstock.engine.gpu.packed import PackedWeight
from penstock.engine.quantized import FLOAT8_BLOCK, Float8Matrix

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
        self.tiles: Tiles | None = None
        """Set by benchmarks that try others."""

    def multiply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        """See `MatrixOps`."""
        (rows, k), n, group = x.shape, weight.shape[0], weight.group
        tiles = self.tiles or self._tiles(rows, weight)
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
