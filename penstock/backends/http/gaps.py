"""How long a worker's streams may be silent: several times the longest silence of late.

An engine that reads a long prompt lets its other streams wait for seconds, so the bound is generous; it is
there so that a stream which has died is not waited for as long as one of which nothing is known.
"""

from penstock.clock import NS_PER_S

FACTOR, MIN_NS = 5, 10 * NS_PER_S
"""A stream is given up after so many times the longest gap of late, and never sooner than this."""
_EVENTS_MIN = 100
"""With fewer events nothing is known."""
_FADES = 1024
"""The longest gap loses such a part with every event."""


class Gaps:
    """Of one worker."""

    __slots__ = ("_longest_ns", "_num")

    def __init__(self) -> None:
        self._num = self._longest_ns = 0

    def saw(self, gap_ns: int) -> None:
        """So much time passed between two events of a stream."""
        self._num += 1
        self._longest_ns = max(gap_ns, self._longest_ns - self._longest_ns // _FADES)

    def bound_ns(self, most_ns: int) -> int:
        """How long a stream may be silent; at most as the configuration says."""
        if self._num < _EVENTS_MIN:
            return most_ns
        return min(most_ns, max(MIN_NS, FACTOR * self._longest_ns))
