"""How much of this machine's processors others have, while a test measures how long something takes."""

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (1, 2, 3, 6, 7, 8)
"""Columns of a processor's line in /proc/stat: user, nice, system, both kinds of interrupts, and steal (what
a virtual machine's host gave to others).
"""
_SHARE_MAX = 0.9


class ForeignLoad:
    """From now on: what the processors do that this process may use, less what it and its descendants do."""

    def __init__(self) -> None:
        self._began_s, self._foreign = time.monotonic(), _foreign_ticks()

    def slowdown(self) -> float:
        """By how much longer others let things take since then: 1 on a machine of our own, 2 where they had
        half of it; at most 10.
        """
        given = (time.monotonic() - self._began_s) * len(os.sched_getaffinity(0)) * _TICKS_PER_S
        share = max(0.0, _foreign_ticks() - self._foreign) / given
        return 1 / (1 - min(share, _SHARE_MAX))


def _foreign_ticks() -> int:
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    return sum(int(line[at]) for line in lines if line[0] in names for at in _BUSY) - _own_ticks()


def _own_ticks() -> int:
    """Of this process and of its descendants that live."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # The name before it may have spaces.
        except OSError:  # It has ended.
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_own(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid != 0

    return sum(ticks[pid] for pid in ticks if is_own(pid))
