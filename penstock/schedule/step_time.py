"""How long a step takes: a linear law fitted to the steps that were run, for predictions.

    seconds = fixed + token * tokens + sequence * rows + kv_read * KV tokens read + pair * chunk pairs

The terms are what a step does: it reads the weights once, multiplies every token, draws for every row, reads
the stored keys and values of every row once, and in chunks of prompts attends from each token to each before
it (a decode row's attention is its KV read). One law fits the processor and the GPU: what is nearly free
there gets a coefficient near zero.

Pure and deterministic: the engine, the gateway and the simulator use the same object.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter, mul

import msgspec

from penstock.schedule.plan import Drafting, RowWork

_SCALES = (1.0, 1 / 64, 1 / 16, 1 / 16_384, 1 / 1_048_576)
"""One unit of each term, so that all are of about the same size: keeps the sums well conditioned."""
_ALL = 0b11111
"""Every term. Sets of terms are masks."""
_MEMORY = 0.98
"""The part of the knowledge about loads like the step's that remains per step: the last 50 such steps
decide."""
_RIDGE = 1e-4
"""Pull towards zero, in units of one observation: decides only what no step has shown yet."""
_TOO_SHORT = 0.5
"""A time below this share of what was expected counts as this share. Too long ones weigh little by
themselves."""
_CHECK_EVERY = 16
"""Observations between two looks at what is expected, for that bound: solving each time would cost too
much."""
_PIVOT_MIN = _RIDGE * 1e-6
_OBSERVATIONS_MIN = 4
_LEVERAGE_MAX = 4.0
"""A prediction is trusted up to twice the deviation that one observation of that very load would leave."""

Vector = tuple[float, float, float, float, float]
Triangle = tuple[
    float, float, float, float, float, float, float, float, float, float, float, float, float, float, float
]
"""The lower half of a symmetric matrix, row by row."""


class StepLoad(msgspec.Struct, frozen=True, gc=False):
    """The work of a step, as numbers that cost time."""

    num_tokens: int = 0
    num_sequences: int = 0
    """Rows, and their drafts."""
    kv_read: int = 0
    """Tokens whose KV is read, once per row: the row's context with this step's tokens."""
    chunk_pairs: int = 0
    """(token, token before it) pairs in the attention of chunks; 0 for rows that decode."""
    num_steps: int = 1
    """More where the numbers are sums over several steps: the law is linear, so it holds for sums too."""

    def with_drafts(self, num_computed: int, num_drafts: int) -> "StepLoad":
        """The load where one of the rows that decode, after so many stored tokens, has so many drafts behind
        its token: each is drawn at, as a row is, and all of them make a chunk.
        """
        return StepLoad(
            self.num_tokens + num_drafts,
            self.num_sequences + num_drafts,
            self.kv_read + num_drafts,
            self.chunk_pairs + chunk_pairs(num_computed, 1 + num_drafts),
            self.num_steps,
        )

    @classmethod
    def of_drafting(cls, drafting: Drafting) -> "StepLoad":
        """The load of the passes of a model that guesses."""
        return cls(
            drafting.num_tokens,
            drafting.num_sequences,
            drafting.kv_read,
            drafting.chunk_pairs,
            drafting.num_passes,
        )

    @classmethod
    def of(cls, rows: Sequence[RowWork]) -> "StepLoad":
        """The load of a plan's rows. O(rows)."""
        num_tokens = kv_read = pairs = 0
        for work in rows:
            count = work.num_tokens
            num_tokens += count
            kv_read += work.num_computed + count
            if count > 1:
                pairs += chunk_pairs(work.num_computed, count)
        return cls(num_tokens, len(rows), kv_read, pairs)

    def plus(self, num_computed: int, num_tokens: int) -> "StepLoad":
        """The load with one more row, which computes `num_tokens` tokens after `num_computed` stored ones."""
        pairs = 0
        if num_tokens > 1:  # `chunk_pairs`: a call less, since every prompt of every step is asked about.
            pairs = num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2
        return StepLoad(
            self.num_tokens + num_tokens,
            self.num_sequences + 1,
            self.kv_read + num_computed + num_tokens,
            self.chunk_pairs + pairs,
        )


