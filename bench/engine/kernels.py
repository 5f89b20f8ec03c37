"""Native kernels: a layer's product and the draw of a token beside torch's, attention over int8 KV beside
bfloat16.

    python -m bench.engine.kernels [product] [draw] [attention] [--rounds 15] [--all-shapes] [--json FILE]

CPU time of one thread, in turns, so that what else the machine does counts for little. Weights rotate through
more memory than the last-level cache gives one core, keys and values through the layers of a model: they are
read from where a model's would be. Ratios are over torch, and over bfloat16.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from native_ops import Rows, linear, paged_attention

from bench.harness import Spread, command_line, in_turns, ratio, spread, table, write_result
from penstock.engine.kv_cache import round_heads
from penstock.engine.native import NativeLibrary
from penstock.engine.native.decoder import LayerCache
from penstock.engine.native.library import Type
from penstock.engine.native.weights import exact, int4, int8, pack
from penstock.engine.sampler import NativeSampler, Sampler, SampleRows
from penstock.types import BLOCK_TOKENS

SHAPES = {
    "28M gate_up": (2816, 512), "28M qkv": (768, 512), "28M down": (512, 1408), "0.5B qkv": (1152, 896),
    "0.5B gate_up": (9728, 896), "0.5B down": (896, 4864), "wide": (4096, 4096), "0.5B head": (151936, 896),
}  # fmt: skip
ROTATION_BYTES, COPIES_MAX = 256 << 20, 64
DRAWS: dict[str, dict[str, float]] = {
    "top_p 0.9": {"top_p": 0.9}, "temperature": {}, "greedy": {"temperature": 0.0}, "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05}, "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}  # fmt: skip
VOCABULARY, DRAWN = 151_936, 4
HEADS = {"0.5B (14 heads, 2 KV heads, 64)": (14, 2, 64), "1.7B (16 heads, 8 KV heads, 128)": (16, 8, 128)}
STEPS = {
    "8 x 1024": (8, 1024, 1),
    "1 x 8192": (1, 8192, 1),
    "32 x 256": (32, 256, 1),
    "chunk": (1, 4096, 256),
}
"""Rows, their tokens, and how many of them are new."""
LAYERS, BURST = 12, 8
SHORT = {"product": 2, "draw": 4, "attention": 1}
"""So many cases of each question are the ratchet's."""

Kinds = dict[str, Callable[[], float]]
"""By kind: microseconds of a call. The first kind is what the others are held against."""


def burst(calls: Iterable[Callable[[], object]], num: int = BURST) -> Callable[[], float]:
    """The median of some calls behind one that does not count: torch's idle threads spin after theirs."""
    turning = itertools.cycle(calls)

    def once() -> float:
        next(turning)()
        took_ns: list[int] = []
        for _ in range(num):
            start = time.thread_time_ns()
            next(turning)()
            took_ns.append(time.thread_time_ns() - start)
        return statistics.median(took_ns) / 1e3

    return once


