"""Positions to places: where in the cache a step's tokens are stored."""

import numpy as np
import numpy.typing as npt

from penstock.engine.attention.base import AttentionBatch, Int32Array
from penstock.types import BLOCK_TOKENS

Int64Array = npt.NDArray[np.int64]


def token_rows(num_tokens: Int32Array) -> tuple[Int64Array, Int64Array]:
    """For every token of the step: its row, and its index within the row's chunk."""
    rows = np.repeat(np.arange(len(num_tokens)), num_tokens)
    starts = np.cumsum(num_tokens, dtype=np.int64) - num_tokens
    return rows, np.arange(len(rows)) - starts[rows]


def slot_indices(batch: AttentionBatch, *, slots_per_block: int) -> Int64Array:
    """For every token of the step: the index of its first-layer key in `KVCache.slots`."""
    rows, offsets = token_rows(batch.num_tokens)
    positions = batch.num_computed[rows] + offsets
    blocks = batch.block_tables[rows, positions // BLOCK_TOKENS].astype(np.int64)
    return blocks * slots_per_block + positions % BLOCK_TOKENS
