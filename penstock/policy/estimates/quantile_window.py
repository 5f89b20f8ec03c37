"""Exact quantiles of the last so many amounts: a ring that is also kept sorted."""

from array import array
from bisect import bisect_left, insort

AMOUNT_MAX = 2**32 - 1
"""The largest that a window can hold."""


class QuantileWindow:
    """The last `size` amounts, and the same in order.

    An amount is added in O(log size) and a copy of at most the window.
    """

    __slots__ = ("_next", "_ring", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size, self._next = size, 0
        self._ring, self._sorted = array("I"), array("I")

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, amount: int) -> None:
        """From 0 to `AMOUNT_MAX`; the oldest makes room."""
        if len(self._ring) < self._size:
            self._ring.append(amount)
        else:
            oldest = self._ring[self._next]
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._ring[self._next] = amount
            self._next = (self._next + 1) % self._size
        insort(self._sorted, amount)
        assert len(self._sorted) == len(self._ring) <= self._size, "both hold the same amounts"

    def quantile(self, share: float) -> int:
        """The smallest amount that at least `share` of the window does not exceed (nearest rank).

        The window is not empty.
        """
        count = len(self._sorted)
        assert count, "an empty window has no quantile"
        rank = -int(-share * count // 1)
        return self._sorted[min(count, max(1, rank)) - 1]
