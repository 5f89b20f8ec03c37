"""Measured steps: a law is found again from its own steps, and the error is that of steps which the fit never
saw.
"""

from pathlib import Path

import pytest

from penstock import rng
from penstock.errors import ConfigError
from penstock.planning.step_time import Step, StepsFile, fit, read_model, write_steps
from penstock.schedule.step import StepShape

TRUE = (2_000_000.0, 30_000.0, 50_000.0, 40.0, 5.0)


def steps(noise: float, count: int = 400) -> list[Step]:
    draw = rng.stream(1, "steps")
    made: list[Step] = []
    for _ in range(count):
        rows = draw.randint(1, 32)
        prompt = draw.choice((0, 0, 0, 64, 256))
        kv = rows * draw.randint(50, 2000) + prompt
        pairs = prompt * (prompt + 1) // 2
        terms = (1, rows + prompt, rows + bool(prompt), kv, pairs)
        exact = sum(c * t for c, t in zip(TRUE, terms, strict=True))
        made.append((*terms[1:], max(1, round(exact * draw.lognormvariate(0, noise)))))
    return made


def test_a_law_is_found_again() -> None:
    law, error = fit(steps(0.0))
    assert error.p95 < 0.02
    assert abs(error.bias) < 0.005
    shape = StepShape(8, 1, 256, 8 * 500 + 256, 256 * 257 // 2)
    exact = TRUE[0] + TRUE[1] * 264 + TRUE[2] * 9 + TRUE[3] * 4256 + TRUE[4] * 32896
    assert law.step_ns(shape) == pytest.approx(exact, rel=0.03)


def test_noise_is_told_as_error() -> None:
    _, error = fit(steps(0.1))
    assert 0.04 < error.median < 0.12
    assert error.steps == 80


def test_a_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    write_steps(path, StepsFile(name="here", steps=steps(0.0)))
    law = read_model(path)
    each = [law.step_ns(StepShape(3, 0, 0, count)) for count in (100, 103)]
    assert law.decode_ns(3, (100, 103)) == each
    assert min(each) > 1_000_000
    path.write_text('{"format":"x","name":"","steps":[]}')
    with pytest.raises(ConfigError, match="penstock-steps/1"):
        read_model(path)
    write_steps(path, StepsFile(name="here", steps=steps(0.0, 5)))
    with pytest.raises(ConfigError, match="too few"):
        read_model(path)
