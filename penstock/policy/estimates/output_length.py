"""How long an answer will be: what is reserved for it before a token of it exists.

The estimate is the smaller of `max_tokens` and the 90th percentile of the tenant's last 64 answers of that
model, taken exactly (nearest rank over a ring that is also kept sorted). A sketch such as P-square (Jain and
Chlamtac, 1985) or a decaying histogram would take less memory, but answers with a bias when the load changes,
and no two people predict the same number from one; this one can be checked with a pencil, and forgets after
64 answers for sure.

The high percentile is chosen so that nine of ten answers need no renewal, while a tenant that always sends a
huge `max_tokens` and gets short answers is not held to what it never uses. A tenant without a past is taken
for an average one: the window of all tenants' answers of that model; without that too, a default.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

from penstock.config.branch import extended
from penstock.config.flow import LimitsConfig
from penstock.types import TenantId

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
        return nearest_rank(self._sorted, share)

    def amounts(self) -> Sequence[int]:
        """All of them, smallest first."""
        return self._sorted


def nearest_rank(amounts: Sequence[int], share: float) -> int:
    """The smallest of some sorted amounts (one at least) that at least `share` of them do not exceed."""
    count = len(amounts)
    assert count, "no amounts have no quantile"
    rank = -int(-share * count // 1)
    return amounts[min(count, max(1, rank)) - 1]


_SAMPLES_MIN = 8
"""Answers that a window must have seen before it is believed."""
_EVERYBODY = TenantId("\0everybody")
"""Key of the window over all tenants of a model; no tenant has such a name, since names are printable."""


class LengthTerms(LimitsConfig, frozen=True, kw_only=True):
    """What is reserved for an answer."""

    output_quantile: float = 0.9
    """This quantile of the tenant's last answers of that model, or `max_tokens` if less."""
    output_window: int = 64
    """Answers that the quantile is taken of."""
    output_windows_max: int = 8192
    """Pairs of tenant and model whose answers are remembered (about 0.7 KB each)."""
    output_tokens_default: int = 256
    """What is reserved while no answer of that model was seen."""


class OutputLengths:
    """Recent answers' lengths by tenant and model. Bounded: the pair that was seen longest ago makes room."""

    __slots__ = ("_config", "_windows")

    def __init__(self, config: LimitsConfig) -> None:
        self._config = extended(config, LengthTerms)
        self._windows: dict[tuple[TenantId, str], QuantileWindow] = {}

    def expect(self, tenant: TenantId, model: str, max_tokens: int) -> int:
        """Tokens to reserve for one answer of at most `max_tokens`; at least 1."""
        assert max_tokens >= 1, max_tokens
        window = self._windows.get((tenant, model))
        if window is None or len(window) < _SAMPLES_MIN:
            window = self._windows.get((_EVERYBODY, model))
        if window is None or len(window) < _SAMPLES_MIN:
            return min(max_tokens, self._config.output_tokens_default)
        return max(1, min(max_tokens, window.quantile(self._config.output_quantile)))

    def observe(self, tenant: TenantId, model: str, num_tokens: int) -> None:
        """An answer ended after `num_tokens`, whatever ended it: what was used is what the next one is likely
        to use.
        """
        length = min(num_tokens, AMOUNT_MAX)
        self._window(tenant, model).add(length)
        self._window(_EVERYBODY, model).add(length)

    def __len__(self) -> int:
        """Pairs that are remembered, those of all tenants together included."""
        return len(self._windows)

    def _window(self, tenant: TenantId, model: str) -> QuantileWindow:
        """The window of a pair, moved to the end of the line of those that make room."""
        key = (tenant, model)
        window = self._windows.pop(key, None)
        if window is None:
            window = QuantileWindow(self._config.output_window)
            while len(self._windows) >= self._config.output_windows_max:
                del self._windows[next(iter(self._windows))]
        self._windows[key] = window
        return window
