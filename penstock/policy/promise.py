"""What a request is promised: when its first token comes, and how fast the others follow.

    promise     by band and tier, as configured: 500 ms to the first token, 50 ms per further one
    on a worker never less than `idle_factor` times what the same request takes on an idle one

So the promise to a long prompt grows with its own computation, and a slow machine promises what it was measured to do:
one rule for both. Goodput is what was answered within the promise.
"""

import msgspec


class Promise(msgspec.Struct, frozen=True, gc=False):
    """In nanoseconds; 0 promises nothing."""

    ttft_ns: int = 0
    """From arrival to the first token."""
    tpot_ns: int = 0
    """Mean time per token after the first."""

    def on(self, factor: float, idle_ttft_ns: int, idle_tpot_ns: int) -> "Promise":
        """What holds for a request that takes so long on an idle worker."""
        return Promise(
            self.ttft_ns and max(self.ttft_ns, round(factor * idle_ttft_ns)),
            self.tpot_ns and max(self.tpot_ns, round(factor * idle_tpot_ns)),
        )

    def is_kept(self, ttft_ns: int, tpot_ns: int) -> bool:
        """Whether an answer with these times was in time. `tpot_ns` is 0 for a single token."""
        in_time = not self.ttft_ns or ttft_ns <= self.ttft_ns
        return in_time and (not self.tpot_ns or tpot_ns <= self.tpot_ns)