@dataclass(slots=True)
class StepSums:
    """The work of an engine since its start, and the time."""

    steps: int = 0
    tokens: int = 0
    sequences: int = 0
    kv_read: int = 0
    pairs: int = 0
    ns: int = 0

    def add(self, load: StepLoad, step_ns: int) -> None:
        """One or several steps more."""
        self.steps += load.num_steps
        self.tokens += load.num_tokens
        self.sequences += load.num_sequences
        self.kv_read += load.kv_read
        self.pairs += load.chunk_pairs
        self.ns += step_ns

    @property
    def counts(self) -> tuple[int, int, int, int, int, int]:
        """All of them, in their order."""
        return self.steps, self.tokens, self.sequences, self.kv_read, self.pairs, self.ns

    def since(self, before: "StepSums") -> tuple[StepLoad, int]:
        """The work after `before`, and the time that it took."""
        assert self.steps >= before.steps, "steps are only added"
        load = StepLoad(
            self.tokens - before.tokens,
            self.sequences - before.sequences,
            self.kv_read - before.kv_read,
            self.pairs - before.pairs,
            self.steps - before.steps,
        )
        return load, self.ns - before.ns


class StepCost(msgspec.Struct, frozen=True, gc=False):
    """The fitted coefficients, in nanoseconds; none is negative."""

    fixed_ns: float
    token_ns: float
    sequence_ns: float
    kv_read_ns: float
    pair_ns: float

    def predict_ns(self, load: StepLoad) -> float:
        """The law at a load."""
        return (
            self.fixed_ns * load.num_steps
            + self.token_ns * load.num_tokens
            + self.sequence_ns * load.num_sequences
            + self.kv_read_ns * load.kv_read
            + self.pair_ns * load.chunk_pairs
        )


class StepTimeModel:
    """Recursive least squares of relative errors, with coefficients that are never negative.

    Every observation is divided by its own time, so that a decode step of 5 ms and a chunk of 500 ms count
    alike, and a hiccup of ten times the time counts a hundredth. Forgetting is directional (Cao and Schwartz,
    "A directional forgetting algorithm based on the decomposition of the information matrix", Automatica
    2000): a step makes room only for what it shows, so an hour of pure decoding does not wash away what
    prompts cost, and a constant load cannot blow up what it does not tell. The sums are kept as information
    (normal equations), so that the constrained solution can be found from them, when it is asked for.
    """

    __slots__ = ("_cost", "_count", "_expected", "_information", "_passive", "_target", "_unit_ns")

    def __init__(self) -> None:
        self._information: Triangle = (
            _RIDGE, 0.0, _RIDGE, 0.0, 0.0, _RIDGE, 0.0, 0.0, 0.0, _RIDGE, 0.0, 0.0, 0.0, 0.0, _RIDGE,
        )  # fmt: skip
        self._target: Vector = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._passive = _ALL  # Terms that were not held at zero in the last solution.
        self._unit_ns = 0.0  # The first time observed: makes the numbers independent of the machine's speed.
        self._count = 0
        self._cost: StepCost | None = None  # Solved when asked for.
        self._expected = StepCost(0.0, 0.0, 0.0, 0.0, 0.0)  # Solved every so often.

    @property
    def num_observed(self) -> int:
        """Steps taken in so far."""
        return self._count

    @property
    def cost(self) -> StepCost:
        """The coefficients as of now: all zero before the first observation."""
        if self._cost is None:
            (u0, u1, u2, u3, u4), self._passive = _solve_non_negative(
                self._information, self._target, self._passive
            )
            assert min(u0, u1, u2, u3, u4) >= 0, "no part of a step takes less than no time"
            unit_ns, (s0, s1, s2, s3, s4) = self._unit_ns, _SCALES
            self._cost = StepCost(
                u0 * s0 * unit_ns, u1 * s1 * unit_ns, u2 * s2 * unit_ns, u3 * s3 * unit_ns, u4 * s4 * unit_ns
            )
        return self._cost

    def predict_ns(self, load: StepLoad) -> float:
        """How long a step with this load takes; 0 before the first observation."""
        cost = self._cost or self.cost
        return (  # `StepCost.predict_ns`: a call less, several times for each step with prompts.
            cost.fixed_ns * load.num_steps
            + cost.token_ns * load.num_tokens
            + cost.sequence_ns * load.num_sequences
            + cost.kv_read_ns * load.kv_read
            + cost.pair_ns * load.chunk_pairs
        )

    def observe(self, load: StepLoad, step_ns: int) -> None:
        """Learn from a step that took `step_ns`. A value of 0 or less is no step's time and is ignored."""
        if step_ns <= 0:
            return
        if not self._count:
            self._unit_ns = float(step_ns)
        shortest_ns = _TOO_SHORT * self._expected.predict_ns(load)
        weight = self._unit_ns / (step_ns if step_ns >= shortest_ns else shortest_ns)
        # Written out: this runs in the engine's step loop.
        r0, r1, r2, r3, r4 = _row(load, weight)
        a00, a10, a11, a20, a21, a22, a30, a31, a32, a33, a40, a41, a42, a43, a44 = self._information
        i0 = a00 * r0 + a10 * r1 + a20 * r2 + a30 * r3 + a40 * r4
        i1 = a10 * r0 + a11 * r1 + a21 * r2 + a31 * r3 + a41 * r4
        i2 = a20 * r0 + a21 * r1 + a22 * r2 + a32 * r3 + a42 * r4
        i3 = a30 * r0 + a31 * r1 + a32 * r2 + a33 * r3 + a43 * r4
        i4 = a40 * r0 + a41 * r1 + a42 * r2 + a43 * r3 + a44 * r4
        assert weight > 0, weight
        forget = (1 - _MEMORY) / (r0 * i0 + r1 * i1 + r2 * i2 + r3 * i3 + r4 * i4)
        t0, t1, t2, t3, t4 = self._target
        along = forget * (r0 * t0 + r1 * t1 + r2 * t2 + r3 * t3 + r4 * t4)
        # The knowledge along this row shrinks by the forgetting factor, then the row comes in (target: 1).
        self._target = (
            t0 + r0 - along * i0,
            t1 + r1 - along * i1,
            t2 + r2 - along * i2,
            t3 + r3 - along * i3,
            t4 + r4 - along * i4,
        )
        f0, f1, f2, f3, f4 = forget * i0, forget * i1, forget * i2, forget * i3, forget * i4
        self._information = (
            a00 + r0 * r0 - f0 * i0,
            a10 + r1 * r0 - f1 * i0,
            a11 + r1 * r1 - f1 * i1,
            a20 + r2 * r0 - f2 * i0,
            a21 + r2 * r1 - f2 * i1,
            a22 + r2 * r2 - f2 * i2,
            a30 + r3 * r0 - f3 * i0,
            a31 + r3 * r1 - f3 * i1,
            a32 + r3 * r2 - f3 * i2,
            a33 + r3 * r3 - f3 * i3,
            a40 + r4 * r0 - f4 * i0,
            a41 + r4 * r1 - f4 * i1,
            a42 + r4 * r2 - f4 * i2,
            a43 + r4 * r3 - f4 * i3,
            a44 + r4 * r4 - f4 * i4,
        )
        self._count += 1
        self._cost = None
        if self._count % _CHECK_EVERY == 0:
            self._expected = self.cost

    def trusts(self, load: StepLoad) -> bool:
        """Whether enough was observed to predict this load: about this load, or about the terms it is made
        of.

        The test is the leverage of the load (its prediction's variance in units of one observation's).
        """
        expected_ns = self.predict_ns(load) if self._count >= _OBSERVATIONS_MIN else 0.0
        if expected_ns <= 0:
            return False
        row = _row(load, self._unit_ns / expected_ns)
        l0, l1, l2, l3, l4 = _solve(self._information, row, _ALL)
        r0, r1, r2, r3, r4 = row
        return r0 * l0 + r1 * l1 + r2 * l2 + r3 * l3 + r4 * l4 <= _LEVERAGE_MAX


