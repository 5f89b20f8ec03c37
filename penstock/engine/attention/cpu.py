"""Batched paged attention on the CPU, in torch, with results that do not depend on the batch.

A row's context is cut into fixed KV tiles of 128 tokens (8 blocks):

    positions   0 ......... 127 | 128 ....... 255 | 256 ... (padded with the zero block)
    tile               0                 1                2

Every tile gives a normalised output and the logarithm of its sum of exponentials; tiles are merged in
order of position by the running rule of FlashAttention (Dao et al. 2022, arXiv 2205.14135). A tile that
a query does not see has logsumexp -inf and changes nothing, bit for bit. So a token's bits depend neither
on the other rows nor on the chunk it came in.

The queries of a GQA group are the rows of one matrix per key/value head (a matrix-vector product per
query head would be 20 times slower). Single tokens of all rows go together (`DecodeAttention`): all their
tiles are gathered into one scratch and are one batched product per head. Chunks (`ChunkAttention`) go row by
row and tile by tile: only the tile on the diagonal has a mask.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import Int32Array, as_tensor
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.attention.tiles import (
    TILE_BLOCKS,
    TILE_TOKENS,
    TileShape,
    logsumexp_of,
    merge_factors,
    slot_indices,
)
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import QKRotary, RotaryWeights
from penstock.models.spec import AttentionSpec
from penstock.types import BLOCK_TOKENS

# Attention of rows with one new token each: all tiles of all rows in one batched product per head.


@dataclass(slots=True)
class _Group:
    """Some rows of the step whose tiles fit the scratch together, and what their layers share."""

    first: int
    last: int
    num_tiles: int
    pages: Tensor
    """`[num_layers, 2 * num_tiles * TILE_BLOCKS]` into the cache's pages: keys, then values."""
    row_of_tile: Tensor
    mask: Tensor
    """`[num_tiles, 1, TILE_TOKENS]` float32: 0 where a position is known and in the window, else -inf."""
    tiles_of_row: tuple[Tensor, Tensor] | None
    """Twice `[max_tiles, num_rows]` tile indices in order of position; None if every row has just one tile.
    Beyond a row's tiles the first names the unseen tile `num_tiles`, the second the row's own last tile."""


