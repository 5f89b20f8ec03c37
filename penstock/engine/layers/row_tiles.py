"""Which row counts a matrix multiplication may be called with, so that no row depends on its neighbours.

A BLAS picks its blocking by shape, so the same row can come out a bit different in a batch of 3 and of 300:
then greedy text changes with the load. Measured here (AMX, oneDNN and MKL): for one *fixed* number of rows
a row's result depends neither on its place nor on the other rows, but some numbers of rows disagree with others,
and which ones depends on the matrix, the type, the library and the processor. So we ask: for every weight shape
the row counts that agree bit for bit with the anchor are found once, when the model is wired, and every
multiplication is cut into pieces of only those sizes (the last piece padded). See He et al. 2025,
"Defeating Nondeterminism in LLM Inference".
"""

from collections.abc import Callable

import torch
from torch import Tensor

ANCHOR_ROWS = 16
"""Every result equals that of a call with this many rows."""
CANDIDATE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
_CALLS_COMPARED = 3


Layout = Callable[[Tensor], Tensor]
"""From a weight `[out, in]` to the `[in, out]` operand that is multiplied with (a view or a copy)."""

Piece = tuple[int, int, int]
"""(first row, rows that count, rows of the call): the last two differ where the piece is padded."""


class RowTiles:
    """The row counts that may be used for one weight shape, and how to cut any number of rows into them."""

    __slots__ = ("_cuts", "sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        assert ANCHOR_ROWS in sizes
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


def agreeing_rows(
    in_features: int, out_features: int, dtype: torch.dtype, rows_max: int, layout: Layout
) -> tuple[int, ...]:
    """The row counts up to `rows_max` whose results equal the anchor's bit for bit.

    Asked with a product that is exactly zero, so that its result is nothing but rounding noise: any other
    order of summation shows in almost every output. (With ordinary numbers bfloat16 hides it: about one output in
    ten thousand differs, just enough to break a promise and too few to find.)
    """
    limit = min(-(-rows_max // ANCHOR_ROWS) * ANCHOR_ROWS, CANDIDATE_ROWS[-1])
    sample, weight = _cancelling(limit, in_features, out_features, dtype)
    transposed = layout(weight)
    starts = range(0, limit, ANCHOR_ROWS)
    anchors = torch.cat([torch.mm(sample[start : start + ANCHOR_ROWS], transposed) for start in starts])

    def agrees(rows: int) -> bool:
        starts = range(0, limit - rows + 1, rows)[:_CALLS_COMPARED]
        return all(
            torch.equal(torch.mm(sample[i : i + rows], transposed), anchors[i : i + rows]) for i in starts
        )

    return tuple(rows for rows in CANDIDATE_ROWS if rows <= limit and (rows == ANCHOR_ROWS or agrees(rows)))


def _cancelling(rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x [rows, in]` and `w [out, in]` with `x w^T = 0`: terms come in pairs of opposite sign, far apart."""
    generator = torch.Generator().manual_seed(in_features)
    half = in_features // 2
    order = torch.randperm(in_features, generator=generator)
    first, second = order[:half], order[half : 2 * half]
    x = torch.zeros(rows, in_features, dtype=dtype)
    x[:, first] = x[:, second] = torch.randn(rows, half, generator=generator).to(dtype)
    few = torch.zeros(min(out_features, 256), in_features, dtype=dtype)
    few[:, first] = torch.randn(len(few), half, generator=generator).to(dtype)
    few[:, second] = -few[:, first]
    return x, few.repeat(-(-out_features // len(few)), 1)[:out_features]
