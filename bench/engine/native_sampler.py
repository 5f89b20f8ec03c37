"""Drawing a token: the native kernels against the torch sampler, milliseconds of CPU a row.

python -m bench.engine.native_sampler [--rounds 15] [--json FILE]
"""

import time
from collections.abc import Collection
from functools import partial

import numpy as np
import torch

from bench.harness import Spread, command_line, in_turns, ratio, spread, table, write_result
from penstock.engine.native import NativeLibrary
from penstock.engine.sampler import NativeSampler, Sampler, SampleRows, TokenSampler

VOCAB_SIZE = 151_936
ROWS = 4
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
    started_ns = time.thread_time_ns()
    sampler.draw(logits, rows)
    return (time.thread_time_ns() - started_ns) / 1e6 / ROWS


@torch.inference_mode()
def milliseconds(rounds: int, kinds: Collection[str] = tuple(KINDS)) -> dict[str, dict[str, list[float]]]:
    """Of a row: by distribution and kind of draw, then by sampler and round."""
    kernels = NativeLibrary()
    kernels.set_threads(1)
    torch.set_num_threads(1)
    samplers = {"torch": Sampler(VOCAB_SIZE), "native": NativeSampler(kernels)}
    found: dict[str, dict[str, list[float]]] = {}
    for shape, scale in (("flat", 0.3), ("peaked", 3.0)):
        logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * scale
        for kind in kinds:
            rows = sample_rows(KINDS[kind])
            calls = {name: partial(row_ms, each, logits, rows) for name, each in samplers.items()}
            found[f"{shape}, {kind}"] = in_turns(rounds, calls)
    return found


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: native over torch."""
    kinds = ("top_p 0.9", "temperature")
    return {name: ratio(ms["native"], ms["torch"]) for name, ms in milliseconds(rounds, kinds).items()}


def main() -> None:
    args = command_line(__doc__, rounds=15).parse_args()
    found = milliseconds(args.rounds)
    rows = [
        (name, spread(ms["torch"]), spread(ms["native"]), ratio(ms["torch"], ms["native"]))
        for name, ms in found.items()
    ]
    print(f"vocabulary of {VOCAB_SIZE:,}, {NativeLibrary().isa}; milliseconds a row")
    print(table(("draw", "torch", "native", "torch / native"), rows))
    write_result(args.json, {"isa": NativeLibrary().isa, "ms_per_row": found})


if __name__ == "__main__":
    main()
