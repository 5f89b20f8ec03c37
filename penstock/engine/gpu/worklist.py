"""A step's attention as a list of items in device memory: what a fixed grid of programs works off.

An item is a tile of one row's new tokens against a piece of the row's context. How a row is cut depends on
the row alone, never on the batch, so neither do the bits of its result:

- a long chunk is cut into tiles of `chunk_queries` tokens, and each tile reads its whole context;
- a row of few new tokens (one that decodes, or the end of a conversation whose beginning was cached) would
  keep too few programs busy that way, so its context is split: at most `SPLITS_MAX` pieces of at least
  `SPLIT_TOKENS_MIN` tokens (Flash-Decoding, Dao et al. 2023). Every piece leaves a partial result, and a
  second kernel merges a token's pieces in order of position.

Windows are a layer's business and all layers share the list: a piece that lies before a layer's window is
empty there.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

KV_TILE = 64
"""Positions that the attention kernel takes at a time; pieces begin at multiples of it."""
SPLITS_MAX = 16
SPLIT_TOKENS_MIN = 256
SHORT_TOKENS = 16
"""Rows with more new tokens than this are not split: they are many tiles anyway."""
CHUNK_ROWS = 128
"""Query rows of a tile of a chunk: a matrix product for each of two warpgroups."""
SINGLE_ROWS = 16
"""Query rows of other items: the fewest that the matrix units take."""
ITEM_FIELDS = 8
COMBINE_FIELDS = 4
_SPARE_PARTIALS = 1024
"""Places for partial results beyond those of single tokens, which always find one."""


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkListLimits:
    """Sizes that no step exceeds."""

    chunk_queries: int
    """Tokens of a tile of a chunk: the kernel's rows over the query heads that share a key head."""
    single_queries: int
    """Items of at most so many tokens are computed like rows that decode."""
    items_max: int
    combines_max: int
    partials_max: int

    @classmethod
    def of(cls, *, max_running: int, step_tokens: int, group_size: int) -> Self:
        """Enough for any step of these limits, with `group_size` query heads for each key/value head."""
        chunk_queries = max(CHUNK_ROWS // group_size, 1)
        partials_max = max_running * SPLITS_MAX + _SPARE_PARTIALS
        return cls(
            chunk_queries=chunk_queries,
            single_queries=max(SINGLE_ROWS // group_size, 1),
            items_max=partials_max + max_running + -(-step_tokens // chunk_queries),
            combines_max=partials_max // 2,
            partials_max=partials_max,
        )


@dataclass(slots=True, frozen=True)
class WorkList:
    """A step's items, tiles of chunks before the others and the longest first among each, and the merges that
    follow.
    """

    items: Int32Array
    """`[num_items, 8]`: row of the tables, first token within the step, its position, number of tokens, first
    position of the piece, position before which it ends, first place for partial results (-1: none, this is
    all), distance between the places of two tokens."""
    combines: Int32Array
    """`[num_combines, 4]`: token within the step, first place, number of places, 0."""
    num_chunks: int
    """How many of the items are tiles of chunks."""

    @classmethod
    def of(
        cls, rows: Int32Array, computed: Int32Array, num_tokens: Int32Array, limits: WorkListLimits
    ) -> Self:
        """Cut a step: arrays of `[num_rows]` as in `StepBuffer.fill`."""
        starts = np.cumsum(num_tokens, dtype=np.int64) - num_tokens
        lengths = computed.astype(np.int64) + num_tokens
        size, count = _splits(lengths)
        count = np.where(num_tokens <= SHORT_TOKENS, count, 1)
        count = _within_scratch(count, num_tokens.astype(np.int64), limits.partials_max)
        places = np.where(count > 1, count * num_tokens, 0)
        first_place = np.cumsum(places) - places
        cuts = _Cuts(rows, computed, num_tokens, starts, lengths, size, count, first_place)
        items = np.concatenate((cuts.pieces(limits.chunk_queries), cuts.tiles(limits.chunk_queries)))
        single = items[:, 3] <= limits.single_queries
        order = np.lexsort((items[:, 4] - items[:, 5], single))
        return cls(items[order].astype(np.int32), cuts.combines(), len(items) - int(single.sum()))


def _splits(lengths: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(tokens of a piece, pieces) for contexts of these lengths."""
    wanted = np.clip(-(-lengths // SPLIT_TOKENS_MIN), 1, SPLITS_MAX)
    size = -(-lengths // (wanted * KV_TILE)) * KV_TILE
    return size, -(-lengths // size)


def _within_scratch(
    count: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64], partials_max: int
) -> npt.NDArray[np.int64]:
    """Give places to single tokens first, which always fit; rows of several that find none are not split."""
    several = np.where((num_tokens > 1) & (count > 1), count * num_tokens, 0)
    left = partials_max - int(count[(num_tokens == 1) & (count > 1)].sum())
    crowded: npt.NDArray[np.bool_] = (several > 0) & (np.cumsum(several) > left)
    return np.where(crowded, np.ones_like(count), count)


@dataclass(slots=True, frozen=True)
class _Cuts:
    """Per row of the step; see `WorkList`."""

    rows: Int32Array
    computed: Int32Array
    num_tokens: Int32Array
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    first_place: npt.NDArray[np.int64]

    def pieces(self, chunk_queries: int) -> npt.NDArray[np.int64]:
        """Items of rows whose context is split, and of single tokens whose is not."""
        short = (self.count > 1) | (self.num_tokens == 1)
        tiles = np.where(short, -(-self.num_tokens // chunk_queries), 0)
        row, within = _expand(tiles * self.count)
        tile, piece = np.divmod(within, self.count[row])
        first = tile * chunk_queries
        begin = piece * self.size[row]
        split = self.count[row] > 1
        place = np.where(split, self.first_place[row] + first * self.count[row] + piece, -1)
        queries = np.minimum(self.num_tokens[row] - first, chunk_queries)
        end = np.where(split, np.minimum(begin + self.size[row], self.lengths[row]), self.lengths[row])
        return self._items(row, first, queries, (begin, end), (place, self.count[row]))

    def tiles(self, chunk_queries: int) -> npt.NDArray[np.int64]:
        """Items of chunks: each sees all that lies before the end of its last token."""
        whole = (self.count == 1) & (self.num_tokens > 1)
        row, tile = _expand(np.where(whole, -(-self.num_tokens // chunk_queries), 0))
        first = tile * chunk_queries
        queries = np.minimum(self.num_tokens[row] - first, chunk_queries)
        begin = np.zeros_like(first)
        return self._items(
            row, first, queries, (begin, self.computed[row] + first + queries), (begin - 1, begin + 1)
        )

    def _items(
        self,
        row: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        queries: npt.NDArray[np.int64],
        piece: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    ) -> npt.NDArray[np.int64]:
        token, position = self.starts[row] + first, self.computed[row] + first
        return np.stack((self.rows[row].astype(np.int64), token, position, queries, *piece, *places), axis=1)

    def combines(self) -> Int32Array:
        """One merge per token of a row that is split."""
        row, within = _expand(np.where(self.count > 1, self.num_tokens, 0))
        place = self.first_place[row] + within * self.count[row]
        merges = np.stack((self.starts[row] + within, place, self.count[row], np.zeros_like(row)), axis=1)
        return merges.astype(np.int32)


def _expand(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(index, how manieth of it) for `counts[i]` repetitions of every index i."""
    index = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return index, np.arange(len(index)) - starts[index]
