"""Which worker has become slower than its peers, whatever they compute?

    residual   log(observed / predicted time) of the steps of a window: load is in the prediction, so it is no
               cause any more. The law of step times (schedule/step_time.py) is learned from all peers
    deviation  the residual less the median of the others': what all have in common (a law that is off, a hot
               room) is no worker's fault
    scale      the spread of the last deviations downwards, by their median (MAD): slow workers do not widen
               it
    CUSUM      the sum of what deviations exceed one scale by (Page, "Continuous Inspection Schemes", 1954): a
               small shift that stays adds up, noise does not

Peers are workers of one model on one kind of device. Fewer than three have no median that says which one is
at fault. Pure; time is handed in.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

from penstock.clock import NS_PER_S
from penstock.schedule.step_time import StepLoad, StepSums, StepTimeModel
from penstock.types import WorkerId

WINDOW_NS = 10 * NS_PER_S
STEPS_MIN = 20
"""Of fewer steps in a window a worker says nothing."""
PEERS_MIN = 3
SCALE_MIN = 0.04
"""No spread counts as less: devices of one kind differ by some per cent for good."""
DEVIATIONS_KEPT = 256
"""Deviations that the scale is made of."""
EXCESS = 1.0
"""In scales: what of a deviation is noise. A shift below 4 % never adds up."""
ALARM = 6.5
"""In scales. Normal noise comes here once in a million windows, and a second time confirms the doubt."""
DEVIATION_MAX = 4.0
"""In scales: three windows at least are needed, so one pause is no slow worker."""
_SHOWN = 0.3
"""Weight of the last window in the slowness that people see."""
_SPREAD = 1.4826
"""Makes the median of absolute deviations the standard deviation of normal ones."""


class _Peer:
    __slots__ = ("cusum", "is_counted", "num_quiet", "shown", "since", "sums")

    def __init__(self) -> None:
        self.sums: StepSums | None = None
        """As last heard."""
        self.since: StepSums | None = None
        """Where its window begins."""
        self.cusum = 0.0
        self.num_quiet = 0
        """Windows in a row in which nothing was left in the sum."""
        self.shown: float | None = None
        self.is_counted = True
        """The law learns from it."""


class Peers:
    """The workers of one model on one kind of device: `received` of each, then `judge` at a window's end."""

    def __init__(self) -> None:
        self._law = StepTimeModel()
        self._peers: dict[WorkerId, _Peer] = {}
        self._deviations: deque[float] = deque(maxlen=DEVIATIONS_KEPT)

    def received(self, worker: WorkerId, sums: StepSums) -> None:
        """The work that it has computed since its start, and the time."""
        peer = self._peers.get(worker)
        if peer is None:
            peer = self._peers[worker] = _Peer()
        if peer.sums is not None and sums.steps < peer.sums.steps:
            peer.since = None  # A new process.
        assert 0 <= sums.sequences <= sums.tokens, "every row computes a token at least"
        peer.sums = sums
        if peer.since is None:
            peer.since = sums

    def forget(self, worker: WorkerId) -> None:
        """It is gone."""
        self._peers.pop(worker, None)

    def trust(self, worker: WorkerId, *, trusted: bool) -> None:
        """Whether the law learns from it."""
        if worker in self._peers:
            self._peers[worker].is_counted = trusted

    def judge(self) -> list[WorkerId]:
        """A window is over: which workers are slower than their peers for certain. Their sums begin again."""
        residuals = dict[WorkerId, float]()
        loads = list[tuple[StepLoad, int]]()
        for worker, peer in self._peers.items():
            if peer.sums is None or peer.since is None or peer.sums.steps - peer.since.steps < STEPS_MIN:
                continue
            load, took_ns = peer.sums.since(peer.since)
            assert load.num_steps >= STEPS_MIN, "a window of one process only grows"
            peer.since = peer.sums
            if took_ns <= 0:
                continue
            if self._law.trusts(load) and (predicted_ns := self._law.predict_ns(load)) > 0:
                residuals[worker] = math.log(took_ns / predicted_ns)
            if peer.is_counted:
                loads.append((load, took_ns))
        for load, took_ns in loads:
            self._law.observe(load, took_ns)
        return self._deviate(residuals) if len(residuals) >= PEERS_MIN else []

    def slowness(self, worker: WorkerId) -> float | None:
        """How many times as long as its peers' its steps take; None: not known."""
        peer = self._peers.get(worker)
        return None if peer is None or peer.shown is None else math.exp(peer.shown)

    def num_quiet(self, worker: WorkerId) -> int:
        """Windows in a row, up to now, in which it was as fast as its peers."""
        peer = self._peers.get(worker)
        return 0 if peer is None else peer.num_quiet

    def _deviate(self, residuals: dict[WorkerId, float]) -> list[WorkerId]:
        scale, slow = self._scale(), list[WorkerId]()
        ranked = sorted(residuals.values())
        for worker, residual in residuals.items():
            peer, deviation = self._peers[worker], residual - _median_of_others(ranked, residual)
            if deviation < 0:
                self._deviations.append(-deviation)
            peer.shown = deviation if peer.shown is None else peer.shown + _SHOWN * (deviation - peer.shown)
            peer.cusum = max(0.0, peer.cusum + min(deviation / scale, DEVIATION_MAX) - EXCESS)
            assert peer.cusum >= 0, "being fast saves nothing up"
            peer.num_quiet = peer.num_quiet + 1 if not peer.cusum else 0
            if peer.cusum >= ALARM:
                peer.cusum = 0.0
                slow.append(worker)
        return slow

    def _scale(self) -> float:
        return max(SCALE_MIN, _SPREAD * median(self._deviations)) if self._deviations else 2 * SCALE_MIN


def _median_of_others(ranked: Sequence[float], one: float) -> float:
    """The median without `one` of the values, which are in order."""
    assert len(ranked) > 1, "without others there is no median of them"
    place, num = bisect_left(ranked, one), len(ranked) - 1
    low, high = (num - 1) // 2, num // 2
    return (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2
