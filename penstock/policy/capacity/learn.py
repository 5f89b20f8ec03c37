"""The rate of one worker that keeps promises, and the cold start of a new one: measured, never configured.

`ServiceRate` looks at half minutes in which nothing joined or left, so what a cold worker does is no sample:

    all in time, nobody waits    ──> at least this rate is safe
    requests wait or are dropped ──> this rate is the most there is, and a little less of it is safe
    answers are late             ──> by how many were at which rate, the rate at which too many are

Long before a worker is full its answers may be late, and which rate that is shows only in many windows
together: the share of late answers over the rate, taken to grow with it (isotonic regression), says where it
passes what is allowed. While no worker was ever full, the rate is taken from how many of its rows are busy,
with a large discount.
"""

import math

import msgspec

from penstock.policy.capacity.signals import Signals

WINDOW_S = 30.0
"""A window of this length is one sample."""
SAFE = 0.8
"""Of the most that a full worker does, this share keeps promises, until more was seen to."""
SAFE_MAX = 0.95
EXTRAPOLATED = 0.5
"""Of what the busy rows say of a worker that was never full."""
_FORGET = 0.998
LATE_MAX = 0.05
"""Late answers that a good window may have; the objective of `slo` by default."""
_WAITS = 0.5
"""Requests that wait, per worker: from here on the workers are full."""
_FULL = 0.8
"""Share of a window for which they must be full: one in which the load rose says nothing."""
_OCCUPANCY_MIN = 0.1
COLD_START_S = 60.0
"""Until one was measured."""
_COLD_KEPT = 8
_COLD_RANK = 0.75


_STEP = math.log(1.12)
"""Windows whose rates are about so near are counted together."""
_KEPT = 0.99
"""Of earlier windows' answers, at each further window."""
_DUE_MIN = 20.0
"""Answers at a rate, and above it, for which something is said of it."""
LATE_FLOOR = 0.3
"""Of the full rate: that answers are late at less is nothing that more workers would mend."""


class LateShares(msgspec.Struct, kw_only=True):
    """Of answers that were due, those that were late, by the rate of one worker."""

    counts: dict[int, tuple[float, float]] = {}
    """(due, late), by `rate`'s logarithm in steps."""

    def take(self, rate: float, due: int, late: int) -> None:
        """A window is over."""
        assert rate > 0, "a window without work says nothing"
        assert 0 <= late <= due, (late, due)
        self.counts = {
            step: (due * _KEPT, late * _KEPT) for step, (due, late) in self.counts.items() if due > 0.5
        }
        step = round(math.log(rate) / _STEP)
        before = self.counts.get(step, (0.0, 0.0))
        self.counts[step] = before[0] + due, before[1] + late

    def limit(self, allowed: float) -> float:
        """The rate at which a larger share than `allowed` is late; infinite: none such is known."""
        assert 0 <= allowed < 1, allowed
        # Pool adjacent violators (Ayer et al. 1955): shares that do not fall as rates grow.
        blocks: list[tuple[float, float, int]] = []  # Due, late, first step.
        for step, (due, late) in sorted(self.counts.items()):
            blocks.append((due, late, step))
            while len(blocks) > 1 and blocks[-2][1] * blocks[-1][0] > blocks[-1][1] * blocks[-2][0]:
                due, late, _ = blocks.pop()
                blocks[-1] = blocks[-1][0] + due, blocks[-1][1] + late, blocks[-1][2]
        assert sum(block[0] for block in blocks) <= sum(due for due, _ in self.counts.values()) + 1e-6
        for i, (due, late, first) in enumerate(blocks):
            if late > allowed * due:
                is_sure = sum(block[0] for block in blocks[i:]) >= _DUE_MIN
                return math.exp((first - 0.5) * _STEP) if is_sure else math.inf
        return math.inf


class ServiceRate(msgspec.Struct, kw_only=True):
    """Work per second of one ready worker."""

    good: float = 0.0
    """The most that was done in time."""
    full: float = 0.0
    """The rate of full workers; 0: none was full yet."""
    guess: float = 0.0
    """By the busy rows."""
    trust: float = 1.0
    """Of the guess: where answers are late before rows are full, rows say less."""
    lateness: LateShares = msgspec.field(default_factory=LateShares)
    workers: int = -1
    """Below: of the window that is not over."""
    seconds: float = 0.0
    work: float = 0.0
    due: int = 0
    late: int = 0
    full_s: float = 0.0
    """In which requests waited, or were dropped."""
    busy_s: float = 0.0

    @property
    def safe(self) -> float:
        """The rate that one worker may be given; 0: nothing is known."""
        ceiling = max(self.good, self.trust * self.guess)
        if self.full:
            ceiling = min(max(self.good, SAFE * self.full), SAFE_MAX * self.full)
        limit = self.lateness.limit(LATE_MAX / 2)
        return min(ceiling, max(limit, LATE_FLOOR * (self.full or ceiling)))

    def take(self, seen: Signals) -> None:
        """Learn from one look."""
        ready = seen.ready
        if ready != self.workers or not ready or seen.cold_starts_s:
            self._begin(ready)
            return
        self.seconds += seen.window_s
        self.work += seen.work
        self.due += seen.due
        self.late += seen.late
        self.full_s += seen.window_s * (seen.shed > 0 or seen.waiting >= _WAITS * ready)
        self.busy_s += seen.window_s * (min(1.0, seen.running / seen.slots) if seen.slots else 0.0)
        if self.seconds >= WINDOW_S:
            self._judge()
            self._begin(ready)

    def _begin(self, workers: int) -> None:
        self.workers, self.seconds, self.work = workers, 0.0, 0.0
        self.due = self.late = 0
        self.full_s = self.busy_s = 0.0

    def _judge(self) -> None:
        assert self.workers > 0 < self.seconds, "a window has workers and time"
        rate = self.work / (self.workers * self.seconds)
        if not rate:
            return
        if self.due:
            self.lateness.take(rate, self.due, self.late)
        is_late = self.late > LATE_MAX * self.due
        if self.full_s >= _FULL * self.seconds:
            step = 0.5 if rate > self.full else 0.15
            self.full = rate if not self.full else self.full + (rate - self.full) * step
        elif not is_late and not self.full_s:
            self.good = max(self.good * _FORGET, rate)
        occupancy = self.busy_s / self.seconds
        if occupancy >= _OCCUPANCY_MIN and not is_late:
            guess = EXTRAPOLATED * rate / occupancy
            self.guess = guess if not self.guess else self.guess + (guess - self.guess) * 0.2
        if self.guess and (limit := self.lateness.limit(LATE_MAX / 2)) < math.inf:
            self.trust += (min(1.0, limit / self.guess) - self.trust) * 0.5


class ColdStartTimes(msgspec.Struct, kw_only=True):
    """The times of the last workers, from being asked for to being ready."""

    seconds: list[float] = []

    def take(self, measured: tuple[float, ...]) -> None:
        """More of them got ready."""
        assert all(each >= 0 for each in measured), measured
        self.seconds = [*self.seconds, *measured][-_COLD_KEPT:]

    @property
    def expected_s(self) -> float:
        """The time that the next one will take: longer than most of the last ones."""
        if not self.seconds:
            return COLD_START_S
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(_COLD_RANK * len(ordered)))]
