"""The arithmetic on one KV tile, shared by decode and chunks so that both give the same bits."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.softcap import soft_cap_
from penstock.engine.models.spec import AttentionSpec
from penstock.types import BLOCK_TOKENS

TILE_TOKENS = 128
TILE_BLOCKS = TILE_TOKENS // BLOCK_TOKENS

_ROWS_MIN = 8
"""Products with fewer query rows than this may take another path in the BLAS, with other bits: they are padded.
Measured: MKL's float32 does below 6 rows (head_dim 128), oneDNN's bfloat16 sometimes below 4."""


@dataclass(slots=True, frozen=True)
class TileShape:
    """The sizes that attention's scratch and products are made of."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows_min: int
    """Query rows of one product at least."""
    scale: float
    softcap: float
    """See `AttentionSpec`."""

    @classmethod
    def of(cls, cache: KVCache, num_heads: int, spec: AttentionSpec) -> Self:
        """For the heads of `cache` and `num_heads` query heads."""
        scale = cache.head_dim**-0.5 if spec.scale is None else spec.scale
        return cls(num_heads, cache.num_kv_heads, cache.head_dim, _ROWS_MIN, scale, spec.softcap)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def score(self, products: Tensor, out: Tensor) -> None:
        """Scores from the products of queries and keys, before any mask."""
        out.copy_(products).mul_(self.scale)
        if self.softcap:
            soft_cap_(out, self.softcap)


def logsumexp_of(scores: Tensor, weights: Tensor) -> Tensor:
    """`log(sum(exp(scores)))` over the last dimension, from the softmax `weights` that are there anyway.

    The largest weight is `exp(0) / sum`, so the sum needs no pass of its own.
    """
    return scores.amax(-1).sub_(weights.amax(-1).log_())


def merge_factors(running: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of merging a tile: (new running maximum, factor of what was merged so far, factor of the tile).

    `running` starts at -inf. A tile with logsumexp -inf leaves everything as it was: factors 1 and 0.
    """
    top = torch.maximum(running, logsumexp)
    return top, torch.sub(running, top).exp_(), torch.sub(logsumexp, top).exp_()
