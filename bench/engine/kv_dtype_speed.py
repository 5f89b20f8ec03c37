"""Is attention over a KV cache in int8 slower or faster than over bfloat16?

    python -m bench.engine.kv_dtype_speed [--rounds 15] [--json FILE]

The native kernel over the same tokens, one layer after another so that no cache of the processor holds the
next call's keys, in turns; CPU time of one thread, so that what else the machine does counts for little. The
figure is int8 over bfloat16 of each round: its median and its range; below 1 int8 is faster.
"""

import statistics
import time
from collections.abc import Callable

import torch
from native_ops import Rows, paged_attention

from bench.harness import Spread, command_line, spread, write_result
from penstock.engine.kv_cache import round_heads
from penstock.engine.native import NativeLibrary
from penstock.engine.native.decoder import LayerCache
from penstock.types import BLOCK_TOKENS

NUM_LAYERS = 12
SHAPES = {"0.5B (14 heads, 2 KV heads, 64)": (14, 2, 64), "1.7B (16 heads, 8 KV heads, 128)": (16, 8, 128)}
STEPS = {
    "1 x 8192": (1, 8192, 1),
    "8 x 1024": (8, 1024, 1),
    "32 x 256": (32, 256, 1),
    "chunk": (1, 4096, 256),
}
"""Rows, their tokens, and how many of them are new."""


def attention(
    kernels: NativeLibrary, shape: tuple[int, int, int], step: tuple[int, int, int], *, rounded: bool
) -> Callable[[int], object]:
    """One call for a layer."""
    (heads, kv_heads, dim), (rows, length, new) = shape, step
    blocks = rows * length // BLOCK_TOKENS
    kv = torch.randn(blocks, NUM_LAYERS, 2, BLOCK_TOKENS, kv_heads, dim).bfloat16()
    cache = round_heads(kv) if rounded else kv
    layers = [LayerCache(cache, layer, torch.bfloat16) for layer in range(NUM_LAYERS)]
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    table = Rows(
        block_tables=order.view(rows, -1).int(),
        query_starts=(torch.arange(rows + 1) * new).int(),
        context_lens=torch.full((rows,), length).int(),
    )
    q = torch.randn(rows * new, heads * dim).bfloat16()
    out = torch.empty_like(q)
    return lambda layer: paged_attention(kernels, q, layers[layer], table, scale=dim**-0.5, out=out)


def ratios(
    kernels: NativeLibrary, shape: tuple[int, int, int], step: tuple[int, int, int], rounds: int
) -> list[float]:
    """int8 over bfloat16, by round."""
    calls = {rounded: attention(kernels, shape, step, rounded=rounded) for rounded in (False, True)}
    found: list[float] = []
    for round_ in range(rounds + 1):  # The first one warms up.
        spent: dict[bool, float] = {}
        for rounded in (False, True) if round_ % 2 else (True, False):
            start = time.thread_time()
            for layer in range(NUM_LAYERS):
                calls[rounded](layer)
            spent[rounded] = time.thread_time() - start
        found.append(spent[True] / spent[False])
    return found[1:]


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: int8 over bfloat16."""
    kernels = NativeLibrary()
    kernels.set_threads(1)
    (name, shape), step = next(iter(SHAPES.items())), "8 x 1024"
    return {f"{name}, {step}": spread(ratios(kernels, shape, STEPS[step], rounds))}


def main() -> None:
    parser = command_line(__doc__, rounds=15)
    args = parser.parse_args()
    kernels = NativeLibrary()
    kernels.set_threads(1)
    result: dict[str, dict[str, object]] = {}
    for shape_name, shape in SHAPES.items():
        for step_name, step in STEPS.items():
            found = ratios(kernels, shape, step, args.rounds)
            middle = statistics.median(found)
            print(f"{shape_name}, {step_name}: {spread(found)}", flush=True)
            result.setdefault(shape_name, {})[step_name] = {"int8_over_bf16": found, "median": middle}
    write_result(args.json, {"isa": kernels.isa, "threads": 1, "steps": result})


if __name__ == "__main__":
    main()
