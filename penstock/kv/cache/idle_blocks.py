"""The blocks that nobody holds but that may be hit again, least recently used first: a doubly linked list of
block numbers in two lists, sixteen bytes a block. An `OrderedDict` takes a hundred.
"""

from collections.abc import Iterator, Sequence

_ABSENT = -1


class IdleBlocks:
    """Some of the blocks `0 .. num_blocks - 1`, in the order in which they are to be evicted."""

    __slots__ = ("_end", "_next", "_num", "_previous")

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks  # Stands before the first and behind the last: the list is a ring.
        self._next = [_ABSENT] * (num_blocks + 1)
        self._previous = [_ABSENT] * (num_blocks + 1)
        self._next[num_blocks] = self._previous[num_blocks] = num_blocks
        self._num = 0

    def append(self, blocks: Sequence[int]) -> None:
        """Put blocks that are not among them behind the others."""
        after, before, end = self._next, self._previous, self._end
        last = before[end]
        for block in blocks:
            assert after[block] < 0, f"block {block} is idle already"
            after[last], before[block] = block, last
            last = block
        after[last], before[end] = end, last
        self._num += len(blocks)

    def remove(self, block: int) -> None:
        """Take out one of them."""
        after, before = self._next[block], self._previous[block]
        assert after >= 0, f"block {block} is not idle"
        self._next[before], self._previous[after] = after, before
        self._next[block] = _ABSENT
        self._num -= 1

    def take(self, count: int) -> list[int]:
        """Take out the first so many of them."""
        assert count <= self._num, f"{count} of {self._num} idle blocks"
        after, end, taken = self._next, self._end, list[int]()
        block = after[end]
        for _ in range(count):
            taken.append(block)
            following = after[block]
            after[block] = _ABSENT
            block = following
        after[end], self._previous[block] = block, end
        self._num -= count
        return taken

    def put_first(self, block: int) -> None:
        """Let one of them be the next to be taken."""
        self.remove(block)
        first = self._next[self._end]
        self._next[block], self._previous[block] = first, self._end
        self._next[self._end] = self._previous[first] = block
        self._num += 1

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def __len__(self) -> int:
        return self._num
