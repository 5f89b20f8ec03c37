"""Where the time went from a worker process's start to its readiness, for one line of its log; decides
nothing.
"""

import resource
from collections.abc import Callable

from penstock.clock import NS_PER_S, Clock

SHOWN_S_MIN = 0.005
"""Shorter phases are not told of."""
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
        self._began_ns = self._since_ns = clock.now_ns() - age_ns
        self._phase, self._used = "starting", (0.0, 0)
        self._parts = list[str]()

    def begins(self, phase: str) -> None:
        """The phase `phase` begins, unless it is the one that runs."""
        if phase == self._phase:
            return
        now_ns, used = self._clock.now_ns(), self._usage()
        wall_s, taken_s = (now_ns - self._since_ns) / NS_PER_S, used[0] - self._used[0]
        if wall_s >= SHOWN_S_MIN:
            self._parts.append(f"{self._phase} {wall_s:.2f} ({taken_s:.2f})")
        self._phase, self._since_ns, self._used = phase, now_ns, used

    def report(self) -> str:
        """The line, now that the process is ready: seconds by phase, processor seconds in brackets."""
        self.begins("")
        whole_s, (taken_s, faults) = (self._since_ns - self._began_ns) / NS_PER_S, self._used
        return (
            f"ready after {whole_s:.2f} s ({taken_s:.2f} s of processor time, {faults:,} page faults): "
            f"{', '.join(self._parts)}"
        )
