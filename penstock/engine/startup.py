"""Where the time went from a worker process's start to its readiness, for one line of its log; decides
nothing.
"""

import resource
from collections.abc import Callable
from itertools import pairwise

from penstock.clock import NS_PER_MS, NS_PER_S, Clock

_SHOWN_NS_MIN = 10 * NS_PER_MS
"""Shorter phases are left out of the line."""
Usage = Callable[[], tuple[float, int]]
"""Processor seconds that the process has taken, and its page faults."""


def own_usage() -> tuple[float, int]:
    """Of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_minflt + used.ru_majflt


class StartUp:
    """Phases of a start, one after the other: each ends where the next begins. For one thread."""

    def __init__(self, clock: Clock, *, age_ns: int, usage: Usage = own_usage) -> None:
        """The process is `age_ns` old; that was "starting"."""
        self._clock, self._usage = clock, usage
        self._begun = [("starting", clock.now_ns() - age_ns, (0.0, 0))]

    def begins(self, phase: str) -> None:
        """The phase `phase` begins, unless it is the one that runs."""
        if phase != self._begun[-1][0]:
            self._begun.append((phase, self._clock.now_ns(), self._usage()))

    def report(self) -> str:
        """The line, now that the process is ready: seconds by phase, processor seconds in brackets."""
        self.begins("ready")
        whole_s, (taken_s, faults) = (self._begun[-1][1] - self._begun[0][1]) / NS_PER_S, self._begun[-1][2]
        parts = (
            f"{phase} {(until_ns - since_ns) / NS_PER_S:.2f} ({after[0] - before[0]:.2f})"
            for (phase, since_ns, before), (_, until_ns, after) in pairwise(self._begun)
            if until_ns - since_ns >= _SHOWN_NS_MIN
        )
        return (
            f"ready after {whole_s:.2f} s ({taken_s:.2f} s of processor time, {faults:,} page faults): "
            f"{', '.join(parts)}"
        )
