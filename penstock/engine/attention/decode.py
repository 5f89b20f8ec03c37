"""Attention of rows with one new token each: all tiles of all rows in one batched product per head."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import Int32Array, Int64Array, as_tensor
from penstock.engine.attention.tiles import TILE_BLOCKS, TILE_TOKENS, TileShape, logsumexp_of, merge_factors
from penstock.engine.kv_cache import KVCache
from penstock.types import BLOCK_TOKENS


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
        tile_bytes = 2 * TILE_BLOCKS * cache.pages.shape[1] * cache.pages.element_size()
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
        torch.index_select(self._cache.pages, 0, group.pages[layer], out=kv.view(2 * n * TILE_BLOCKS, -1))
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
        self._kv = cache.pages.new_empty(num_tiles * 2 * TILE_TOKENS * shape.num_kv_heads * dim)
        # Rows beyond the group are padding and stay zero.
        self._queries = cache.pages.new_zeros(num_tiles * parts * rows * dim)
        self._raw = cache.pages.new_empty(num_tiles * parts * rows * TILE_TOKENS)
        self._scores = torch.empty(num_tiles * parts * rows * TILE_TOKENS, device=cache.pages.device)
        self._weights = torch.empty_like(self._scores)
        self._partial = cache.pages.new_empty(num_tiles * parts * rows * dim)
        self._heads, self._parts, self._rows, self._dim = shape.num_kv_heads, parts, rows, dim
        self._views: dict[int, tuple[Tensor, ...]] = {}

    def commit(self) -> None:
        """Write to every page."""
        for each in (self._kv, self._queries, self._raw, self._scores, self._weights, self._partial):
            each.zero_()

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