def chunk_pairs(num_computed: int, num_tokens: int) -> int:
    """(token, token before it) pairs of a chunk of `num_tokens` tokens behind `num_computed` stored ones."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


def _row(load: StepLoad, weight: float) -> Vector:
    """The terms of a load in their units, times `weight`."""
    return (
        load.num_steps * weight,
        load.num_tokens * _SCALES[1] * weight,
        load.num_sequences * _SCALES[2] * weight,
        load.kv_read * _SCALES[3] * weight,
        load.chunk_pairs * _SCALES[4] * weight,
    )


def _solve(matrix: Triangle, right: Vector, terms: int) -> Vector:
    """The solution of the equations of `terms` alone (symmetric, positive definite), by Cholesky; zero
    elsewhere.

    A term that is left out keeps an equation of its own: one times it is zero. Written out for the step loop.
    """
    a00, a10, a11, a20, a21, a22, a30, a31, a32, a33, a40, a41, a42, a43, a44 = matrix
    b0, b1, b2, b3, b4 = right
    if terms != _ALL:
        if not terms & 1:
            a00, a10, a20, a30, a40, b0 = 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
        if not terms & 2:
            a10, a11, a21, a31, a41, b1 = 0.0, 1.0, 0.0, 0.0, 0.0, 0.0
        if not terms & 4:
            a20, a21, a22, a32, a42, b2 = 0.0, 0.0, 1.0, 0.0, 0.0, 0.0
        if not terms & 8:
            a30, a31, a32, a33, a43, b3 = 0.0, 0.0, 0.0, 1.0, 0.0, 0.0
        if not terms & 16:
            a40, a41, a42, a43, a44, b4 = 0.0, 0.0, 0.0, 0.0, 1.0, 0.0
    # Rounding may eat the last of a tiny pivot; it is then as good as the ridge.
    least = _PIVOT_MIN
    l00 = (a00 if a00 > least else least) ** 0.5
    l10 = a10 / l00
    pivot = a11 - l10 * l10
    l11 = (pivot if pivot > least else least) ** 0.5
    l20 = a20 / l00
    l21 = (a21 - l20 * l10) / l11
    pivot = a22 - (l20 * l20 + l21 * l21)
    l22 = (pivot if pivot > least else least) ** 0.5
    l30 = a30 / l00
    l31 = (a31 - l30 * l10) / l11
    l32 = (a32 - (l30 * l20 + l31 * l21)) / l22
    pivot = a33 - (l30 * l30 + l31 * l31 + l32 * l32)
    l33 = (pivot if pivot > least else least) ** 0.5
    l40 = a40 / l00
    l41 = (a41 - l40 * l10) / l11
    l42 = (a42 - (l40 * l20 + l41 * l21)) / l22
    l43 = (a43 - (l40 * l30 + l41 * l31 + l42 * l32)) / l33
    pivot = a44 - (l40 * l40 + l41 * l41 + l42 * l42 + l43 * l43)
    l44 = (pivot if pivot > least else least) ** 0.5
    f0 = b0 / l00
    f1 = (b1 - l10 * f0) / l11
    f2 = (b2 - (l20 * f0 + l21 * f1)) / l22
    f3 = (b3 - (l30 * f0 + l31 * f1 + l32 * f2)) / l33
    f4 = (b4 - (l40 * f0 + l41 * f1 + l42 * f2 + l43 * f3)) / l44
    x4 = f4 / l44
    x3 = (f3 - l43 * x4) / l33
    x2 = (f2 - (l32 * x3 + l42 * x4)) / l22
    x1 = (f1 - (l21 * x2 + l31 * x3 + l41 * x4)) / l11
    x0 = (f0 - (l10 * x1 + l20 * x2 + l30 * x3 + l40 * x4)) / l00
    return x0, x1, x2, x3, x4


def _solve_non_negative(matrix: Triangle, right: Vector, passive: int) -> tuple[Vector, int]:
    """Least squares without negative coefficients, by an active set (Lawson and Hanson 1974) from a first
    guess.

    Returns the solution and the terms that are not held at zero. With five terms a few rounds settle it; the
    bound stops rounding from going in circles, and then negative rests are cut.
    """
    for _ in range(4 * len(right)):
        solution = _solve(matrix, right, passive)
        if (lowest := min(solution)) < 0:
            passive &= ~(1 << solution.index(lowest))
            continue
        if passive == _ALL:
            return solution, passive
        best, largest = -1, 0.0
        for i in range(len(right)):
            if not passive >> i & 1 and (pull := right[i] - _known(matrix, i, solution)) > largest:
                best, largest = i, pull
        if best < 0 or largest <= 1e-9 * (1 + abs(right[best])):
            return solution, passive
        passive |= 1 << best
    x0, x1, x2, x3, x4 = _solve(matrix, right, passive)
    return (max(x0, 0.0), max(x1, 0.0), max(x2, 0.0), max(x3, 0.0), max(x4, 0.0)), passive


def _known(matrix: Triangle, i: int, solution: Vector) -> float:
    """One row of the matrix times the solution."""
    return sum(map(mul, _ROWS[i](matrix), solution))


_ROWS = tuple(
    itemgetter(*(i * (i + 1) // 2 + j if j <= i else j * (j + 1) // 2 + i for j in range(len(_SCALES))))
    for i in range(len(_SCALES))
)
"""Each row of a symmetric matrix, out of its `Triangle`."""


# By how much steps run over their predicted time at the worst that is usual: a high quantile, tracked and
# not stored.
#
# A law fitted to means says nothing about a neighbour on the same cores or a processor that slows down, and
# who promises a bound must know how far off it tends to be. Every step moves the quantile by a fixed
# amount, up if it was above and down if below, in such proportion that both balance where the share `1 -
# _QUANTILE` is above (Robbins and Monro, "A stochastic approximation method", 1951). Only the sign of an
# error counts, so that one hiccup of a thousand times the time moves it no further than one of twice the
# time.

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
