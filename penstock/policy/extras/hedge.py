"""When a request that says nothing is started a second time, on another worker: hedged requests.

After Dean and Barroso, "The Tail at Scale" (CACM 2013): wait for a high percentile of the usual time, then
send a second request, and take whichever answers first. The delay alone bounds the extra load to some percent
while nothing is wrong; the budget bounds it when something is: every start pays in `hedge_share` of a hedge,
so hedges are never more than that share of the starts.

Decides when, and counts; `FlowControl` knows whom it concerns and where there is room. Pure; bounded; time is
handed in.
"""

import enum
from collections.abc import Callable
from heapq import heappop, heappush

from penstock.clock import NS_PER_MS
from penstock.config.branch import extended
from penstock.config.health import HealthConfig
from penstock.policy.estimates.output_length import AMOUNT_MAX, QuantileWindow
from penstock.types import RequestId

_UNIT = 1_000_000
"""The budget is an integer, in so many parts of a hedge: nothing drifts."""
_NS_PER_US = 1000


class HedgeOutcome(enum.StrEnum):
    """What came of a hedge, or of the wish for one."""

    WON = "won"
    """It had the first output."""
    LOST = "lost"
    """The attempt that was there before had."""
    SAVED = "saved"
    """That one failed, and this one went on."""
    FAILED = "failed"
    """Its worker failed, and the other one went on."""
    ENDED = "ended"
    """The request ended before either had any output: its client left, or it gave way."""
    NO_ROOM = "no_room"
    """Not started: no other worker had room, or others waited for it."""
    NO_BUDGET = "no_budget"
    """Not started: too many were."""


Tell = Callable[[str, HedgeOutcome], None]
"""Hears of every outcome, with the model's name."""


class HedgeTerms(HealthConfig, frozen=True, kw_only=True):
    """When a request is late enough for a second attempt, and how many of those there may be."""

    quantile: float = 0.98
    """Of the times from start to first output of the model's last `window` requests with prompts of about
    that length (within a factor of two, what is cached left out). Well under 1 - `hedge_share` the budget
    would go to requests that are only a little late."""
    window: int = 512
    samples_min: int = 50
    """With fewer of them nothing is hedged."""
    after_min_ms: int = 20
    """Nothing that is quicker is hedged."""
    saved_max: int = 10
    """What times without any can save up."""


class Hedges:
    """One for a gateway."""

    __slots__ = ("_config", "_due", "_level", "_payment", "_tell", "_windows", "num_starts", "num_taken")

    def __init__(self, config: HealthConfig, tell: Tell) -> None:
        self._config, self._tell = extended(config, HedgeTerms), tell
        self._windows: dict[tuple[str, int], QuantileWindow] = {}
        """By model and class of prompt: long prompts take long, and a second attempt would too."""
        self._due: list[tuple[int, RequestId]] = []
        self._payment, self._level = round(config.hedge_share * _UNIT), 0
        self.num_starts = self.num_taken = 0

    def delay_ns(self, route: str, prompt_tokens: int) -> int | None:
        """After how long without output a request is hedged; None while nobody can tell what is usual for
        it.
        """
        config = self._config
        if config.hedge_after_ms:
            return config.hedge_after_ms * NS_PER_MS
        window = self._windows.get((route, prompt_tokens.bit_length()))
        if window is None or len(window) < config.samples_min:
            return None
        return max(config.after_min_ms * NS_PER_MS, window.quantile(config.quantile) * _NS_PER_US)

    def started(
        self, now_ns: int, route: str, request_id: RequestId, *, prompt_tokens: int, first: bool
    ) -> None:
        """A request was started; `first`: for the first time, so that it may be hedged later.

        `prompt_tokens` are to be computed.
        """
        self.num_starts += 1
        self._level = min(self._config.saved_max * _UNIT, self._level + self._payment)
        if first and (delay_ns := self.delay_ns(route, prompt_tokens)) is not None:
            heappush(self._due, (now_ns + delay_ns, request_id))

    def began(self, route: str, ttft_ns: int, *, prompt_tokens: int) -> None:
        """A request had its first output so long after it was first started: hedged or not."""
        assert ttft_ns >= 0, ttft_ns
        key = (route, prompt_tokens.bit_length())
        window = self._windows.get(key)
        if window is None:  # As many as there are models, times the bits of a prompt's length.
            window = self._windows[key] = QuantileWindow(self._config.window)
        window.add(min(ttft_ns // _NS_PER_US, AMOUNT_MAX))

    def due(self, now_ns: int) -> RequestId | None:
        """The next request whose time has come; it is asked for once."""
        if self._due and self._due[0][0] <= now_ns:
            return heappop(self._due)[1]
        return None

    def next_ns(self, is_silent: Callable[[RequestId], bool]) -> int | None:
        """When the next one is due, of those that still have no output."""
        due = self._due
        while due and not is_silent(due[0][1]):
            heappop(due)
        return due[0][0] if due else None

    def take(self) -> bool:
        """Whether one more may be started now; then it counts."""
        if self._level < _UNIT:
            return False
        self._level -= _UNIT
        self.num_taken += 1
        assert self._level >= 0, "hedges are paid for"
        return True

    def tell(self, route: str, outcome: HedgeOutcome) -> None:
        """What came of one."""
        self._tell(route, outcome)
