"""How long a step takes: a linear law fitted to the steps that were run, for whoever must know before.

    seconds = fixed + token * tokens + sequence * rows + kv_read * KV tokens read + pair * chunk pairs

The terms are what a step does: it reads the weights once, multiplies every token, draws for every row, reads
the stored keys and values of every row once, and in chunks of prompts attends from each token to each before
it (a decode row's attention is its KV read). One law fits the processor and the GPU: what is nearly free
there gets a coefficient near zero.

Pure and deterministic: the engine, the gateway and the simulator use the same object.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from penstock.schedule.plan import RowWork

_SCALES = (1.0, 1 / 64, 1 / 16, 1 / 16_384, 1 / 1_048_576)
"""One unit of each term, so that all are of about the same size: keeps the sums well conditioned."""
_TERMS = range(len(_SCALES))
_MEMORY = 0.98
"""What remains per step of what was known about loads like the step's: the last 50 such steps decide."""
_RIDGE = 1e-4
"""Pull towards zero, in units of one observation: decides only what no step has shown yet."""
_TOO_SHORT = 0.5
"""A time below this share of what was expected counts as this share. Too long ones weigh little by themselves."""
_CHECK_EVERY = 16
"""Observations between two looks at what is expected, for that bound: solving each time would cost too much."""
_OBSERVATIONS_MIN = 4
_LEVERAGE_MAX = 4.0
"""A prediction is trusted up to twice the deviation that one observation of that very load would leave."""

Vector = list[float]


@dataclass(slots=True, frozen=True)
class StepLoad:
    """What a step computes, as numbers that cost time."""

    num_tokens: int = 0
    num_sequences: int = 0
    kv_read: int = 0
    """Tokens whose KV is read, once per row: the row's context with this step's tokens."""
    chunk_pairs: int = 0
    """(token, token before it) pairs in the attention of chunks; 0 for rows that decode."""

    @classmethod
    def of(cls, rows: Sequence[RowWork]) -> "StepLoad":
        """The load of a plan's rows. O(rows)."""
        num_tokens = kv_read = pairs = 0
        for work in rows:
            count = work.num_tokens
            num_tokens += count
            kv_read += work.num_computed + count
            if count > 1:
                pairs += _chunk_pairs(work.num_computed, count)
        return cls(num_tokens, len(rows), kv_read, pairs)

    def plus(self, num_computed: int, num_tokens: int) -> "StepLoad":
        """The load with one more row, which computes `num_tokens` tokens after `num_computed` stored ones."""
        pairs = _chunk_pairs(num_computed, num_tokens) if num_tokens > 1 else 0
        return StepLoad(
            self.num_tokens + num_tokens,
            self.num_sequences + 1,
            self.kv_read + num_computed + num_tokens,
            self.chunk_pairs + pairs,
        )


@dataclass(slots=True, frozen=True)
class StepCost:
    """The fitted coefficients, in nanoseconds; none is negative."""

    fixed_ns: float
    token_ns: float
    sequence_ns: float
    kv_read_ns: float
    pair_ns: float

    def predict_ns(self, load: StepLoad) -> float:
        """The law at a load."""
        return (
            self.fixed_ns
            + self.token_ns * load.num_tokens
            + self.sequence_ns * load.num_sequences
            + self.kv_read_ns * load.kv_read
            + self.pair_ns * load.chunk_pairs
        )


