"""Attention of chunks of prompts: row by row, KV tile by KV tile, with a mask only where sight ends inside a
tile.

A tile is computed for those queries that see any of it: with a window they lie between two bounds.
"""

import math

import torch
from torch import Tensor

from penstock.engine.arrays import Int32Array, as_tensor
from penstock.engine.attention.tiles import TILE_BLOCKS, TILE_TOKENS, TileShape, logsumexp_of, merge_factors
from penstock.engine.kv_cache import KVCache
from penstock.types import BLOCK_TOKENS

ChunkRow = tuple[int, int, int, Int32Array]
"""(first token within the step, computed tokens, new tokens, block table)."""


class _Chunk:
    """One row's chunk, prepared for all layers."""

    __slots__ = ("computed", "num_tiles", "num_tokens", "pages", "start")

    def __init__(self, row: ChunkRow, cache: KVCache, page_steps: Tensor) -> None:
        self.start, self.computed, self.num_tokens, table = row
        end = self.computed + self.num_tokens
        self.num_tiles = -(-end // TILE_TOKENS)
        held = -(-end // BLOCK_TOKENS)
        blocks = torch.full((self.num_tiles * TILE_BLOCKS,), cache.zero_block)
        blocks[:held] = as_tensor(table[:held])
        first = (blocks * cache.pages_per_block).view(self.num_tiles, 1, 1, TILE_BLOCKS)
        self.pages = (first + page_steps).flatten(2)
        """`[num_tiles, num_layers, 2 * TILE_BLOCKS]` into the cache's pages: keys, then values."""

    def first_tile(self, window: int) -> int:
        """The first tile that any of the chunk's queries sees."""
        return max(self.computed - window + 1, 0) // TILE_TOKENS if window else 0

    def seeing(self, tile: int, window: int) -> tuple[int, int]:
        """The chunk's tokens, from first to before last, that see something of the tile."""
        first = max(tile * TILE_TOKENS - self.computed, 0)
        if not window:
            return first, self.num_tokens
        return first, min((tile + 1) * TILE_TOKENS - 1 + window - self.computed, self.num_tokens)


class ChunkAttention:
    """Scratch and steps of the row-by-row path; takes any number of new tokens per row."""

    def __init__(
        self, cache: KVCache, shape: TileShape, windows: tuple[int, ...], *, max_tokens: int
    ) -> None:
        self._cache, self._shape, self._windows = cache, shape, windows
        self._chunks: list[_Chunk] = []
        layers = torch.arange(cache.num_layers).view(-1, 1, 1)
        self._page_steps = layers * 2 + torch.arange(2).view(1, -1, 1)
        self._kv = cache.pages.new_empty(2, TILE_TOKENS, shape.num_kv_heads, shape.head_dim)
        rows, at_once = max_tokens * shape.group, shape.tiles.sizes[-1]
        heads = shape.num_kv_heads
        # Padding of the last product: whatever lies there.
        self._queries = cache.pages.new_zeros(heads, rows + at_once, shape.head_dim)
        self._raw = cache.pages.new_zeros(heads * at_once * TILE_TOKENS)
        self._product = cache.pages.new_empty(heads * at_once * shape.head_dim)
        self._scores = torch.empty(heads * rows * TILE_TOKENS, device=cache.pages.device)
        self._weights = torch.empty_like(self._scores)
        self._merged, self._partial = torch.empty(2, heads * rows * shape.head_dim, device=cache.pages.device)
        unseen = torch.ones(TILE_TOKENS, TILE_TOKENS, dtype=torch.bool).triu(1)
        self._diagonal = torch.zeros(TILE_TOKENS, TILE_TOKENS).masked_fill_(unseen, -torch.inf)
        """`[query, key]` positions within a tile: 0 where the key is not after the query, else -inf."""

    def commit(self) -> None:
        """Write to every page of the scratch, so that all of it is in memory."""
        for each in (self._kv, self._queries, self._raw, self._product, self._scores, self._weights):
            each.zero_()
        self._merged.zero_()
        self._partial.zero_()

    def begin(self, rows: list[ChunkRow]) -> None:
        """Prepare the step's chunks."""
        self._chunks = [_Chunk(row, self._cache, self._page_steps) for row in rows]

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """`q`, `out`: `[num_tokens, num_heads, head_dim]` of the whole step; only the chunks' tokens are
        touched.
        """
        for chunk in self._chunks:
            tokens = slice(chunk.start, chunk.start + chunk.num_tokens)
            self._attend_chunk(layer, chunk, q[tokens], out[tokens])

    def _attend_chunk(self, layer: int, chunk: _Chunk, q: Tensor, out: Tensor) -> None:
        shape, n = self._shape, chunk.num_tokens
        # [kv head, token, query of the group, dim]: a group's queries are neighbouring rows of one product.
        by_head = q.view(n, shape.num_kv_heads, shape.group, -1).transpose(0, 1)
        rows = n * shape.group
        self._queries[:, :rows].view(shape.num_kv_heads, n, shape.group, -1).copy_(by_head)
        top = torch.full((shape.num_kv_heads, rows), -torch.inf)
        den = torch.zeros_like(top)
        size = (shape.num_kv_heads, rows, shape.head_dim)
        acc = self._merged[: math.prod(size)].view(size).zero_()
        window = self._windows[layer]
        for tile in range(chunk.first_tile(window), chunk.num_tiles):
            first, last = chunk.seeing(tile, window)
            seeing = slice(first * shape.group, last * shape.group)
            logsumexp, partial = self._tile(layer, chunk, tile, (first, last))
            top[:, seeing], keep, add = merge_factors(top[:, seeing], logsumexp)
            den[:, seeing].mul_(keep).add_(add)
            acc[:, seeing].mul_(keep[..., None]).add_(partial.mul_(add[..., None]))
        acc.div_(den[..., None])
        out.view(n, shape.num_kv_heads, shape.group, -1).transpose(0, 1).copy_(
            acc.view(shape.num_kv_heads, n, shape.group, -1)
        )

    def _tile(self, layer: int, chunk: _Chunk, tile: int, seeing: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """One tile for the chunk's tokens `first..last`: (logsumexp `[heads, rows]`, output
        `[heads, rows, dim]`).
        """
        shape, heads = self._shape, self._shape.num_kv_heads
        first, last = seeing
        rows = (last - first) * shape.group
        torch.index_select(
            self._cache.pages, 0, chunk.pages[tile, layer], out=self._kv.view(2 * TILE_BLOCKS, -1)
        )
        keys, values = self._kv[0].permute(1, 2, 0), self._kv[1].transpose(0, 1)
        scores = self._scores[: heads * rows * TILE_TOKENS].view(heads, rows, TILE_TOKENS)
        weights = self._weights[: heads * rows * TILE_TOKENS].view_as(scores)
        partial = self._partial[: heads * rows * shape.head_dim].view(heads, rows, -1)
        pieces = shape.tiles.cut(rows)
        for start, kept, size in pieces:
            begin = first * shape.group + start
            raw = self._raw[: heads * size * TILE_TOKENS].view(heads, size, TILE_TOKENS)
            torch.bmm(self._queries[:, begin : begin + size], keys, out=raw)
            shape.score(raw[:, :kept], scores[:, start : start + kept])
        offset = chunk.computed + first - tile * TILE_TOKENS
        self._mask_diagonal(scores, offset)
        self._mask_window(scores, offset, self._windows[layer])
        torch.softmax(scores, -1, out=weights)
        for start, kept, size in pieces:
            raw = self._raw[: heads * size * TILE_TOKENS].view(heads, size, TILE_TOKENS)
            product = self._product[: heads * size * shape.head_dim].view(heads, size, -1)
            raw[:, :kept].copy_(weights[:, start : start + kept])
            torch.bmm(raw, values, out=product)
            partial[:, start : start + kept].copy_(product[:, :kept])
        return logsumexp_of(scores, weights), partial

    def _mask_diagonal(self, scores: Tensor, offset: int) -> None:
        """Hide later keys from the queries that lie in this tile; the first has position `offset` in it."""
        if offset >= TILE_TOKENS:
            return
        heads, rows, _ = scores.shape
        crossing = min(TILE_TOKENS - offset, rows // self._shape.group)
        inside = scores[:, : crossing * self._shape.group].view(
            heads, crossing, self._shape.group, TILE_TOKENS
        )
        inside.add_(self._diagonal[offset : offset + crossing, None])

    def _mask_window(self, scores: Tensor, offset: int, window: int) -> None:
        """Hide keys that lie before the window; the first query has position `offset` as the tile counts."""
        heads, rows, _ = scores.shape
        tokens = rows // self._shape.group
        if not window or offset + tokens <= window:
            return
        queries = torch.arange(offset, offset + tokens)[:, None]
        hidden = torch.arange(TILE_TOKENS) <= queries - window
        scores.view(heads, tokens, self._shape.group, TILE_TOKENS).masked_fill_(hidden[:, None], -torch.inf)
