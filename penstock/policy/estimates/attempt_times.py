"""How long an attempt at an external worker may take: as long as such attempts took there of late, times a
factor.

Of a worker of ours more is known (heartbeats, its queue, how fast it computes), so it is not bounded so. The
configuration's bounds (section `backends`) hold in any case, where the connection is read.

Pure: times are handed in.
"""

from penstock.clock import NS_PER_S
from penstock.policy.estimates.output_length import AMOUNT_MAX, QuantileWindow
from penstock.types import WorkerId

FACTOR, QUANTILE = 4, 0.95
"""A first token is given up after so many times what 19 of 20 such prompts took there."""
FIRST_MIN_NS = 2 * NS_PER_S
"""And never sooner than this."""
SAMPLES_MIN = 20
"""With fewer of them nothing is known."""
WINDOW = 256
_KEYS_MAX = 4096
_NS_PER_US = 1000


class FirstTokens:
    """Times to first token of one gateway's external workers, by worker and class of prompt."""

    __slots__ = ("_windows",)

    def __init__(self) -> None:
        self._windows: dict[tuple[str, WorkerId, int], QuantileWindow] = {}

    def bound_ns(self, route: str, worker: WorkerId, prompt_tokens: int) -> int:
        """How long such an attempt may take there; 0: nothing is known."""
        window = self._windows.get((route, worker, prompt_tokens.bit_length()))
        if window is None or len(window) < SAMPLES_MIN:
            return 0
        return max(FIRST_MIN_NS, FACTOR * window.quantile(QUANTILE) * _NS_PER_US)

    def took(self, route: str, worker: WorkerId, prompt_tokens: int, ttft_ns: int) -> None:
        """An attempt took so long to its first token."""
        assert ttft_ns >= 0, ttft_ns
        key = (route, worker, prompt_tokens.bit_length())
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) >= _KEYS_MAX:
                del self._windows[next(iter(self._windows))]
            window = self._windows[key] = QuantileWindow(WINDOW)
        window.add(min(ttft_ns // _NS_PER_US, AMOUNT_MAX))

    def gave_up(self, route: str, worker: WorkerId, prompt_tokens: int, waited_ns: int) -> None:
        """An attempt was given up after so long. It counts as a little slower than what is usual, so that a
        worker which has become slow for good is taken for it, in time.
        """
        assert waited_ns > 0, waited_ns
        window = self._windows.get((route, worker, prompt_tokens.bit_length()))
        if window is not None:
            most_us = window.quantile(QUANTILE) * 5 // 4 + 1
            window.add(min(waited_ns // _NS_PER_US, most_us))
