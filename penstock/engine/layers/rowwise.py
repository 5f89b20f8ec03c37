"""Operations on single rows: norm, soft cap, embedding. A row's bits do not depend on the batch."""

from typing import Any, cast

import torch
from torch import Tensor

_linalg = cast(Any, torch.linalg)  # Its stubs declare no types.


class RMSNorm:
    """`x / rms(x) * weight` over the last dimension, in float32 inside (Zhang and Sennrich 2019, arXiv
    1910.07467).
    """

    __slots__ = ("_eps", "_scale", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._scale = 1.0 / weight.shape[-1]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised rows of `x` `[..., size]` to `out` (same shape)."""
        # Only exactly rounded operations and per-row sums: a row's bits do not depend on the batch.
        norm: Tensor = _linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        norm.mul_(norm).mul_(self._scale).add_(self._eps).rsqrt_()
        torch.mul(x, norm, out=out)
        out.mul_(self._weight)

    def add(self, residual: Tensor, x: Tensor, out: Tensor) -> None:
        """Add `x` to `residual` in place and write the normalised sum to `out`; all `[num_rows, size]`."""
        residual.add_(x)
        self(residual, out)


# Soft caps of scores and logits (Gemma Team 2024, arXiv 2408.00118).


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Turn `x` (float32) into `cap * tanh(x / cap)` in place, whatever its shape."""
    # As 1 - 2 / (exp(2x) + 1): torch's own tanh rounds a vector's tail otherwise, so its bits depend on the
    # batch.
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).mul_(cap)


# Token embeddings: rows of a table, for some families scaled.


class Embedding:
    """Rows of a `[vocab_size, hidden]` table."""

    __slots__ = ("_table",)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """Write the rows of `token_ids` `[num_tokens]` to `out` `[num_tokens, hidden]`."""
        torch.index_select(self._table, 0, token_ids, out=out)


class ScaledEmbedding(Embedding):
    """Rows times a constant that has the table's precision (Gemma)."""

    __slots__ = ("_scale",)

    def __init__(self, table: Tensor, scale: float) -> None:
        super().__init__(table)
        self._scale = float(torch.tensor(scale, dtype=table.dtype))

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """See `Embedding`."""
        super().__call__(token_ids, out)
        out.mul_(self._scale)
