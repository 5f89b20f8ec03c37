"""A linear law with coefficients that are never negative, learned one observation at a time.

    value = coefficient[0] * term[0] + coefficient[1] * term[1] + ...

Recursive least squares of relative errors, kept as information (normal equations), with three changes:
what deviates more than is usual weighs less (Huber, "Robust Estimation of a Location Parameter", 1964), old
knowledge fades only where new knowledge comes in (directional forgetting: Cao and Schwartz, "A directional
forgetting algorithm based on the decomposition of the information matrix", Automatica 2000), and coefficients
stay at zero or above (coordinate descent on the normal equations, warm from the last solution), so that more
of anything never predicts less. Knows nothing of what the terms mean.
"""

from collections.abc import Sequence
from operator import mul

_RIDGE = 1e-3
"""Pull towards the prior, in units of one observation: decides only what nothing has shown yet."""
_SWEEPS = 4
"""Rounds of coordinate descent per observation, at most. The solution moves little from one to the next."""
_STILL = 1e-6
"""A round that moves no coefficient by more than this share of itself is the last."""
_HUBER = 2.0
"""Deviations over this many times the usual one count in proportion, not squared: about 1.35 standard
deviations of a normal error, where Huber's estimate is 95 % as good as the mean."""
_USUAL_MIN = 0.02
"""The usual deviation is never taken for less: else a change after a quiet hour would be taken for
outliers."""
_USUAL_PACE = 0.05
_FIRST = 8
"""Observations before the law's own expectation sets the scale of errors."""

Vector = list[float]


class OnlineLinearModel:
    """The law and what it was learned from.

    Terms and values are numbers of any unit, the same at every call.
    """

    __slots__ = (
        "_coefficients", "_count", "_information", "_law", "_memory", "_target", "_unit", "_units", "_usual",
    )  # fmt: skip

    def __init__(
        self, units: Sequence[float], *, memory: float, prior: Sequence[float] | None = None
    ) -> None:
        """`units`: about how large each term is, for conditioning.

        `memory`: what remains of knowledge about a load when one more observation of it comes in. `prior`:
        coefficients that are believed before any are seen.
        """
        assert 0 < memory < 1
        terms = range(len(units))
        self._units = [1 / unit for unit in units]
        self._memory = memory
        self._unit = 0.0  # About the first value: makes the numbers independent of the machine's speed.
        self._law = [0.0 for _ in terms] if prior is None else list(prior)
        self._coefficients = [known * unit for known, unit in zip(self._law, units, strict=True)]
        self._information: list[Vector] = [[_RIDGE * (i == j) for j in terms] for i in terms]
        self._target = [_RIDGE * known for known in self._coefficients]
        self._usual = 0.25
        self._count = 0

    @property
    def num_observed(self) -> int:
        """Observations taken in so far."""
        return self._count

    def predict(self, terms: Sequence[float]) -> float:
        """The value at these terms; what the prior says before the first observation."""
        return sum(map(mul, map(mul, terms, self._units), self._coefficients)) * (self._unit or 0.0)

    def coefficient(self, index: int) -> float:
        """What one unit of a term adds to the value."""
        return self._law[index]

    def observe(self, terms: Sequence[float], value: float, *, scale: float = 0.0) -> None:
        """Learn that `terms` gave `value` (0 or more).

        Errors count relative to `scale`, or to the value expected.
        """
        assert value >= 0
        if not self._unit:
            # A prior is a statement about values as such, so it is kept when the unit becomes known.
            self._unit = max(value, scale, 1.0)
            self._coefficients = [known / self._unit for known in self._coefficients]
            self._target = [known / self._unit for known in self._target]
        expected = self.predict(terms)
        if scale <= 0:
            scale = max(expected, value / 4) if self._count >= _FIRST else value
        scale = max(scale, self._unit * 1e-3)
        deviation = abs(value - expected) / scale
        trust = min(1.0, _HUBER * self._usual / deviation) if deviation and self._count >= _FIRST else 1.0
        self._usual += _USUAL_PACE * (min(deviation, 3 * self._usual) - self._usual)
        self._usual = max(self._usual, _USUAL_MIN)
        weight = self._unit / scale
        self._take([t * u * weight for t, u in zip(terms, self._units, strict=True)], value / scale, trust)
        self._count += 1

    def _take(self, row: Vector, right: float, trust: float) -> None:
        """One weighted equation: fade what was known along the row, add the row, move towards the
        solution.
        """
        image = [sum(map(mul, line, row)) for line in self._information]
        known = sum(map(mul, row, image))
        fade = (1 - self._memory) * trust / known if known > 0 else 0.0
        along = fade * sum(map(mul, row, self._target))
        self._target = [
            t + trust * right * r - along * i for t, r, i in zip(self._target, row, image, strict=True)
        ]
        for line, r, i in zip(self._information, row, image, strict=True):
            add, drop = trust * r, fade * i
            line[:] = [a + add * s - drop * j for a, s, j in zip(line, row, image, strict=True)]
        self._settle()

    def _settle(self) -> None:
        found = self._coefficients
        for _ in range(_SWEEPS):
            moved = False
            for i, line in enumerate(self._information):
                was, own = found[i], line[i]
                rest = self._target[i] - sum(map(mul, line, found)) + own * was
                now = rest / max(own, _RIDGE * 1e-3) if rest > 0 else 0.0
                if abs(now - was) > _STILL * now:
                    moved = True
                found[i] = now
            if not moved:
                break
        self._law = [known * unit * self._unit for known, unit in zip(found, self._units, strict=True)]
