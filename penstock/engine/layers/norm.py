"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), one row at a time, in float32 inside."""

from typing import Any, cast

import torch
from torch import Tensor

_linalg = cast(Any, torch.linalg)  # Its stubs declare no types.


class RMSNorm:
    """`x / rms(x) * weight` over the last dimension."""

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
