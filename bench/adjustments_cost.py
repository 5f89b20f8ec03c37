"""The cost of penalties, bias and minimum lengths in one step: the table in docs/sampling.md.

python bench/adjustments_cost.py
"""

from statistics import median

import numpy as np
import torch

from penstock.clock import SystemClock
from penstock.engine.adjustments import Adjustments
from penstock.schedule.plan import NewRow
from penstock.types import RequestId, SamplingParams

VOCAB_SIZE = 151_936
REPEATS = 15
KINDS = {
    "none": SamplingParams(),
    "repetition_penalty": SamplingParams(repetition_penalty=1.1),
    "frequency_penalty": SamplingParams(frequency_penalty=1.0),
    "logit_bias, 1,024 entries": SamplingParams(logit_bias=tuple((i, 1.0) for i in range(1024))),
    "min_tokens": SamplingParams(min_tokens=10**6, stop_token_ids=(1, 2)),
}


@torch.inference_mode()
def cost_ms(params: SamplingParams, *, rows: int, known: int, prompt: int) -> float:
    """Median time to change one step's logits and to put them back."""
    clock = SystemClock()
    adjustments = Adjustments(rows)
    for row in range(rows):
        adjustments.enter(NewRow(RequestId(f"r{row}"), row, (), prompt, params))
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (rows, known)).astype(np.int32)
    logits, positions = torch.randn(rows, VOCAB_SIZE), np.full(rows, known)
    times: list[int] = []
    for _ in range(REPEATS):
        started_ns = clock.now_ns()
        adjustments.apply(logits, np.arange(rows), positions, tokens).undo()
        times.append(clock.now_ns() - started_ns)
    return median(times) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    for name, params in KINDS.items():
        one, many = (cost_ms(params, rows=rows, known=1000, prompt=500) for rows in (1, 64))
        print(f"{name:26} 1 row {one:7.3f} ms   64 rows {many:7.3f} ms")
    for name, prompt in (("repetition_penalty", 131_000), ("frequency_penalty", 10)):
        print(
            f"{name:26} 1 row of 131,072 tokens "
            f"{cost_ms(KINDS[name], rows=1, known=131_072, prompt=prompt):7.3f} ms"
        )


if __name__ == "__main__":
    main()
