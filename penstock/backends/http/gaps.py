"""How long a worker's streams may be silent: several times the longest silence of late.

An engine that reads a long prompt lets its other streams wait for seconds, so the bound is generous; it is
there so that a stream which has died is not waited for as long as one of which nothing is known.

    longest silence   halves every minute, however many events come meanwhile
    a time-out        doubles the bound: a silence that is cut short would else never be seen, and a worker
                      that has become slow would lose every stream

Pure: times are handed in.
"""

from penstock.clock import NS_PER_S

FACTOR, MIN_NS = 5, 10 * NS_PER_S
"""A stream is given up after so many times the longest gap of late, and never sooner than this."""
HALVES_NS = 60 * NS_PER_S
"""The time in which the longest gap counts half."""
_EVENTS_MIN = 100
"""With fewer events nothing is known."""


class Gaps:
    """Of one worker."""

    __slots__ = ("_faded_ns", "_longest_ns", "_num")

    def __init__(self) -> None:
        self._num = self._longest_ns = 0
        self._faded_ns = 0
        """Up to when the longest gap has faded."""

    def saw(self, now_ns: int, gap_ns: int) -> None:
        """So much time passed between two events of a stream, of which the second came now."""
        self._num += 1
        self._fade(now_ns)
        self._longest_ns = max(gap_ns, self._longest_ns)

    def timed_out(self, now_ns: int, silent_ns: int) -> None:
        """A stream was given up after so much silence. Several that end together count as one."""
        self._fade(now_ns)
        self._longest_ns = max(self._longest_ns, 2 * silent_ns // FACTOR)

    def bound_ns(self, now_ns: int, most_ns: int) -> int:
        """How long a stream may be silent; at most as the configuration says."""
        if self._num < _EVENTS_MIN:
            return most_ns
        self._fade(now_ns)
        return min(most_ns, max(MIN_NS, FACTOR * self._longest_ns))

    def _fade(self, now_ns: int) -> None:
        if (elapsed_ns := now_ns - self._faded_ns) >= NS_PER_S:
            self._longest_ns = int(self._longest_ns * 0.5 ** (elapsed_ns / HALVES_NS))
            self._faded_ns = now_ns
