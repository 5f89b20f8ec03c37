"""By how much steps run over their predicted time at the worst that is usual: a high quantile, tracked and
not stored.

A law fitted to means says nothing about a neighbour on the same cores or a processor that slows down, and who
promises a bound must know how far off it tends to be. Every step moves the quantile by a fixed amount, up if
it was above and down if below, in such proportion that both balance where the share `1 - _QUANTILE` is above
(Robbins and Monro, "A stochastic approximation method", 1951). Only the sign of an error counts, so that one
hiccup of a thousand times the time moves it no further than one of twice the time.
"""

USUAL = 1.25
"""Where it starts: what steps of a busy machine were measured to need."""
WORST = 2.0
"""It goes no higher: over that a machine is not noisy but overloaded, and no size of chunk would help."""
_QUANTILE = 0.98
_RATE = 0.1
"""How far a step moves it: 0.098 up, or 0.002 down. It rises within a few bad steps and forgets them over
hundreds."""


class Overrun:
    """The 98th percentile of (time a step took) / (time it was predicted to take), within 1 and `WORST`."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = USUAL
        """Predicted times this is what nearly every step keeps."""

    def observe(self, ratio: float) -> None:
        """Learn from a step that took `ratio` times what was predicted."""
        change = _RATE * (_QUANTILE - (ratio <= self.factor))
        self.factor = min(max(self.factor + change, 1.0), WORST)
