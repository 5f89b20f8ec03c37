"""The arithmetic on one KV tile, shared by decode and chunks so that both give the same bits, and where in
the cache a step's tokens are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import Int64Array, token_rows
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import RowTiles, agreeing_rows, cancelling
from penstock.engine.layers.rowwise import soft_cap_
from penstock.models.spec import AttentionSpec
from penstock.types import BLOCK_TOKENS

TILE_TOKENS = 128
TILE_BLOCKS = TILE_TOKENS // BLOCK_TOKENS

_MATRICES = (1, 2, 3, 8)
"""Numbers of tiles of one batched product for which row counts are compared: a library may share few among
threads otherwise."""
_ROWS_MAX = 128
"""Query rows of one product at most: more are faster by little, and all sizes are compared at the start."""


@dataclass(slots=True, frozen=True)
class TileShape:
    """The sizes that attention's scratch and products are made of."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tiles: RowTiles
    """Query rows of one product. For any number of rows, the same in every configuration."""
    scale: float
    softcap: float
    """See `AttentionSpec`."""

    @classmethod
    def of(cls, cache: KVCache, num_heads: int, spec: AttentionSpec) -> Self:
        """For the heads of `cache` and `num_heads` query heads."""
        scale = cache.head_dim**-0.5 if spec.scale is None else spec.scale
        tiles = query_tiles(cache.num_kv_heads, cache.head_dim, cache.dtype, torch.get_num_threads())
        return cls(num_heads, cache.num_kv_heads, cache.head_dim, tiles, scale, spec.softcap)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def score(self, products: Tensor, out: Tensor) -> None:
        """Scores from the products of queries and keys, before any mask."""
        out.copy_(products).mul_(self.scale)
        if self.softcap:
            soft_cap_(out, self.softcap)


@cache
def query_tiles(num_kv_heads: int, head_dim: int, dtype: torch.dtype, _num_threads: int) -> RowTiles:
    """Row counts for which both products of a tile agree in every place, batched over tiles and over
    heads.
    """
    samples, keys = cancelling(head_dim, TILE_TOKENS, dtype)
    of_keys = _agreeing(samples, keys, num_kv_heads, lambda kv: kv.transpose(-1, -2))
    samples, values = cancelling(TILE_TOKENS, head_dim, dtype)
    of_values = _agreeing(samples, values.t(), num_kv_heads, lambda kv: kv)
    # Single rows have no company; see layers/linear.py.
    return RowTiles(tuple(sorted(of_keys & of_values)) or (1,))


def _agreeing(
    samples: Tensor, operand: Tensor, num_kv_heads: int, turn: Callable[[Tensor], Tensor]
) -> set[int]:
    """For the products of `operand` `[TILE_TOKENS, head_dim]`, `turn`ed, as `chunk` and `decode` call
    them.
    """
    kv = operand[None, :, None].repeat(max(_MATRICES), 1, num_kv_heads, 1)

    def product(x: Tensor) -> Tensor:
        by_tile = [turn(kv[:count, :, -1]) for count in _MATRICES]
        by_head = turn(kv[0].transpose(0, 1))
        return torch.cat([torch.bmm(x.repeat(len(each), 1, 1), each) for each in (*by_tile, by_head)])

    return set(agreeing_rows(product, samples, rows_max=_ROWS_MAX)[1])


def logsumexp_of(scores: Tensor, weights: Tensor) -> Tensor:
    """`log(sum(exp(scores)))` over the last dimension, from the softmax `weights` that are there anyway.

    The largest weight is `exp(0) / sum`, so the sum needs no pass of its own.
    """
    return scores.amax(-1).sub_(weights.amax(-1).log_())


def merge_factors(running: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of merging a tile: (new running maximum, factor of what was merged so far, factor of the
    tile).

    `running` starts at -inf. A tile with logsumexp -inf leaves everything as it was: factors 1 and 0.
    """
    top = torch.maximum(running, logsumexp)
    return top, torch.sub(running, top).exp_(), torch.sub(logsumexp, top).exp_()


def slot_indices(batch: AttentionBatch, *, slots_per_block: int) -> Int64Array:
    """For every token of the step: the index of its first-layer key in `KVCache.slots`."""
    rows, offsets = token_rows(batch.num_tokens)
    positions = batch.num_computed[rows] + offsets
    blocks = batch.block_tables[rows, positions // BLOCK_TOKENS].astype(np.int64)
    return blocks * slots_per_block + positions % BLOCK_TOKENS
