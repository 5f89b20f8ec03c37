"""`penstock bench --fit`: every step of our own engine is measured with what it computed, and the law is
fitted to them.
"""

from penstock.bench.fit import OUTPUT_TOKENS, ROUNDS, measure_steps
from penstock.clock import SystemClock
from penstock.config.checkpoints import resolve
from penstock.config.engine_settings import EngineSettings
from penstock.planning.step_time import fit


def test_every_step_is_measured_with_what_it_computed() -> None:
    engine = EngineSettings(max_running=2, threads=1, kv_memory_bytes=16 << 20)
    reported: list[str] = []
    path = str(resolve("penstock-demo-mini"))
    measured = measure_steps(
        path, engine, SystemClock(), seed=1, progress=lambda stage, *_: reported.append(stage)
    )
    decode = [step for step in measured.steps if step[0] == step[1]]
    assert {step[1] for step in decode} == {1, 2}
    assert all(step[3] == 0 for step in decode), "pairs are of chunks of prompts only"
    # One row alone and two together, each for about an answer's length.
    assert len(decode) >= 2 * ROUNDS * (OUTPUT_TOKENS - 6)
    assert any(step[3] > 0 for step in measured.steps)
    assert measured.num_blocks > 0
    law, error = fit(measured.steps)
    assert sum(law.coefficients) > 0
    assert error.steps == len(measured.steps) // 5
    assert "2 at once" in reported
