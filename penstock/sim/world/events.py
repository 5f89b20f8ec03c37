"""Virtual time: one heap of events, in an order that no machine, hash seed or shortcut changes.

At one instant events are in the order of their actors' numbers, then of their rank, then of their entry. So
what happens at one actor does not depend on how many events another one needed to get there: a worker may
leap over steps in which nothing is told (worker.py) without moving anything that anybody else sees.
"""

import enum
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar

_What = TypeVar("_What")


class Rank(enum.IntEnum):
    """What goes first where one actor has several events at one instant."""

    FAULT = 0
    STEP = 1
    """A step of an engine ends: what it frees is there for whoever comes at the same time."""
    MESSAGE = 2
    TIMER = 3


_RANKS = 4


class Timeline:
    """The one heap of a simulation, and its clock. Fulfils `penstock.clock.Clock`."""

    __slots__ = ("_entered", "_heap", "_now_ns", "_wall_offset_ns", "num_events")

    def __init__(self, *, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        """`wall_ns` is the date at virtual time 0."""
        self._heap: list[tuple[int, int, int, Callable[[int, Any], None], Any]] = []
        self._entered = self._now_ns = 0
        self._wall_offset_ns = wall_ns
        self.num_events = 0
        """Events that have happened."""

    def now_ns(self) -> int:
        """The time of the event that happens now."""
        return self._now_ns

    def wall_ns(self) -> int:
        """The same as a date."""
        return self._now_ns + self._wall_offset_ns

    def at(
        self, when_ns: int, actor: int, rank: Rank, handler: Callable[[int, _What], None], what: _What
    ) -> None:
        """Let `handler(when_ns, what)` be called; not before now."""
        assert when_ns >= self._now_ns, f"{when_ns} is over: it is {self._now_ns}"
        self._entered = entered = self._entered + 1
        heappush(self._heap, (when_ns, actor * _RANKS + rank, entered, handler, what))

    def run(self) -> None:
        """Let events happen until there are none."""
        heap = self._heap
        while heap:
            self._now_ns, _, _, handler, what = heappop(heap)
            self.num_events += 1
            handler(self._now_ns, what)

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._heap:
            return False
        self._now_ns, _, _, handler, what = heappop(self._heap)
        self.num_events += 1
        handler(self._now_ns, what)
        return True

    @property
    def next_ns(self) -> int | None:
        """When the next event is; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        """Events that are still to happen."""
        return len(self._heap)


class LocalClock:
    """One actor's clock: set by the actor before it calls what reads it."""

    __slots__ = ("_wall_offset_ns", "time_ns")

    def __init__(self, *, wall_offset_ns: int = 0) -> None:
        self.time_ns = 0
        """Virtual time."""
        self._wall_offset_ns = wall_offset_ns

    def now_ns(self) -> int:
        """Monotonic time."""
        return self.time_ns

    def wall_ns(self) -> int:
        """The date, as this actor sees it."""
        return self.time_ns + self._wall_offset_ns
