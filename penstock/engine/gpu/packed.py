"""Quantized weights on a device: how they lie there, and the layers that multiply with them.

    int4, int8     integers with scales, turned into the inputs' type in registers (W4A16, W8A16); from
                   `DENSE_FROM` rows on the weight is made dense in scratch first, for the library's product
    FP8            up to `FEW_ROWS` rows likewise; for more the inputs are rounded to FP8 with a scale per
                   token, or per 128 of a token's inputs where the weight has a scale per block, and
                   multiplied by the library's FP8 product (W8A8)

A row's numbers depend on how many rows there are, as with dense weights: by the rounding of another order of
summation, and with FP8 by that of its inputs.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.decoder import WeightSource
from penstock.engine.quantized import FLOAT8_BLOCK, KEPT_GROUPS, Float8Matrix, Kept, QuantizedMatrix

FLOAT8 = torch.float8_e4m3fn
DENSE_FROM = 192
"""Rows from which making the weight dense costs less than the slower product. Measured: design 004."""
FEW_ROWS = 16
"""FP8 weights are read and multiplied like integers up to here: the library's product does not keep the
memory busy with few rows. Measured: design 004."""
_ROWS_ALIGNED = 4
"""Rows of an FP8 product with scales per block are a multiple of this (cuBLAS)."""
_FOUR_BITS_TILE = 64
_TILES = (128, 64, 32, 16)
"""Inputs that a program takes at once, of weights with one scale per output."""
_ALIGNED = 16
"""Sides of an FP8 product are multiples of this (cuBLAS)."""


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """W [n, k] = (integers - centre) * scale + shift, as the kernels read it."""

    words: Tensor
    """Four bits: int16 [n, k / 4], where word j of a tile holds its inputs j, j + tile / 4, ..., the first in
    the lowest bits. Else int8 or FP8 [n, k]."""
    scales: Tensor
    """[k / group, n] with four bits, in float16 where that holds them exactly; else float32: [n], or
    [n / 128, k / 128], one for each block."""
    zeros: Tensor | None
    """[k / group, n]: int8 that is added to the integers, or float32 that is added to what they stand for;
    None: nothing."""
    group: int
    """Inputs that share a scale; of int8, that a program takes at once."""
    order: Tensor | None
    """[k] int64: column i multiplies input `order[i]`; None: input i."""

    @property
    def is_four_bits(self) -> bool:
        """Whether four weights share a word."""
        return self.words.dtype == torch.int16

    @property
    def tile(self) -> int:
        """Inputs that the kernels take at once."""
        return max(self.group, _FOUR_BITS_TILE) if self.is_four_bits else self.group

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        n, words = self.words.shape
        return n, words * 4 if self.is_four_bits else words

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there is of it in memory."""
        each = (self.words, self.scales, self.zeros, self.order)
        return tuple(tensor for tensor in each if tensor is not None)

    def dense(self) -> Tensor:
        """[n, k] in float32, columns in the weight's own order: what the kernels must compute with."""
        n, k = self.shape
        if not self.is_four_bits:
            scale = self.scales[:, None] if self.scales.dim() == 1 else self.scales
            return Float8Matrix(values=self.words, scale=scale).dense(torch.float32)
        words = self.words.view(n, -1, 1, self.tile // 4)
        quarters = torch.cat([(words >> shift) & 15 for shift in (0, 4, 8, 12)], dim=2)
        values = quarters.view(n, -1, self.group).float() - 8
        scales = self.scales.float().t()[:, :, None]
        if self.zeros is None:
            return (values * scales).view(n, k)
        zeros = self.zeros.float().t()[:, :, None]
        made = (values + zeros) * scales if self.zeros.dtype == torch.int8 else values * scales + zeros
        return made.view(n, k)


def packed(matrix: QuantizedMatrix, device: torch.device) -> PackedWeight | None:
    """The weight on the device; None if the kernels cannot compute with it."""
    n, k = matrix.shape
    order = None if matrix.order is None else matrix.order.to(device)
    values, scale = matrix.values.to(device), matrix.scale.to(device)
    if matrix.bits == 8:
        tile = _tile(k)
        if tile is None or matrix.group != k or matrix.offset is not None:
            return None
        return PackedWeight(
            words=values.contiguous(), scales=scale[:, 0].contiguous(), zeros=None, group=tile, order=order
        )
    group = matrix.group
    tile = max(group, _FOUR_BITS_TILE)
    if group not in KEPT_GROUPS or k % tile:
        return None
    words = torch.zeros(n, k // tile, tile // 4, dtype=torch.int32, device=device)
    for quarter, part in enumerate(values.view(n, k // tile, 4, tile // 4).unbind(2)):
        words |= part.int() << (4 * quarter)
    zeros = None
    if matrix.offset is not None:
        zeros = _zeros(matrix.offset.to(device), scale)
    return PackedWeight(
        words=words.to(torch.int16).view(n, k // 4),
        scales=_narrow(scale).t().contiguous(),
        zeros=zeros,
        group=group,
        order=order,
    )


def _zeros(offset: Tensor, scale: Tensor) -> Tensor:
    """As integers where that says the same: GPTQ and AWQ have none but those."""
    steps = torch.where(scale == 0, 0.0, offset / scale).round().clamp(-127, 127)
    exact = torch.allclose(steps * scale, offset, rtol=1e-6, atol=0.0)
    return (steps.to(torch.int8) if exact else offset.float()).t().contiguous()


def _narrow(scale: Tensor) -> Tensor:
    """In float16 if that holds them exactly."""
    half = scale.half()
    return half if torch.equal(half.float(), scale) else scale.float()


def rounded(weight: Tensor, bits: int) -> QuantizedMatrix | None:
    """A dense weight rounded to the nearest integers: eight bits with a scale per output, or four with scales
    and zero points per group, the largest of `KEPT_GROUPS` that its inputs can be cut into; None if there is
    none.
    """
    n, k = weight.shape
    exact = weight.float()
    if bits == 8:
        scale = exact.abs().amax(1, keepdim=True).clamp_min(1e-10) / 127
        return QuantizedMatrix(values=(exact / scale).round_().clamp_(-127, 127).to(torch.int8), scale=scale)
    group = next((group for group in KEPT_GROUPS if k % group == 0), None)
    if group is None:
        return None
    groups = exact.view(n, -1, group)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    scale = ((high - low) / 15).half().float().clamp_min(2.0**-24)
    zeros = (-low / scale).round_().clamp_(0, 15)
    values = ((groups / scale[:, :, None]).round_() + zeros[:, :, None]).clamp_(0, 15)
    return QuantizedMatrix(values=values.view(n, k).to(torch.uint8), scale=scale, offset=(8 - zeros) * scale)


class RoundedWeights:
    """A `WeightSource` whose dense layers are rounded to integers as they are taken."""

    def __init__(self, weights: WeightSource, bits: int) -> None:
        self._weights, self._bits = weights, bits

    def take(self, key: str) -> Tensor:
        """See `WeightSource`: as it is."""
        return self._weights.take(key)

    def take_linear(self, key: str) -> Tensor | Kept:
        """See `WeightSource`. A router's choice is not left to rounding."""
        weight = self._weights.take_linear(key)
        if not isinstance(weight, Tensor) or key.endswith(".router"):
            return weight
        return rounded(weight, self._bits) or weight

    def take_parts(self, key: str) -> tuple[Tensor | QuantizedMatrix, ...]:
        """See `WeightSource`: as they are."""
        return self._weights.take_parts(key)


class MatrixOps(Protocol):
    """Products with quantized weights. Like `Ops`: fixed shapes, nothing asked of the device."""

    float8: bool
    """Whether this device multiplies FP8."""

    def multiply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        """`out = x W^T + bias`, for few rows; `x` `[num_rows, k]` in the weight's order of columns."""
        ...

    def unpack(self, weight: PackedWeight, out: Tensor) -> None:
        """The dense weight to `out` `[n, k]`, in the weight's order of columns."""
        ...

    def round_rows(self, x: Tensor, out: Tensor, scales: Tensor) -> None:
        """`x` `[num_rows, k]` as FP8 to `out`; scales `[num_rows]`, or `[k / 128, num_rows]`. Both may have
        more rows than `x`, which mean nothing.
        """
        ...

    def multiply_float8(
        self, x: tuple[Tensor, Tensor], weight: Float8Matrix, bias: Tensor | None, out: Tensor
    ) -> None:
        """`out = x W^T + bias` of rows as `round_rows` has made them: (FP8, scales)."""
        ...


class TorchMatrixOps:
    """See `MatrixOps`: in plain torch, on any device."""

    float8 = True

    def multiply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        """See `MatrixOps`."""
        _finish(x.float() @ weight.dense().t(), bias, out)

    def unpack(self, weight: PackedWeight, out: Tensor) -> None:
        """See `MatrixOps`."""
        out.copy_(weight.dense())

    def round_rows(self, x: Tensor, out: Tensor, scales: Tensor) -> None:
        """See `MatrixOps`."""
        rows = x.shape[0]
        blocks = x.float().view(rows, 1 if scales.dim() == 1 else scales.shape[0], -1)
        found = blocks.abs().amax(2).clamp_min(1e-10) / 448.0
        scales[..., :rows].copy_(found[:, 0] if scales.dim() == 1 else found.t())
        values = (blocks / found[:, :, None]).clamp(-448.0, 448.0)
        out[:rows].copy_(values.view(x.shape).to(FLOAT8))

    def multiply_float8(
        self, x: tuple[Tensor, Tensor], weight: Float8Matrix, bias: Tensor | None, out: Tensor
    ) -> None:
        """See `MatrixOps`."""
        values, scales = x
        columns = scales[:, None] if scales.dim() == 1 else scales.t()
        blocks = values.float().view(len(values), columns.shape[1], -1) * columns[:, :, None]
        _finish(blocks.view(values.shape) @ weight.dense(torch.float32).t(), bias, out)


def _finish(found: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(found if bias is None else found + bias.float())


class Scratch:
    """Memory that quantized layers share, since they run one after another."""

    def __init__(self, like: Tensor) -> None:
        """`like`: of the device and type that is computed in."""
        self._like, self._given = like, dict[torch.dtype, Tensor]()

    def reserve(self, dtype: torch.dtype, size: int) -> None:
        """So much will be wanted. Before the first step, and before a graph has an address of it."""
        given = self._given.get(dtype)
        if given is None or given.numel() < size:
            # As bytes: not every device's library fills FP8.
            self._given.pop(dtype, None)
            made = torch.zeros(size * dtype.itemsize, dtype=torch.uint8, device=self._like.device)
            self._given[dtype] = made.view(dtype)

    def of(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """As much as was reserved, or less."""
        size = 1
        for side in shape:
            size *= side
        return self._given[dtype][:size].view(shape)


class PackedLinear:
    """See `Linear`: integers in memory."""

    __slots__ = ("_bias", "_ops", "_ordered", "_scratch", "_weight")

    def __init__(
        self, ops: MatrixOps, weight: PackedWeight, bias: Tensor | None, scratch: Scratch, ordered: "Scratch"
    ) -> None:
        """`ordered`: scratch for inputs in the weight's order."""
        self._ops, self._weight, self._bias = ops, weight, bias
        self._scratch, self._ordered = scratch, ordered

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Linear`."""
        return self._weight.tensors if self._bias is None else (*self._weight.tensors, self._bias)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Linear`."""
        weight = self._weight
        if weight.order is not None:
            x = torch.index_select(x, 1, weight.order, out=self._ordered.of(x.dtype, *x.shape))
        if x.shape[0] < DENSE_FROM:
            self._ops.multiply(x, weight, self._bias, out)
            return
        dense = self._scratch.of(x.dtype, *weight.shape)
        self._ops.unpack(weight, dense)
        if self._bias is None:
            torch.mm(x, dense.t(), out=out)
        else:
            torch.addmm(self._bias, x, dense.t(), out=out)


class Float8Linear:
    """See `Linear`: FP8 in memory."""

    __slots__ = ("_bias", "_ops", "_scratch", "_weight", "few")

    def __init__(self, ops: MatrixOps, weight: Float8Matrix, bias: Tensor | None, scratch: Scratch) -> None:
        self._ops, self._weight, self._bias, self._scratch = ops, weight, bias, scratch
        self.few = few_rows(weight)
        """The weights as products of few rows read them."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Linear`."""
        own = (self._weight.values, self._weight.scale)
        return own if self._bias is None else (*own, self._bias)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Linear`."""
        num_rows, k = x.shape
        if num_rows <= FEW_ROWS:
            self._ops.multiply(x, self.few, self._bias, out)
            return
        in_blocks = self._weight.in_blocks
        rows = _rounded_up(num_rows) if in_blocks else num_rows
        sizes = (k // FLOAT8_BLOCK, rows) if in_blocks else (rows,)
        values, scales = self._scratch.of(FLOAT8, rows, k), self._scratch.of(torch.float32, *sizes)
        target = out if rows == num_rows else self._scratch.of(out.dtype, rows, out.shape[1])
        self._ops.round_rows(x, values, scales)
        self._ops.multiply_float8((values, scales), self._weight, self._bias, target)
        if target is not out:
            out.copy_(target[:num_rows])


def few_rows(weight: Float8Matrix) -> PackedWeight:
    """The same memory for products of few rows."""
    scales = weight.scale if weight.in_blocks else weight.scale[:, 0]
    group = FLOAT8_BLOCK if weight.in_blocks else _tile(weight.shape[1])
    assert group is not None, "inputs are a multiple of 16"
    return PackedWeight(words=weight.values, scales=scales, zeros=None, group=group, order=None)


def _rounded_up(rows: int) -> int:
    return -(-rows // _ROWS_ALIGNED) * _ROWS_ALIGNED


def _tile(k: int) -> int | None:
    return next((tile for tile in _TILES if k % tile == 0), None)


class QuantizedLinears:
    """Makes the layers, with scratch that they share."""

    def __init__(self, ops: MatrixOps, like: Tensor) -> None:
        """`like`: a tensor of the device and type that is computed in."""
        self._ops, self._like = ops, like
        self._scratch, self._ordered = Scratch(like), Scratch(like)

    def dense(self, matrix: Kept) -> Tensor:
        """A matrix that neither of the others can multiply, made dense."""
        return matrix.dense(self._like.dtype).to(self._like.device)

    def linear(
        self, matrix: Kept, bias: Tensor | None, *, rows_max: int
    ) -> "PackedLinear | Float8Linear | None":
        """A layer that computes with the weight; None if the device or its kernels cannot."""
        if isinstance(matrix, QuantizedMatrix):
            return self._integers(matrix, bias, rows_max)
        return self._float8(matrix, bias, rows_max)

    def _integers(self, matrix: QuantizedMatrix, bias: Tensor | None, rows_max: int) -> PackedLinear | None:
        weight = packed(matrix, self._like.device)
        if weight is None:
            return None
        n, k = weight.shape
        if rows_max >= DENSE_FROM:
            self._scratch.reserve(self._like.dtype, n * k)
        if weight.order is not None:
            self._ordered.reserve(self._like.dtype, rows_max * k)
        return PackedLinear(self._ops, weight, bias, self._scratch, self._ordered)

    def _float8(self, matrix: Float8Matrix, bias: Tensor | None, rows_max: int) -> Float8Linear | None:
        n, k = matrix.shape
        if not self._ops.float8 or n % _ALIGNED or k % _ALIGNED:
            return None
        if self._like.is_cuda and self._like.dtype != torch.bfloat16:
            return None  # The library's products with a scale per row have results of that type alone.
        device = self._like.device
        rows = _rounded_up(rows_max)
        self._scratch.reserve(FLOAT8, rows * k)
        self._scratch.reserve(torch.float32, rows * (k // FLOAT8_BLOCK if matrix.in_blocks else 1))
        if matrix.in_blocks:
            self._scratch.reserve(self._like.dtype, rows * n)
        own = Float8Matrix(values=matrix.values.to(device), scale=_padded(matrix.scale.to(device)))
        return Float8Linear(self._ops, own, bias, self._scratch)


def _padded(scale: Tensor) -> Tensor:
    """Scales of blocks, whose rows begin at multiples of four floats, as cuBLAS wants them."""
    n, k = scale.shape
    if k % 4 == 0 or k == 1:
        return scale.contiguous()
    wide = scale.new_zeros(n, -(-k // 4) * 4)
    wide[:, :k] = scale
    return wide[:, :k]
