"""Linear layers whose rows do not depend on the batch: `out = x W^T + b`."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.layers.row_tiles import ANCHORS, Layout, RowTiles, agreeing_rows, cancelling

_ALIGNED_BYTES = 64
"""What torch allocates begins at a multiple of this. Where it begins may choose the kernel: operands that lie
otherwise are copied."""


class Linear(Protocol):
    """A weight that multiplies rows. Chosen once per weight; quantized and native ones have this face too."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write `x W^T + b` to `out`.

        Args:
            x: `[num_rows, in_features]`, contiguous. Not changed.
            out: `[num_rows, out_features]`, contiguous, owned by the caller.
        """
        ...


class TorchLinear:
    """A dense weight in the model's dtype, multiplied by torch in row counts that agree with each other."""

    __slots__ = ("_bias", "_pad_in", "_pad_out", "_tiles", "_transposed")

    def __init__(
        self, transposed: Tensor, bias: Tensor | None, tiles: RowTiles, pads: tuple[Tensor, Tensor]
    ) -> None:
        self._transposed = transposed
        self._bias = bias
        self._tiles = tiles
        self._pad_in, self._pad_out = pads

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Linear`."""
        pieces = self._tiles.cut(x.shape[0])
        if len(pieces) == 1 and pieces[0][1] == pieces[0][2] and _aligned(x, out):
            torch.mm(x, self._transposed, out=out)
        else:
            for start, rows, size in pieces:
                self._multiply_piece(x[start : start + rows], out[start : start + rows], size)
        if self._bias is not None:
            out.add_(self._bias)

    def _multiply_piece(self, x: Tensor, out: Tensor, size: int) -> None:
        rows = x.shape[0]
        if rows == size and _aligned(x, out):
            torch.mm(x, self._transposed, out=out)
        else:
            self._pad_in[:rows].copy_(x)
            torch.mm(self._pad_in[:size], self._transposed, out=self._pad_out[:size])
            out.copy_(self._pad_out[:rows])


def _aligned(x: Tensor, out: Tensor) -> bool:
    return (x.data_ptr() | out.data_ptr()) % _ALIGNED_BYTES == 0


def _as_stored(weight: Tensor) -> Tensor:
    return weight.t()


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


_LAYOUTS: dict[bool, tuple[Layout, ...]] = {True: (_turned, _as_stored), False: (_as_stored,)}
"""By whether it is float32: MKL's rows agree far more often with the weight stored `[in, out]`, but those of
a narrow weight, such as a router's, with `[out, in]`. oneDNN's bfloat16 likes `[out, in]`."""

_known: dict[tuple[object, ...], tuple[Layout, RowTiles]] = {}
"""What was measured in this process, by matrix shape, dtype, rows and threads: facts about machine and
library."""


class Pads:
    """What calls are padded in, by the size of it: shared by layers that run one after another."""

    def __init__(self) -> None:
        self._pads: dict[tuple[object, ...], Tensor] = {}

    def of(self, place: str, like: Tensor, *size: int) -> Tensor:
        """A tensor of that size in the dtype of `like`; "in" and "out" are two. All of it is in memory."""
        key = (place, like.dtype, *size)
        if key not in self._pads:
            self._pads[key] = like.new_empty(size).zero_()
        return self._pads[key]


def torch_linear(
    weight: Tensor, bias: Tensor | None, *, rows_max: int, pads: Pads | None = None
) -> TorchLinear:
    """A layer for `weight` `[out, in]`, which it may keep or repack; made for `rows_max` rows at a time."""
    return torch_linears(weight, bias, count=1, rows_max=rows_max, pads=pads)[0]


def torch_linears(
    weight: Tensor, bias: Tensor | None, *, count: int, rows_max: int, pads: Pads | None = None
) -> list[TorchLinear]:
    """As `torch_linear`, for `count` weights stacked along the first dimension."""
    out_features, in_features = weight.shape[0] // count, weight.shape[1]
    key = (in_features, out_features, weight.dtype, rows_max, torch.get_num_threads())
    if key not in _known:
        _known[key] = _best_layout(in_features, out_features, weight.dtype, rows_max)
    layout, tiles = _known[key]
    rows = tiles.sizes[-1]
    pads = pads or Pads()
    own_pads = pads.of("in", weight, rows, in_features), pads.of("out", weight, rows, out_features)
    biases = (None,) * count if bias is None else bias.chunk(count)
    return [
        TorchLinear(layout(part), own, tiles, own_pads)
        for part, own in zip(weight.chunk(count), biases, strict=True)
    ]


def _best_layout(
    in_features: int, out_features: int, dtype: torch.dtype, rows_max: int
) -> tuple[Layout, RowTiles]:
    """The layout whose anchor is the first that there is, or else the largest; the earlier of equal ones.

    The anchor does not depend on `rows_max`: an engine of fewer rows computes the same bits.
    """
    samples, weight = cancelling(in_features, out_features, dtype)
    best = 0, _as_stored, RowTiles((1,))
    for layout in _LAYOUTS[dtype == torch.float32]:
        product = partial(_multiply, layout(weight))
        anchor, sizes = agreeing_rows(product, samples, rows_max=rows_max)
        if anchor > best[0]:
            best = anchor, layout, RowTiles(sizes)
        if anchor == ANCHORS[0]:
            break
    return best[1:]


def _multiply(transposed: Tensor, x: Tensor) -> Tensor:
    return torch.mm(x, transposed)
