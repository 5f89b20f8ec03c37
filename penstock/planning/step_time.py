"""How long a step of a simulated engine takes: the contract, and the facts that it is given.

Measured step times: the file of samples, the law that is fitted to them, and how far off it is on steps it
has not seen.

    {"format": "penstock-steps/1", "name": ..., "columns": [...], "steps": [[tokens, rows, kv_tokens, pairs,
    ns], ...]}

Every fifth step is held back from the fit. The law is that of schedule/step_time.py, which the engine learns
while it runs; here it is fitted by policy/estimates.py with a long memory: non-negative,
robust, of relative errors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from penstock.errors import ConfigError
from penstock.policy.estimates import OnlineLinearModel
from penstock.schedule.step import StepShape


class StepTime(Protocol):
    """A model of an engine's speed. Pure: the same shape takes the same time, whatever was asked before."""

    def step_ns(self, shape: StepShape) -> int:
        """Nanoseconds of one step; at least 1."""
        ...

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        """`step_ns` of steps that only decode so many rows, by the KV tokens that each of them reads."""
        ...


class LinearStepTime:
    """A fixed time per step, and one per decode row, prefill token and KV token read: the simplest engine
    there is.
    """

    __slots__ = ("_fixed_ns", "_kv_ps", "_prefill_ns", "_row_ns")

    def __init__(
        self, *, fixed_ns: int = 6_000_000, row_ns: int = 50_000, prefill_ns: int = 60_000, kv_ps: int = 2_000
    ) -> None:
        """`kv_ps` in picoseconds per KV token; the rest in nanoseconds."""
        self._fixed_ns, self._row_ns, self._prefill_ns, self._kv_ps = fixed_ns, row_ns, prefill_ns, kv_ps

    def step_ns(self, shape: StepShape) -> int:
        """See `StepTime`."""
        decode_rows, _, prefill_tokens, kv_tokens, _ = shape
        return (
            self._fixed_ns
            + self._row_ns * decode_rows
            + self._prefill_ns * prefill_tokens
            + self._kv_ps * kv_tokens // 1000
        )

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        """See `StepTime`."""
        base_ns, kv_ps = self._fixed_ns + self._row_ns * rows, self._kv_ps
        return [base_ns + kv_ps * count // 1000 for count in kv_tokens]


FORMAT = "penstock-steps/1"
COLUMNS = ("num_tokens", "num_sequences", "kv_read", "chunk_pairs", "step_ns")
HELD_BACK = 5
STEPS_MIN = 20
PASSES = 3
_UNITS = (1.0, 64.0, 16.0, 16_384.0, 1_048_576.0)
_MEMORY = 0.9995

Step = tuple[
    Annotated[int, Meta(ge=1)],
    Annotated[int, Meta(ge=1)],
    Annotated[int, Meta(ge=0)],
    Annotated[int, Meta(ge=0)],
    Annotated[int, Meta(ge=1)],
]
"""The work of a step (`StepLoad`), and its nanoseconds."""


class StepsFile(msgspec.Struct, frozen=True, kw_only=True):
    """Measured steps of one engine on one machine."""

    format: str = FORMAT
    name: str
    """Model, machine, settings, in words."""
    columns: tuple[str, ...] = COLUMNS
    steps: list[Step]
    num_blocks: int = 0
    """KV blocks of the engine that was measured; 0: not told."""


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions of held-back steps are off, as shares of the measured time."""

    steps: int
    median: float
    mean: float
    p95: float
    bias: float
    """Of the sum of all times: what a long run would be off."""


class FittedModel:
    """`StepTime` by the fitted law."""

    def __init__(self, law: OnlineLinearModel) -> None:
        self._coefficients = tuple(law.coefficients)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Nanoseconds of a step, and per token, row, KV token read and pair."""
        return self._coefficients

    def predict_ns(self, tokens: int, rows: int, kv_tokens: int, pairs: int) -> float:
        """The law."""
        fixed, token, row, kv, pair = self._coefficients
        return fixed + token * tokens + row * rows + kv * kv_tokens + pair * pairs

    def step_ns(self, shape: StepShape) -> int:
        """See `StepTime`."""
        decode_rows, prefill_rows, prefill_tokens, kv_tokens, pairs = shape
        return max(
            1,
            round(
                self.predict_ns(decode_rows + prefill_tokens, decode_rows + prefill_rows, kv_tokens, pairs)
            ),
        )

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        """See `StepTime`."""
        base_ns, kv_ns = self.predict_ns(rows, rows, 0, 0), self._coefficients[3]
        return [max(1, round(base_ns + kv_ns * count)) for count in kv_tokens]


def fit(steps: Sequence[Step]) -> tuple[FittedModel, FitError]:
    """The law of four fifths of the steps, and its error on the rest.

    Raises:
        ConfigError: there are too few.
    """
    if len(steps) < STEPS_MIN:
        raise ConfigError(f"{len(steps)} measured steps are too few to fit; at least {STEPS_MIN} are needed")
    held = [step for index, step in enumerate(steps) if index % HELD_BACK == HELD_BACK - 1]
    law = OnlineLinearModel(_UNITS, memory=_MEMORY)
    for _ in range(PASSES):
        for index, step in enumerate(steps):
            if index % HELD_BACK != HELD_BACK - 1:
                law.observe((1.0, *step[:4]), step[4])
    fitted = FittedModel(law)
    return fitted, _error(fitted, held)


def _error(law: FittedModel, steps: Sequence[Step]) -> FitError:
    predicted = [law.predict_ns(*step[:4]) for step in steps]
    errors = sorted(abs(guess - step[4]) / step[4] for guess, step in zip(predicted, steps, strict=True))
    total = sum(step[4] for step in steps)
    return FitError(
        steps=len(steps),
        median=errors[len(errors) // 2],
        mean=sum(errors) / len(errors),
        p95=errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        bias=(sum(predicted) - total) / total,
    )


def read_steps(path: Path) -> StepsFile:
    """Read a file of samples.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StepsFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no {FORMAT} file: {error}") from error
    if found.format != FORMAT or found.columns != COLUMNS:
        raise ConfigError(
            f"{path}: format is {found.format!r} with columns {found.columns}, expected {FORMAT!r}, {COLUMNS}"
        )
    return found


def read_model(path: Path) -> StepTime:
    """The law fitted to a file of samples.

    Raises:
        ConfigError: it cannot be read, or has too few steps.
    """
    return fit(read_steps(path).steps)[0]


def write_steps(path: Path, steps: StepsFile) -> None:
    """Write a file of samples.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.encode(steps) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
