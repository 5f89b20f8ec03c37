"""Batched paged attention on the CPU, in torch, with results that do not depend on the batch.

A row's context is cut into fixed KV tiles of 128 tokens (8 blocks):

    positions   0 ......... 127 | 128 ....... 255 | 256 ... (padded with the zero block)
    tile               0                 1                2

Every tile gives a normalised output and the logarithm of its sum of exponentials; tiles are merged in
order of position by the running rule of FlashAttention (Dao et al. 2022, arXiv 2205.14135). A tile that
a query does not see has logsumexp -inf and changes nothing, bit for bit. So a token's bits depend neither
on the other rows nor on the chunk it came in.

The queries of a GQA group are the rows of one matrix per key/value head (a matrix-vector product per
query head would be 20 times slower). Single tokens of all rows go together (`decode.py`): all their tiles are
gathered into one scratch and are one batched product per head. Chunks (`chunk.py`) go row by row and tile by
tile: only the tile on the diagonal has a mask.
"""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.attention.chunk import ChunkAttention
from penstock.engine.attention.decode import DecodeAttention
from penstock.engine.attention.tiles import TILE_TOKENS, TileShape, slot_indices
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rotary import QKRotary, RotaryWeights
from penstock.models.spec import AttentionSpec
from penstock.types import BLOCK_TOKENS

SCRATCH_BYTES_MAX = 32 * 1024 * 1024


class CpuAttention:
    """See `Attention` for the contract and the module for how it is kept."""

    def __init__(
        self,
        cache: KVCache,
        rotary: RotaryWeights,
        spec: AttentionSpec = AttentionSpec(),  # noqa: B008  (frozen)
        *,
        max_tokens: int,
    ) -> None:
        self._cache = cache
        shape = TileShape.of(cache, rotary.num_heads, spec)
        windows = tuple(spec.window(layer) for layer in range(cache.num_layers))
        self._decode = DecodeAttention(cache, shape, windows, scratch_bytes_max=SCRATCH_BYTES_MAX)
        self._chunk = ChunkAttention(cache, shape, windows, max_tokens=max_tokens)
        self._rotary = QKRotary(rotary, max_tokens, cache.tensor.device)
        self._num_qk = rotary.num_heads + rotary.num_kv_heads
        self._kv = cache.slots.new_empty(2 * max_tokens, cache.num_kv_heads, cache.head_dim)
        self._slots = torch.empty(0)
        self._single_index = torch.empty(0)
        self._all_single = False

    @contextmanager
    def rehearsing(self, *, max_rows: int, max_model_len: int) -> Generator[None]:
        """Take all the memory that steps of `max_rows` rows of `max_model_len` tokens may need; see
        `StepModel`.
        """
        self._decode.commit(max_rows * -(-max_model_len // TILE_TOKENS))
        self._chunk.commit()
        yield

    def begin(self, batch: AttentionBatch) -> None:
        """See `Attention`."""
        self._slots = self._layer_slots(batch)
        self._rotary.begin(batch.positions)
        starts = np.cumsum(batch.num_tokens, dtype=np.int64) - batch.num_tokens
        num_tiles = -(-(batch.num_computed + batch.num_tokens) // TILE_TOKENS)
        single = (batch.num_tokens == 1) & (num_tiles <= self._decode.tiles_max)
        rows = np.flatnonzero(single)
        self._all_single = len(rows) == len(batch.num_tokens)
        self._single_index = as_tensor(starts[rows])
        self._decode.begin(batch.block_tables[rows], batch.num_computed[rows] + 1)
        self._chunk.begin(
            [
                (
                    int(starts[row]),
                    int(batch.num_computed[row]),
                    int(batch.num_tokens[row]),
                    batch.block_tables[row],
                )
                for row in np.flatnonzero(~single)
            ]
        )

    def _layer_slots(self, batch: AttentionBatch) -> Tensor:
        """`[num_layers, 2 * num_tokens]` indices into the cache's slots: keys, then values."""
        pages = self._cache.pages_per_block
        first = as_tensor(slot_indices(batch, slots_per_block=pages * BLOCK_TOKENS))
        steps = torch.arange(0, pages * BLOCK_TOKENS, BLOCK_TOKENS).view(-1, 2, 1)
        return (first + steps).flatten(1)

    def store(self, layer: int, qkv: Tensor, q: Tensor) -> None:
        """See `Attention`."""
        num_tokens = qkv.shape[0]
        # Keys and values one after the other, so that one indexed copy writes both.
        kv = self._kv[: 2 * num_tokens]
        self._rotary(layer, qkv[:, : self._num_qk], q, kv[:num_tokens])
        kv[num_tokens:].copy_(qkv[:, self._num_qk :])
        self._cache.slots.index_copy_(0, self._slots[layer], kv.flatten(1))

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """See `Attention`."""
        if self._all_single:
            self._decode.attend(layer, q, out)
            return
        if len(self._single_index):
            picked = q.index_select(0, self._single_index)
            result = torch.empty_like(picked)
            self._decode.attend(layer, picked, result)
            out.index_copy_(0, self._single_index, result)
        self._chunk.attend(layer, q, out)