class DecodeAttention:
    """Scratch and steps of the batched path; sees only rows with one new token.

    Layers with the same window share what `begin` prepares; tiles before a window are not read.
    """

    def __init__(
        self, cache: KVCache, shape: TileShape, windows: tuple[int, ...], *, scratch_bytes_max: int
    ) -> None:
        self._cache, self._shape, self._windows = cache, shape, windows
        # The queries of a group are the rows of one product, if it may have so many; else each has its own.
        self._group = shape.group if shape.group <= shape.tiles.sizes[-1] else 1
        self._parts = shape.num_heads // self._group
        tile_bytes = 2 * TILE_TOKENS * cache.num_kv_heads * cache.head_dim * cache.dtype.itemsize
        self.tiles_max = max(scratch_bytes_max // tile_bytes, 1)
        """A row with more tiles than this goes the way of the chunks."""
        self._groups: dict[int, list[_Group]] = {}
        """By window."""
        self._scratch: _Scratch | None = None
        layers = torch.arange(cache.num_layers).view(-1, 1, 1)
        self._page_steps = layers * 2 + torch.arange(2).view(1, -1, 1)

    def commit(self, num_tiles: int) -> None:
        """Put the scratch that `num_tiles` tiles at once can need in memory: it is never grown after that."""
        if self._scratch is None or self._scratch.num_tiles < min(num_tiles, self.tiles_max):
            self._scratch = None  # Not two of them at once.
            self._scratch = self._new_scratch(min(num_tiles, self.tiles_max))
        self._scratch.commit()

    def begin(self, block_tables: Int32Array, lengths: Int32Array) -> None:
        """Prepare the step's rows: `[num_rows, max_blocks]` tables and `[num_rows]` lengths, new token
        included.
        """
        self._groups = {window: self._grouped(block_tables, lengths, window) for window in set(self._windows)}

    def _grouped(self, block_tables: Int32Array, lengths: Int32Array, window: int) -> list[_Group]:
        seen_from = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
        counts = -(-lengths // TILE_TOKENS) - seen_from // TILE_TOKENS
        groups: list[_Group] = []
        first = 0
        while first < len(counts):
            fits = np.cumsum(counts[first:]) <= self.tiles_max
            last = first + max(int(fits.sum()), 1)
            rows = slice(first, last)
            groups.append(self._prepare(first, block_tables[rows], lengths[rows], seen_from[rows]))
            first = last
        return groups

    def _prepare(self, first: int, tables: Int32Array, lengths: Int32Array, seen_from: Int32Array) -> _Group:
        """Rows from `first` on; each sees its positions from `seen_from` up to its length."""
        first_tiles = seen_from // TILE_TOKENS
        counts = (-(-lengths // TILE_TOKENS) - first_tiles).astype(np.int64)
        num_tiles, max_tiles = int(counts.sum()), int(counts.max())
        rows = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        tile_in_row = np.arange(num_tiles) - firsts[rows] + first_tiles[rows]
        places = tile_in_row[:, None] * TILE_BLOCKS + np.arange(TILE_BLOCKS)
        held = places * BLOCK_TOKENS < lengths[rows][:, None]
        places = np.minimum(places, tables.shape[1] - 1)
        blocks = np.where(held, tables[rows[:, None], places], self._cache.zero_block).astype(np.int64)
        positions = tile_in_row[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS)
        seen = (positions >= seen_from[rows][:, None]) & (positions < lengths[rows][:, None])
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        pages = as_tensor(blocks.reshape(-1) * self._cache.pages_per_block) + self._page_steps
        self._reserve(num_tiles)
        tiles_of_row: tuple[Tensor, Tensor] | None = None
        if max_tiles > 1:
            order = np.arange(max_tiles)[:, None]
            own = as_tensor(firsts + np.minimum(order, counts - 1))
            tiles_of_row = as_tensor(np.where(order < counts, firsts + order, num_tiles)), own
        return _Group(
            first,
            first + len(lengths),
            num_tiles,
            pages.flatten(1),
            as_tensor(rows),
            as_tensor(mask)[:, None],
            tiles_of_row,
        )

    def _reserve(self, num_tiles: int) -> None:
        if self._scratch is None or self._scratch.num_tiles < num_tiles:
            # Grow by doubling up to the bound: a small server should not hold scratch for a large one.
            wanted = min(max(2 * num_tiles, 16), max(self.tiles_max, num_tiles))
            self._scratch = None
            self._scratch = self._new_scratch(wanted)

    def _new_scratch(self, num_tiles: int) -> "_Scratch":
        rows = next(size for size in self._shape.tiles.sizes if size >= self._group)
        return _Scratch(self._cache, self._shape, num_tiles, (self._parts, rows))

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """`q`, `out`: `[num_rows, num_heads, head_dim]` in the order of `begin`."""
        for group in self._groups[self._windows[layer]]:
            self._attend_group(layer, group, q[group.first : group.last], out[group.first : group.last])

    def _attend_group(self, layer: int, group: _Group, q: Tensor, out: Tensor) -> None:
        shape, n, parts = self._shape, group.num_tiles, self._parts
        assert self._scratch is not None
        kv, queries, raw, scores, weights, partial = self._scratch.views(n)
        self._cache.gather(group.pages[layer], kv, self._scratch.staging)
        spread = q if group.tiles_of_row is None else q.index_select(0, group.row_of_tile)
        queries[:, :, : self._group].copy_(spread.view(n, parts, self._group, -1).transpose(0, 1))
        heads = [part * shape.num_kv_heads // parts for part in range(parts)]
        for part, head in enumerate(heads):
            k = kv[0, :, :, head].transpose(1, 2)
            torch.bmm(queries[part], k, out=raw[part])
        shape.score(raw, scores)
        scores.add_(group.mask)
        torch.softmax(scores, -1, out=weights)
        raw.copy_(weights)
        for part, head in enumerate(heads):
            torch.bmm(raw[part], kv[1, :, :, head], out=partial[part])
        by_part = out.view(-1, parts, self._group, shape.head_dim).transpose(0, 1)
        if group.tiles_of_row is None:
            by_part.copy_(partial[:, :, : self._group])
        else:
            by_part.copy_(self._merge(group.tiles_of_row, scores, weights, partial))

    def _merge(
        self, tiles_of_row: tuple[Tensor, Tensor], scores: Tensor, weights: Tensor, partial: Tensor
    ) -> Tensor:
        """Tiles of each row, merged in order: `[parts, num_rows, group, head_dim]` float32."""
        group = self._group
        logsumexp = logsumexp_of(scores[:, :, :group], weights[:, :, :group])
        # One more tile that no query sees stands for the missing ones of shorter rows.
        logsumexp = torch.nn.functional.pad(logsumexp, (0, 0, 0, 1), value=-torch.inf)
        top = torch.full_like(logsumexp[:, : tiles_of_row[0].shape[1]], -torch.inf)
        den = torch.zeros_like(top)
        acc = partial.new_zeros(*top.shape, partial.shape[-1], dtype=torch.float32)
        for seen, own in zip(*tiles_of_row, strict=True):
            top, keep, add = merge_factors(top, logsumexp.index_select(1, seen))
            # Not even times zero may another row's output enter: it could be NaN.
            tile = partial.index_select(1, own)[:, :, :group].float()
            den.mul_(keep).add_(add)
            acc.mul_(keep[..., None]).add_(tile.mul_(add[..., None]))
        return acc.div_(den[..., None])


class _Scratch:
    """Memory for the tiles of one group; contents mean nothing between layers."""

    def __init__(self, cache: KVCache, shape: TileShape, num_tiles: int, product: tuple[int, int]) -> None:
        """`product`: how many products there are for a tile, and their rows."""
        self.num_tiles = num_tiles
        (parts, rows), dim = product, shape.head_dim
        self._kv = cache.scratch(num_tiles * 2 * TILE_TOKENS * shape.num_kv_heads * dim)
        self.staging = cache.staging(num_tiles * 2 * TILE_TOKENS)
        # Rows beyond the group are padding and stay zero.
        self._queries = cache.scratch(num_tiles * parts * rows * dim).zero_()
        self._raw = cache.scratch(num_tiles * parts * rows * TILE_TOKENS)
        self._scores = torch.empty(num_tiles * parts * rows * TILE_TOKENS, device=cache.pages.device)
        self._weights = torch.empty_like(self._scores)
        self._partial = cache.scratch(num_tiles * parts * rows * dim)
        self._heads, self._parts, self._rows, self._dim = shape.num_kv_heads, parts, rows, dim
        self._views: dict[int, tuple[Tensor, ...]] = {}

    def commit(self) -> None:
        """Write to every page."""
        for each in (self._kv, self._queries, self._raw, self._scores, self._weights, self._partial):
            each.zero_()
        if self.staging is not None:
            self.staging.zero_()

    def views(self, n: int) -> tuple[Tensor, ...]:
        """(kv, queries, raw scores, scores, weights, partial outputs) for `n` tiles, all contiguous."""
        found = self._views.get(n)
        if found is None:
            heads, parts, rows, dim = self._heads, self._parts, self._rows, self._dim
            found = self._views[n] = (
                self._kv[: n * 2 * TILE_TOKENS * heads * dim].view(2, n, TILE_TOKENS, heads, dim),
                self._queries[: n * parts * rows * dim].view(parts, n, rows, dim),
                self._raw[: n * parts * rows * TILE_TOKENS].view(parts, n, rows, TILE_TOKENS),
                self._scores[: n * parts * rows * TILE_TOKENS].view(parts, n, rows, TILE_TOKENS),
                self._weights[: n * parts * rows * TILE_TOKENS].view(parts, n, rows, TILE_TOKENS),
                self._partial[: n * parts * rows * dim].view(parts, n, rows, dim),
            )
        return found


# Attention of chunks of prompts: row by row, KV tile by KV tile, with a mask only where sight ends inside
# a tile.
#
# A tile is computed for those queries that see any of it: with a window they lie between two bounds.

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
        self._kv = cache.scratch(2, TILE_TOKENS, shape.num_kv_heads, shape.head_dim)
        self._staging = cache.staging(2 * TILE_TOKENS)
        rows, at_once = max_tokens * shape.group, shape.tiles.sizes[-1]
        heads = shape.num_kv_heads
        # Padding of the last product: whatever lies there.
        self._queries = cache.scratch(heads, rows + at_once, shape.head_dim).zero_()
        self._raw = cache.scratch(heads * at_once * TILE_TOKENS).zero_()
        self._product = cache.scratch(heads * at_once * shape.head_dim)
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
        self._cache.gather(chunk.pages[tile, layer], self._kv, self._staging)
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
        self._kv = cache.scratch(2 * max_tokens, cache.num_kv_heads, cache.head_dim)
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

    def begin_stores(self, batch: AttentionBatch) -> None:
        """`begin` for a batch of which nothing but KV is wanted."""
        self._slots = self._layer_slots(batch)
        self._rotary.begin(batch.positions)

    def begin(self, batch: AttentionBatch) -> None:
        """See `Attention`."""
        self.begin_stores(batch)
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
        self._cache.store(self._slots[layer], kv)

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