def product(kernels: NativeLibrary, shape: tuple[int, int], rows: int) -> Kinds:
    n, k = shape
    plain = [
        torch.randn(n, k).bfloat16() for _ in range(max(2, min(COPIES_MAX, ROTATION_BYTES // (n * k * 2))))
    ]
    x, out = torch.randn(rows, k).bfloat16(), torch.empty(rows, n, dtype=torch.bfloat16)
    kinds: Kinds = {"torch": burst([partial(F.linear, x, weight) for weight in plain])}
    forms = {"bf16": exact, "int8": partial(int8, kernels), "int4": partial(int4, kernels)}
    for name, form in forms.items():
        if name != "int8" or kernels.supports(Type.I8):
            packed = [pack(kernels, form(weight)) for weight in plain]
            kinds[name] = burst([partial(linear, kernels, each, x, out=out) for each in packed])
    return kinds


def draw(kernels: NativeLibrary, scale: float, given: dict[str, float]) -> Kinds:
    logits = torch.randn(DRAWN, VOCABULARY, generator=torch.Generator().manual_seed(1)) * scale
    rows = SampleRows(
        np.full(DRAWN, given.get("temperature", 1.0), np.float32),
        np.full(DRAWN, given.get("top_k", 0), np.int64), np.full(DRAWN, given.get("top_p", 1.0), np.float64),
        np.full(DRAWN, given.get("min_p", 0.0), np.float32), np.arange(DRAWN, dtype=np.uint64),
        np.arange(DRAWN),
    )  # fmt: skip
    samplers = {"torch": Sampler(VOCABULARY), "native": NativeSampler(kernels)}
    return {name: burst([partial(each.draw, logits, rows)], 3) for name, each in samplers.items()}


def attention(kernels: NativeLibrary, shape: tuple[int, int, int], step: tuple[int, int, int]) -> Kinds:
    (heads, kv_heads, dim), (rows, length, new) = shape, step
    blocks = rows * length // BLOCK_TOKENS
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    tables = Rows(
        block_tables=order.view(rows, -1).int(), query_starts=(torch.arange(rows + 1) * new).int(),
        context_lens=torch.full((rows,), length).int(),
    )  # fmt: skip
    q = torch.randn(rows * new, heads * dim).bfloat16()
    kv = torch.randn(blocks, LAYERS, 2, BLOCK_TOKENS, kv_heads, dim).bfloat16()

    def kind(cache: torch.Tensor) -> Callable[[], float]:
        layers = [LayerCache(cache, layer, torch.bfloat16) for layer in range(LAYERS)]
        how = {"scale": dim**-0.5, "out": torch.empty_like(q)}
        return burst([partial(paged_attention, kernels, q, each, tables, **how) for each in layers], LAYERS)

    return {"bf16": kind(kv), "int8": kind(round_heads(kv))}


Cases = dict[str, Callable[[], Kinds]]


def questions(kernels: NativeLibrary) -> dict[str, Cases]:
    """The cases of each; those of the ratchet first."""
    return {
        "product": {
            f"{name}, {rows} rows": partial(product, kernels, shape, rows)
            for name, shape in SHAPES.items()
            for rows in (1, 32)
        },
        "draw": {
            f"{form}, {name}": partial(draw, kernels, scale, given)
            for name, given in DRAWS.items()
            for form, scale in (("flat", 0.3), ("peaked", 3.0))
        },
        "attention": {
            f"{heads}, {name}": partial(attention, kernels, shape, step)
            for heads, shape in HEADS.items()
            for name, step in STEPS.items()
        },
    }


@torch.inference_mode()
def times(rounds: int, asked: Iterable[str], *, short: bool) -> dict[str, dict[str, list[float]]]:
    """Microseconds: by case and kind, one a round."""
    kernels = NativeLibrary()
    kernels.set_threads(1)
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    for question in asked:
        cases = questions(kernels)[question].items()
        for name, kinds in itertools.islice(cases, SHORT[question] if short else None):
            found[f"{question}: {name}"] = in_turns(rounds, kinds())
    return found


def ratios(found: dict[str, dict[str, list[float]]]) -> dict[str, Spread]:
    """Of each kind over the first one of its case."""
    return {
        f"{case}, {kind}": ratio(us, next(iter(kinds.values())))
        for case, kinds in found.items()
        for kind, us in list(kinds.items())[1:]
    }


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet."""
    return ratios(times(rounds, SHORT, short=True))


def main() -> None:
    parser = command_line(__doc__, rounds=15)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(SHORT)}")
    parser.add_argument("--all-shapes", action="store_true", help="not only the cases of the ratchet")
    args = parser.parse_args()
    found = times(args.rounds, args.questions or SHORT, short=not args.all_shapes)
    over = ratios(found)
    rows = [
        (case, kind, spread(us), over.get(f"{case}, {kind}", ""))
        for case, kinds in found.items()
        for kind, us in kinds.items()
    ]
    isa = NativeLibrary().isa
    print(table((f"one thread, {isa}", "", "us of CPU", "ratio"), rows))
    write_result(
        args.json, {"isa": isa, "us": found, "ratios": {name: each.rounded() for name, each in over.items()}}
    )


if __name__ == "__main__":
    main()
