"""Drawing a token: the native kernels against the torch sampler, milliseconds a row on one thread.

python bench/native_sampler.py
"""

from statistics import median

import numpy as np
import torch

from penstock.clock import SystemClock
from penstock.engine.native import NativeLibrary
from penstock.engine.sampler import NativeSampler, Sampler, SampleRows, TokenSampler

VOCAB_SIZE = 151_936
ROWS = 4
REPEATS = 15
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}


def sample_rows(given: dict[str, float]) -> SampleRows:
    return SampleRows(
        np.full(ROWS, given.get("temperature", 1.0), np.float32),
        np.full(ROWS, given.get("top_k", 0), np.int64),
        np.full(ROWS, given.get("top_p", 1.0), np.float64),
        np.full(ROWS, given.get("min_p", 0.0), np.float32),
        np.arange(ROWS, dtype=np.uint64),
        np.arange(ROWS),
    )


def row_ms(sampler: TokenSampler, logits: torch.Tensor, rows: SampleRows) -> float:
    clock = SystemClock()
    started_ns = clock.now_ns()
    sampler.draw(logits, rows)
    return (clock.now_ns() - started_ns) / 1e6 / ROWS


@torch.inference_mode()
def main() -> None:
    kernels = NativeLibrary()
    kernels.set_threads(1)
    torch.set_num_threads(1)
    twin, ours = Sampler(VOCAB_SIZE), NativeSampler(kernels)
    print(f"vocabulary of {VOCAB_SIZE:,}, {kernels.isa}; median of {REPEATS} (least, most)")
    for kind, spread in (("flat", 0.3), ("peaked", 3.0)):
        logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * spread
        for name, given in KINDS.items():
            rows = sample_rows(given)
            pairs = [(row_ms(twin, logits, rows), row_ms(ours, logits, rows)) for _ in range(REPEATS)]
            ratios = [theirs / mine for theirs, mine in pairs]
            theirs, mine = (median(column) for column in zip(*pairs, strict=True))
            print(
                f"{kind:7} {name:20} torch {theirs:7.2f}   native {mine:6.3f}   "
                f"{median(ratios):5.1f}x ({min(ratios):.1f}-{max(ratios):.1f})"
            )


if __name__ == "__main__":
    main()
