"""The figures of an engine's steps: whose time they were, what they would have cost at least, and how much KV
memory they held.

A step is noted when it is over and counted with the next few: a step reads all of the model's weights, so
that behind it this code comes from memory again, which takes longer than the code itself.
"""

from penstock.planning.roofline import CostFloor
from penstock.planning.step_time import StepShape
from penstock.schedule.step import Flight, share_times

NOTED_MAX = 8
"""Steps that only decode and are not counted yet. The cost of a stream is known so many steps later: one that
its gateway ends meanwhile does not pay for the last of them.
"""


class StepMeters:
    """One engine's. `count` before `device_ns` of a request or the figures here are read."""

    def __init__(self, floor: CostFloor | None, block_tokens: int) -> None:
        """`floor`: None if the device's least time is not known."""
        self._floor, self._block_tokens = floor, block_tokens
        self._noted: list[tuple[Flight, int]] = []
        self._unshared_ns = self._held_blocks = 0

    def step_over(self, flight: Flight, spent_ns: int | None, num_blocks: int) -> None:
        """A step is over, after which so many KV blocks are held. Its requests share the time since the last
        one that computed anything: `spent_ns` since any; None: that time is nobody's.
        """
        self._held_blocks += num_blocks
        self._unshared_ns = 0 if spent_ns is None else self._unshared_ns + spent_ns
        if not flight.plan.work:
            return
        self._noted.append((flight, self._unshared_ns))
        self._unshared_ns = 0
        if len(self._noted) >= NOTED_MAX or not flight.only_decodes:
            self.count()

    def count(self) -> None:
        """Count the steps that were noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        share_times(noted)
        if self._floor is not None:
            for flight, _ in noted:
                self._floor.count(StepShape.of_flight(flight))

    @property
    def memory_ns(self) -> int:
        """See `CostFloor`; 0 if it is not known."""
        return 0 if self._floor is None else int(self._floor.memory_ns)

    @property
    def floor_ns(self) -> int:
        """See `CostFloor`; 0 if it is not known."""
        return 0 if self._floor is None else int(self._floor.floor_ns)

    @property
    def kv_held_tokens(self) -> int:
        """Tokens that the blocks in use could hold, summed over steps."""
        return self._held_blocks * self._block_tokens
