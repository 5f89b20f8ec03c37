"""Linear layers whose rows do not depend on the batch: `out = x W^T + b`."""

from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.layers.row_tiles import RowTiles, agreeing_rows


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
        if len(pieces) == 1 and pieces[0][1] == pieces[0][2]:
            torch.mm(x, self._transposed, out=out)
        else:
            self._multiply_pieces(x, out, pieces)
        if self._bias is not None:
            out.add_(self._bias)

    def _multiply_pieces(self, x: Tensor, out: Tensor, pieces: tuple[tuple[int, int, int], ...]) -> None:
        for start, rows, size in pieces:
            end = start + rows
            if rows == size:
                torch.mm(x[start:end], self._transposed, out=out[start:end])
            else:
                self._pad_in[:rows].copy_(x[start:end])
                torch.mm(self._pad_in[:size], self._transposed, out=self._pad_out[:size])
                out[start:end].copy_(self._pad_out[:rows])


_known_tiles: dict[tuple[object, ...], RowTiles] = {}
"""What was measured in this process, by matrix shape, dtype, rows and threads: facts about machine and library."""


def torch_linear(weight: Tensor, bias: Tensor | None, *, rows_max: int) -> TorchLinear:
    """A layer for `weight` `[out, in]`, which it may keep or repack; made for `rows_max` rows at a time."""
    return torch_linears(weight, bias, count=1, rows_max=rows_max)[0]


def torch_linears(weight: Tensor, bias: Tensor | None, *, count: int, rows_max: int) -> list[TorchLinear]:
    """As `torch_linear`, for `count` weights stacked along the first dimension: they share their scratch."""
    out_features, in_features = weight.shape[0] // count, weight.shape[1]
    key = (in_features, out_features, weight.dtype, rows_max, torch.get_num_threads())
    tiles = _known_tiles.get(key)
    if tiles is None:
        tiles = _known_tiles[key] = RowTiles(
            agreeing_rows(in_features, out_features, weight.dtype, rows_max, _layout)
        )
    rows = tiles.sizes[-1]
    pads = weight.new_zeros(rows, in_features), weight.new_empty(rows, out_features)
    biases = (None,) * count if bias is None else bias.chunk(count)
    return [
        TorchLinear(_layout(part), own, tiles, pads)
        for part, own in zip(weight.chunk(count), biases, strict=True)
    ]


def _layout(weight: Tensor) -> Tensor:
    """MKL's float32 rows agree far more often with the weight stored `[in, out]`; oneDNN's bfloat16 likes `[out, in]`."""
    return weight.t().contiguous() if weight.dtype == torch.float32 else weight.t()
