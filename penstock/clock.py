"""Time, as an object that is handed around.

Every part that needs the time takes a `Clock`; this module is the only one that reads the machine's.
Time is integer nanoseconds. `now_ns` is monotonic and has no meaning outside the process;
`wall_ns` is for stamps that leave it (logs, `created` fields).
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Protocol

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """Where a part gets its time from: the machine, a test or the simulator."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds, for durations and deadlines."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, for stamps that people and other machines read."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    # The machine's own functions: a request reads the clock some thirty times.
    now_ns = staticmethod(time.monotonic_ns)
    """Read the monotonic clock."""
    wall_ns = staticmethod(time.time_ns)
    """Read the wall clock."""


def process_age_ns() -> int:
    """How long ago this process was started, to a hundredth of a second; 0 where the system does not say."""
    try:
        # proc(5): the 22nd field, in ticks since boot; the second may have spaces, but ends with a bracket.
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0
    return max(0, boot_ns - ticks * NS_PER_S // os.sysconf("SC_CLK_TCK"))


class ManualClock:
    """A clock that moves only when told to, for tests and virtual time."""

    __slots__ = ("_now_ns", "_wall_offset_ns")

    def __init__(self, *, now_ns: int = 0, wall_ns: int = 1_700_000_000 * NS_PER_S) -> None:
        self._now_ns = now_ns
        self._wall_offset_ns = wall_ns - now_ns

    def now_ns(self) -> int:
        """The virtual time."""
        return self._now_ns

    def wall_ns(self) -> int:
        """The virtual time, shifted to a date."""
        return self._now_ns + self._wall_offset_ns

    def advance(self, ns: int) -> None:
        """Move time forward by `ns`; time never goes back."""
        assert ns >= 0, ns
        self._now_ns += ns


async def sleep(seconds: float) -> None:
    """Let the other tasks of an event loop run for `seconds`: the one place where a loop waits for time to
    pass.
    """
    await asyncio.sleep(seconds)