class StepTimeModel:
    """Recursive least squares of relative errors, with coefficients that are never negative.

    Every observation is divided by its own time, so that a decode step of 5 ms and a chunk of 500 ms count
    alike, and a hiccup of ten times the time counts a hundredth. Forgetting is directional (Cao and Schwartz, "A directional forgetting algorithm based on the
    decomposition of the information matrix", Automatica 2000): a step makes room only for what it shows, so
    an hour of pure decoding does not wash away what prompts cost, and a constant load cannot blow up what it
    does not tell. The sums are kept as information (normal equations), so that the constrained solution can
    be found from them, when it is asked for.
    """

    __slots__ = ("_cost", "_count", "_expected", "_information", "_passive", "_target", "_unit_ns")

    def __init__(self) -> None:
        self._information: list[Vector] = [[_RIDGE * (i == j) for j in _TERMS] for i in _TERMS]
        self._target: Vector = [0.0 for _ in _TERMS]
        self._passive = tuple(_TERMS)  # Terms that were not held at zero in the last solution.
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
            units, self._passive = _solve_non_negative(self._information, self._target, self._passive)
            self._cost = StepCost(
                *(unit * scale * self._unit_ns for unit, scale in zip(units, _SCALES, strict=True))
            )
        return self._cost

    def predict_ns(self, load: StepLoad) -> float:
        """How long a step with this load takes; 0 before the first observation."""
        return self.cost.predict_ns(load)

    def observe(self, load: StepLoad, step_ns: int) -> None:
        """Learn from a step that took `step_ns`. What cannot be a step's time (0 or less) is ignored."""
        if step_ns <= 0:
            return
        if not self._count:
            self._unit_ns = float(step_ns)
        row = _row(load, self._unit_ns / max(step_ns, _TOO_SHORT * self._expected.predict_ns(load)))
        image = _times(self._information, row)
        r0, r1, r2, r3, r4 = row
        i0, i1, i2, i3, i4 = image
        forget = (1 - _MEMORY) / (r0 * i0 + r1 * i1 + r2 * i2 + r3 * i3 + r4 * i4)
        along = forget * sum(map(mul, row, self._target))
        # What was known along this row shrinks by the forgetting factor, then the row comes in (target: 1).
        self._target = [t + r - along * i for t, r, i in zip(self._target, row, image, strict=True)]
        self._information = [
            [
                a + r * r0 - f * i0,
                b + r * r1 - f * i1,
                c + r * r2 - f * i2,
                d + r * r3 - f * i3,
                e + r * r4 - f * i4,
            ]
            for (a, b, c, d, e), r, f in zip(self._information, row, [forget * i for i in image], strict=True)
        ]
        self._count += 1
        self._cost = None
        if self._count % _CHECK_EVERY == 0:
            self._expected = self.cost

    def trusts(self, load: StepLoad) -> bool:
        """Whether enough was observed to predict this load: about this load, or about the terms it is made of.

        The test is the leverage of the load (its prediction's variance in units of one observation's).
        """
        expected_ns = self.predict_ns(load) if self._count >= _OBSERVATIONS_MIN else 0.0
        if expected_ns <= 0:
            return False
        row = _row(load, self._unit_ns / expected_ns)
        return sum(map(mul, row, _solve(self._information, row, tuple(_TERMS)))) <= _LEVERAGE_MAX


def _chunk_pairs(num_computed: int, num_tokens: int) -> int:
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


def _row(load: StepLoad, weight: float) -> Vector:
    """The terms of a load in their units, times `weight`."""
    return [
        weight,
        load.num_tokens * _SCALES[1] * weight,
        load.num_sequences * _SCALES[2] * weight,
        load.kv_read * _SCALES[3] * weight,
        load.chunk_pairs * _SCALES[4] * weight,
    ]


def _times(matrix: list[Vector], row: Vector) -> Vector:
    """The matrix times the vector; written out, since this runs in the engine's step loop."""
    r0, r1, r2, r3, r4 = row
    return [a * r0 + b * r1 + c * r2 + d * r3 + e * r4 for a, b, c, d, e in matrix]


def _solve(matrix: list[Vector], right: Vector, terms: tuple[int, ...]) -> Vector:
    """The solution of the equations of `terms` alone (symmetric, positive definite), by Cholesky; zero elsewhere."""
    lower: list[Vector] = []
    for i, term in enumerate(terms):
        line: Vector = []
        for j in range(i):
            known = sum(map(mul, line, lower[j]))
            line.append((matrix[term][terms[j]] - known) / lower[j][j])
        pivot = matrix[term][term] - sum(map(mul, line, line))
        # Rounding may eat the last of a tiny pivot; it is then as good as the ridge.
        line.append(max(pivot, _RIDGE * 1e-6) ** 0.5)
        lower.append(line)
    forward: Vector = []
    for i, term in enumerate(terms):
        forward.append((right[term] - sum(lower[i][k] * forward[k] for k in range(i))) / lower[i][i])
    solution = [0.0 for _ in right]
    for i in reversed(range(len(terms))):
        rest = sum(lower[k][i] * solution[terms[k]] for k in range(i + 1, len(terms)))
        solution[terms[i]] = (forward[i] - rest) / lower[i][i]
    return solution


def _solve_non_negative(
    matrix: list[Vector], right: Vector, passive: tuple[int, ...]
) -> tuple[Vector, tuple[int, ...]]:
    """Least squares without negative coefficients, by an active set (Lawson and Hanson 1974) from a first guess.

    Returns the solution and the terms that are not held at zero. With five terms a few rounds settle it; the
    bound stops rounding from going in circles, and then negative rests are cut.
    """
    for _ in range(4 * len(right)):
        solution = _solve(matrix, right, passive)
        worst = min(passive, key=lambda i: solution[i], default=-1)
        if worst >= 0 and solution[worst] < 0:
            passive = tuple(i for i in passive if i != worst)
            continue
        pull = {i: right[i] - sum(map(mul, matrix[i], solution)) for i in _TERMS if i not in passive}
        best = max(pull, key=lambda i: pull[i], default=-1)
        if best < 0 or pull[best] <= 1e-9 * (1 + abs(right[best])):
            break
        passive = tuple(sorted((*passive, best)))
    else:
        solution = _solve(matrix, right, passive)
    return [max(value, 0.0) for value in solution], passive
