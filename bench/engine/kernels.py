"""What do our kernels take beside torch's and llama.cpp's? Microseconds of CPU by case, and ratios.

A layer's product and the draw of a token beside torch's, attention over int8 KV beside bfloat16; and with
`ggml` products beside llama.cpp's own.

    python -m bench.engine.kernels [product] [draw] [attention] [--rounds 15] [--all-shapes] [--json FILE]
    bench/peers/install_llama_cpp.sh avx2
    python -m bench.engine.kernels ggml --all-shapes --isa avx2 [--rounds 7] [--json FILE]

CPU time of one thread, in turns, so that what else the machine does counts for little. Weights rotate through
more memory than the last-level cache gives one core, keys and values through the layers of a model: they are
read from where a model's would be. Ratios are over torch and over bfloat16 (below 1: ours takes less time),
and ggml's over ours: how many times less time ours takes.
"""

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from native_ops import Rows, linear, linear_job, paged_attention

from bench.harness import OUT, REPOSITORY, Spread, command_line, in_turns, ratios, rounds_table, write_result
from bench.peers.engines import LLAMA_CPP, Variant, missing
from penstock.engine.kv_cache import round_heads
from penstock.engine.native import NativeLibrary
from penstock.engine.native.decoder import LayerCache
from penstock.engine.native.library import Type
from penstock.engine.native.weights import Matrix, exact, int4, int8, pack
from penstock.engine.sampler import NativeSampler, Sampler, SampleRows
from penstock.types import BLOCK_TOKENS

SHAPES = {
    "28M gate_up": (2176, 512), "28M down": (512, 1088), "494M gate_up": (9728, 896),
    "494M down": (896, 4864), "28M qkv": (1024, 512), "494M qkv": (1152, 896), "wide": (4096, 4096),
    "494M head": (151936, 896),
}  # fmt: skip
GGML = {"bf16": ("f16", 16), "int8": ("q8_0", 8), "int4": ("q4_0", 4)}
"""The type of llama.cpp that each of ours is held against, and its bits."""
GGML_SHAPES, SWEEPS = 4, 5
"""The first of the shapes, and over how many sweeps the least time is taken."""
ROTATION_BYTES, COPIES_MAX = 256 << 20, 64
DRAWS: dict[str, dict[str, float]] = {
    "top_p 0.9": {"top_p": 0.9}, "temperature": {}, "greedy": {"temperature": 0.0}, "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05}, "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}  # fmt: skip
VOCABULARY, DRAWN = 151_936, 4
HEADS = {"0.5B (14 heads, 2 KV heads, 64)": (14, 2, 64), "1.7B (16 heads, 8 KV heads, 128)": (16, 8, 128)}
STEPS = {
    "8 x 1024": (8, 1024, 1), "1 x 8192": (1, 8192, 1), "32 x 256": (32, 256, 1), "chunk": (1, 4096, 256)
}  # fmt: skip
"""Rows, their tokens, and how many of them are new."""
LAYERS, BURST = 12, 8
SHORT = {"product": 2, "draw": 4, "attention": 1, "ggml": 3}
"""So many cases of each question without `--all-shapes`."""
RATCHET = ("product", "draw", "attention")

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


