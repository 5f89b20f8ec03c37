"""Linear layers whose rows do not depend on the batch: `out = x W^T + b`."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

# Which row counts a matrix product may be called with, so that no row depends on its neighbours.
#
# A BLAS picks its kernel by shape: the same row can come out a bit different in a call of 3 rows and of
# 300, and in the first and the last place of one call (where the edge of a tile has a kernel of its own, or
# threads share the rows). Then greedy text changes with the load. Which calls agree depends on the matrix,
# the type, the library, the number of threads and the processor, and no library says it. So we ask, once,
# when the model is wired: for every weight shape, which row counts give a row the same bits in *every*
# place, and the same as each other? Every product is cut into calls of only those sizes (the last one
# padded), from memory that is aligned alike.
#
# A call of one row is always among the answers: it has no place to differ by, and no company. So where a
# library treats every place differently, rows are multiplied one by one, which is slow and right. See He et
# al. 2025, "Defeating Nondeterminism in LLM Inference".

ANCHORS = (16, 32, 64, 8, 4, 2, 1)
"""Calls of the first of these sizes whose places all agree say what is right. All of them are asked for,
however few rows an engine takes at once: engines with other limits give the same bits."""
CANDIDATE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
_OUTPUTS_COMPARED = 256
"""Outputs per place, at least: two orders of summation may give the same bits in five of six outputs (of 40
bfloat16 terms, with AVX-512)."""

Product = Callable[[Tensor], Tensor]
"""From `[rows, in]` to `[rows, out]`, or to several of those, `[any, rows, out]`, which should be equal."""

Layout = Callable[[Tensor], Tensor]
"""From a weight `[out, in]` to the `[in, out]` operand that is multiplied with (a view or a copy)."""

Piece = tuple[int, int, int]
"""(first row, rows that count, rows of the call): the last two differ where the piece is padded."""


class RowTiles:
    """The row counts that may be used for one weight shape, and how to cut any number of rows into them."""

    __slots__ = ("_cuts", "sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        assert sizes
        self.sizes = tuple(sorted(sizes))
        self._cuts: dict[int, tuple[Piece, ...]] = {}

    def cut(self, num_rows: int) -> tuple[Piece, ...]:
        """Pieces that cover `num_rows` rows. Remembered, so that steady state costs a lookup."""
        pieces = self._cuts.get(num_rows)
        if pieces is None:
            pieces = self._cuts[num_rows] = tuple(self._pieces(num_rows))
        return pieces

    def _pieces(self, num_rows: int) -> list[Piece]:
        pieces: list[Piece] = []
        start = 0
        while start < num_rows:
            left = num_rows - start
            above = next((size for size in self.sizes if size >= left), None)
            below = next((size for size in reversed(self.sizes) if size <= left), None)
            # One padded call beats several small ones, unless more than half of it would be padding.
            size = above if above is not None and (below is None or above <= 2 * left) else below
            assert size is not None
            pieces.append((start, min(size, left), size))
            start += size
        return pieces


def agreeing_rows(product: Product, samples: Tensor, *, rows_max: int) -> tuple[int, tuple[int, ...]]:
    """The anchor, and the row counts that may be called for up to `rows_max` rows: see the module.

    Args:
        product: what is asked for, with its weight.
        samples: `[num_samples, in]`, rows that `cancelling` made together with the weight. One after another
            fills all places of a call, so that all its results must be equal.
        rows_max: no more rows are there at once, so that larger calls need not be tried.
    """
    # Rounded up, for a padded call may be larger than what it is for.
    limit = next((rows for rows in CANDIDATE_ROWS if rows >= max(rows_max, ANCHORS[0])), CANDIDATE_ROWS[-1])

    def result(rows: int) -> Tensor | None:
        """`[num_samples, out]` of a call of so many rows, or None if its places do not agree."""
        rows_of_samples: list[Tensor] = []
        for sample in samples:
            out = product(sample.expand(rows, -1).contiguous())
            first = out.view(-1, out.shape[-1])[0]
            if not torch.equal(out, first.expand_as(out)):
                return None
            rows_of_samples.append(first)
        return torch.stack(rows_of_samples)

    anchor, right = next((rows, found) for rows in ANCHORS if (found := result(rows)) is not None)

    def agrees(rows: int) -> bool:
        return (found := result(rows)) is not None and torch.equal(found, right)

    sizes = tuple(rows for rows in CANDIDATE_ROWS if rows == anchor or (rows <= limit and agrees(rows)))
    return anchor, sizes


def cancelling(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x [few, in]` and `w [out, in]` with `x w^T = 0`: terms come in pairs of opposite sign, far apart.

    So the result is nothing but rounding noise, and any other order of summation shows in almost every
    output. (With ordinary numbers bfloat16 hides it: about one output in ten thousand differs, just enough to
    break a promise and too few to find.)
    """
    generator = torch.Generator().manual_seed(in_features)
    half = in_features // 2
    order = torch.randperm(in_features, generator=generator)
    first, second = order[:half], order[half : 2 * half]
    x = torch.zeros(-(-_OUTPUTS_COMPARED // out_features), in_features, dtype=dtype)
    x[:, first] = x[:, second] = torch.randn(len(x), half, generator=generator).to(dtype)
    few = torch.zeros(min(out_features, 256), in_features, dtype=dtype)
    few[:, first] = torch.randn(len(few), half, generator=generator).to(dtype)
    few[:, second] = -few[:, first]
    return x, few.repeat(-(-out_features // len(few)), 1)[:out_features]


_ALIGNED_BYTES = 64
"""Torch's allocations begin at a multiple of this. Where it begins may choose the kernel: operands that lie
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

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it computes with, as they lie in memory."""
        ...


class TorchLinear:
    """A dense weight, multiplied by torch in row counts that agree with each other.

    The weight's type may be wider than that of the rows: they are widened for the product, and rounded after
    it.
    """

    __slots__ = ("_bias", "_pad_in", "_pad_out", "_tiles", "_transposed")

    def __init__(
        self, transposed: Tensor, bias: Tensor | None, tiles: RowTiles, pads: tuple[Tensor, Tensor]
    ) -> None:
        self._transposed = transposed
        self._bias = bias
        self._tiles = tiles
        self._pad_in, self._pad_out = pads

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it computes with: the weight, perhaps a copy in another order, and the bias."""
        return (self._transposed,) if self._bias is None else (self._transposed, self._bias)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Linear`."""
        pieces = self._tiles.cut(x.shape[0])
        if len(pieces) == 1 and pieces[0][1] == pieces[0][2] and self._fits(x, out):
            torch.mm(x, self._transposed, out=out)
        else:
            for start, rows, size in pieces:
                self._multiply_piece(x[start : start + rows], out[start : start + rows], size)
        if self._bias is not None:
            out.add_(self._bias)

    def _fits(self, x: Tensor, out: Tensor) -> bool:
        """The product can be made without copies."""
        return x.dtype is self._transposed.dtype and (x.data_ptr() | out.data_ptr()) % _ALIGNED_BYTES == 0

    def _multiply_piece(self, x: Tensor, out: Tensor, size: int) -> None:
        rows = x.shape[0]
        if rows == size and self._fits(x, out):
            torch.mm(x, self._transposed, out=out)
        else:
            self._pad_in[:rows].copy_(x)
            torch.mm(self._pad_in[:size], self._transposed, out=self._pad_out[:size])
            out.copy_(self._pad_out[:rows])


def _as_stored(weight: Tensor) -> Tensor:
    return weight.t()


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


_LAYOUTS: dict[bool, tuple[Layout, ...]] = {True: (_turned, _as_stored), False: (_as_stored,)}
"""By whether it is float32: MKL's rows agree far more often with the weight stored `[in, out]`, but those of
a narrow weight, such as a router's, with `[out, in]`. oneDNN's bfloat16 likes `[out, in]`."""

_known: dict[tuple[object, ...], tuple[Layout, RowTiles]] = {}
"""Measurements of this process, by matrix shape, dtype, rows and threads: facts about machine and
library."""


class Calls:
    """The type that layers multiply in, and the buffers that their calls are padded in, by their size: shared
    by layers that run one after another.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._pads: dict[tuple[object, ...], Tensor] = {}

    def pad(self, place: str, *size: int) -> Tensor:
        """A tensor of that size; "in" and "out" are two. All of it is in memory."""
        key = (place, *size)
        if key not in self._pads:
            self._pads[key] = torch.empty(size, dtype=self.dtype).zero_()
        return self._pads[key]


def torch_linear(
    weight: Tensor, bias: Tensor | None, *, rows_max: int, calls: Calls | None = None
) -> TorchLinear:
    """A layer for `weight` `[out, in]`, which it may keep or repack; made for `rows_max` rows at a time."""
    return torch_linears(weight, bias, count=1, rows_max=rows_max, calls=calls)[0]


def torch_linears(
    weight: Tensor, bias: Tensor | None, *, count: int, rows_max: int, calls: Calls | None = None
) -> list[TorchLinear]:
    """As `torch_linear`, for `count` weights stacked along the first dimension."""
    calls = calls or Calls(weight.dtype)
    out_features, in_features = weight.shape[0] // count, weight.shape[1]
    key = (in_features, out_features, calls.dtype, rows_max, torch.get_num_threads())
    if key not in _known:
        _known[key] = _best_layout(in_features, out_features, calls.dtype, rows_max)
    layout, tiles = _known[key]
    rows = tiles.sizes[-1]
    own_pads = calls.pad("in", rows, in_features), calls.pad("out", rows, out_features)
    biases = (None,) * count if bias is None else bias.chunk(count)
    return [
        TorchLinear(layout(part.to(calls.dtype)), own, tiles, own_pads)
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
