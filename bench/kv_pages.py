"""Do larger KV pages make attention faster? `python bench/kv_pages.py [--json FILE]`.

Decode attention of the native kernel over the same tokens, with the 16-token blocks of a row scattered over
the cache (the worst that an allocator can do), with pages of k x 16 tokens as k neighbouring blocks, and with
a cache that really has larger blocks. All sides take turns and walk through all layers, so that no cache of
the processor holds the next call's keys. Times are the least CPU time of one thread, as a ratio to scattered
blocks of 16.
"""

import argparse
import time
from collections.abc import Callable

import torch
from provenance import add_json_option, write_result

from penstock.engine.native import NativeLibrary
from penstock.engine.native.ops import LayerCache, Rows, paged_attention

NUM_LAYERS = 12
SHAPES = {"0.5B (14 heads, 2 KV heads, 64)": (14, 2, 64), "1.7B (16 heads, 8 KV heads, 128)": (16, 8, 128)}
CONTEXTS = {"1 x 8192": (1, 8192), "8 x 1024": (8, 1024), "32 x 256": (32, 256)}
PAGES = (16, 64, 128)


def attention(
    kernels: NativeLibrary, shape: tuple[int, int, int], rows: int, length: int, *, page: int, block: int
) -> Callable[[int], object]:
    """One call for a layer: pages of `page` tokens are scattered, made of blocks of `block` tokens in
    order.
    """
    heads, kv_heads, dim = shape
    num_pages = rows * length // page
    cache = torch.randn(num_pages * page // block, NUM_LAYERS, 2, block, kv_heads, dim).bfloat16()
    layers = [LayerCache(cache, layer) for layer in range(NUM_LAYERS)]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    blocks = order[:, None] * (page // block) + torch.arange(page // block)
    table = Rows(
        block_tables=blocks.view(rows, -1).int(),
        query_starts=torch.arange(rows + 1).int(),
        context_lens=torch.full((rows,), length).int(),
    )
    q, out = torch.randn(rows, heads * dim).bfloat16(), torch.empty(rows, heads * dim).bfloat16()
    return lambda layer: paged_attention(kernels, q, layers[layer], table, scale=dim**-0.5, out=out)


def compare(
    kernels: NativeLibrary, shape: tuple[int, int, int], rows: int, length: int, rounds: int
) -> dict[str, float]:
    sides = {f"pages of {page} as blocks of 16": (page, 16) for page in PAGES}
    sides |= {f"blocks of {page}": (page, page) for page in PAGES[1:]}
    calls = {
        name: attention(kernels, shape, rows, length, page=page, block=block)
        for name, (page, block) in sides.items()
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            for layer in range(NUM_LAYERS):
                call(layer)
            best[name] = min(best[name], time.thread_time() - start)
    base = best[f"pages of {PAGES[0]} as blocks of 16"]
    return {name: round(base / spent, 3) for name, spent in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    add_json_option(parser)
    options = parser.parse_args()
    kernels = NativeLibrary()
    kernels.set_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape_name, shape in SHAPES.items():
        for context_name, (rows, length) in CONTEXTS.items():
            speed = compare(kernels, shape, rows, length, options.rounds)
            found.setdefault(shape_name, {})[context_name] = speed
            print(f"{shape_name}, {context_name}: {speed}", flush=True)
    write_result(options.json, {"speed against scattered blocks of 16": found, "threads": 1})


if __name__ == "__main__":
    main()