def copies_of(num_bytes: int) -> int:
    return max(2, ROTATION_BYTES // num_bytes)


def forms(kernels: NativeLibrary) -> dict[str, Callable[[torch.Tensor], Matrix]]:
    return {"bf16": exact, "int8": partial(int8, kernels), "int4": partial(int4, kernels)}


def product(kernels: NativeLibrary, shape: tuple[int, int], rows: int) -> Kinds:
    n, k = shape
    plain = [torch.randn(n, k).bfloat16() for _ in range(min(COPIES_MAX, copies_of(2 * n * k)))]
    x, out = torch.randn(rows, k).bfloat16(), torch.empty(rows, n, dtype=torch.bfloat16)
    kinds: Kinds = {"torch": burst([partial(F.linear, x, weight) for weight in plain])}
    for name, form in forms(kernels).items():
        if name != "int8" or kernels.supports(Type.I8):
            packed = [pack(kernels, form(weight)) for weight in plain]
            kinds[name] = burst([partial(linear, kernels, each, x, out=out) for each in packed])
    return kinds


@cache
def build_ggml(isa: str) -> Path:
    """Compile ggml's side against the libraries that the installation keeps."""
    if why := missing(Variant("llama.cpp", "f16", isa)):
        sys.exit(f"llama.cpp: {why}")
    home, program = LLAMA_CPP[isa].parent, OUT / f"ggml_products{isa}"
    libraries = [str(home / "lib" / f"lib{name}.a") for name in ("ggml", "ggml-cpu", "ggml-base")]
    source = str(REPOSITORY / "bench" / "peers" / "ggml_products.cpp")
    flags = ("-O2", "-std=c++17", f"-I{home / 'include'}", source, "-o", str(program))
    subprocess.run(["g++", *flags, *libraries, "-lgomp", "-lpthread", "-lm", "-ldl"], check=True)
    return program


def beside_ggml(kernels: NativeLibrary, shape: tuple[int, int], precision: str, rows: int, isa: str) -> Kinds:
    """One product of each, whose call is made ready before: a model's step is one call for all of them."""
    (n, k), (kind, bits) = shape, GGML[precision]
    matrix, copies = forms(kernels)[precision](torch.randn(n, k).bfloat16()), copies_of(n * k * bits // 8)
    packed = [pack(kernels, matrix) for _ in range(copies)]
    x, out = torch.randn(rows, k).bfloat16(), torch.empty(rows, n, dtype=torch.bfloat16)
    jobs = [linear_job(each, x, out) for each in packed]
    command = [str(build_ggml(isa)), kind, *map(str, (n, k, rows, copies, SWEEPS))]

    def theirs() -> float:
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def ours(kept: object = (packed, x, out)) -> float:  # The jobs have their addresses.
        least_s = float("inf")
        for _ in range(SWEEPS + 1):
            began_s = time.process_time()
            for job in jobs:
                kernels.linear(job)
            least_s = min(least_s, time.process_time() - began_s)
        return least_s / copies * 1e6

    return {precision: ours, kind: theirs}


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


def sizes(shape: tuple[int, int]) -> str:
    """In a case's name: a record of another shape is another case's."""
    return f"{shape[0]}x{shape[1]}"


def questions(kernels: NativeLibrary, isa: str) -> dict[str, Cases]:
    """The cases of each; those of the ratchet first."""
    return {
        "product": {
            f"{name} {sizes(shape)}, {rows} rows": partial(product, kernels, shape, rows)
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
        "ggml": {
            f"{name} {sizes(shape)}, {rows} rows, {precision}": partial(
                beside_ggml, kernels, shape, precision, rows, isa
            )
            for name, shape in itertools.islice(SHAPES.items(), GGML_SHAPES)
            for rows in (1, 8, 32)
            for precision in GGML
        },
    }


@torch.inference_mode()
def times(
    rounds: int, asked: Iterable[str], *, short: bool, isa: str = ""
) -> dict[str, dict[str, list[float]]]:
    """Microseconds: by case and kind, one a round."""
    kernels = NativeLibrary(isa=isa or None)
    kernels.set_threads(1)
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    for question in asked:
        cases = questions(kernels, isa)[question].items()
        for name, kinds in itertools.islice(cases, SHORT[question] if short else None):
            found[f"{question}: {name}"] = in_turns(rounds, kinds())
    return found


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet."""
    return ratios(times(rounds, RATCHET, short=True))


def main() -> None:
    parser = command_line(__doc__, rounds=15)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(SHORT)}")
    parser.add_argument("--all-shapes", action="store_true", help="not only the first cases")
    parser.add_argument("--isa", choices=LLAMA_CPP, default="", help="hold ours and llama.cpp to it")
    args = parser.parse_args()
    found = times(args.rounds, args.questions or RATCHET, short=not args.all_shapes, isa=args.isa)
    isa = NativeLibrary(isa=args.isa or None).isa
    print(rounds_table(f"one thread, {isa}", "us of CPU", found))
    over = {name: each.rounded() for name, each in ratios(found).items()}
    write_result(args.json, {"isa": isa, "us": found, "ratios": over})


if __name__ == "__main__":
    main()
