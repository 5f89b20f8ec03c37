"""How much of this machine's processors others have, while a test measures how long something takes."""

import os
import time
from collections.abc import Set as AbstractSet
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (1, 2, 3, 8)
"""Columns of a processor's line in /proc/stat: user, nice, system, and steal (what a virtual machine's host
gave to others). Interrupts are left out: where they are counted, most are of the test's own connections.
"""
_SHARE_MAX = 0.9


class ForeignLoad:
    """From now on: what the processors do that this process may use, less what it and its descendants do."""

    def __init__(self) -> None:
        self._processors, self._proc = os.sched_getaffinity(0), Path("/proc")
        self._began_s, self._foreign = time.monotonic(), self._ticks()

    def slowdown(self) -> float:
        """By how much longer others let things take since then: 1 on a machine of our own, 2 where they had
        half of it; at most 10.
        """
        given = (time.monotonic() - self._began_s) * len(self._processors) * _TICKS_PER_S
        share = max(0, self._ticks() - self._foreign) / given
        return 1 / (1 - min(share, _SHARE_MAX))

    def _ticks(self) -> int:
        return foreign_ticks(self._proc, self._processors, os.getpid())


def foreign_ticks(proc: Path, processors: AbstractSet[int], pid: int) -> int:
    """By `/proc`, what these processors did since the machine started that was no work of the process `pid`
    and of its descendants; in ticks.
    """
    names = {b"cpu%d" % number for number in processors}
    lines = (line.split() for line in (proc / "stat").read_bytes().splitlines())
    return sum(int(line[at]) for line in lines if line[0] in names for at in _BUSY) - _own_ticks(proc, pid)


def _own_ticks(proc: Path, own: int) -> int:
    """Of this process and of its descendants: those that live, and those that ended and were waited for."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()  # The name before it may be any bytes.
        except OSError:  # It has ended.
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_own(pid: int) -> bool:
        while pid and pid != own:
            pid = parents.get(pid, 0)
        return pid != 0

    return sum(ticks[pid] for pid in ticks if is_own(pid))
