"""When a worker counts as hung, and when it may start again. Pure: facts and a clock in, a decision out."""

from collections import deque

from penstock.clock import NS_PER_S, Clock

RESTART_WINDOW_NS = 600 * NS_PER_S
"""`EngineConfig.restarts_max` counts over this long."""
BACKOFF_MIN_S = 0.25
BACKOFF_MAX_S = 30.0


class RestartBudget:
    """At most `restarts_max` restarts in any ten minutes, each after twice the wait of the one before."""

    def __init__(self, restarts_max: int, clock: Clock) -> None:
        self._max, self._clock = restarts_max, clock
        self._recent: deque[int] = deque()

    def take(self) -> float | None:
        """Seconds to wait before the next restart, or None if the worker must stay down."""
        now_ns = self._clock.now_ns()
        while self._recent and now_ns - self._recent[0] >= RESTART_WINDOW_NS:
            self._recent.popleft()
        if len(self._recent) >= self._max:
            return None
        delay_s = min(BACKOFF_MIN_S * 2 ** len(self._recent), BACKOFF_MAX_S)
        self._recent.append(now_ns)
        return delay_s


class StallDetector:
    """Health is progress: a worker that has work and whose steps do not advance for a while is hung.

    A timeout of 0 never finds one.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_ns, self._clock = int(timeout_s * NS_PER_S), clock
        self._step = -1
        self._since_ns = clock.now_ns()

    def observe(self, step: int, *, has_work: bool) -> bool:
        """Take in the latest facts; True if the worker is hung."""
        now_ns = self._clock.now_ns()
        if not has_work or step != self._step:
            self._step, self._since_ns = step, now_ns
        return 0 < self._timeout_ns <= now_ns - self._since_ns
