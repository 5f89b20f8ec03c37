"""Where a decode step of the native kernels goes:
`python -m bench.engine.native_step [--model 28m] [--threads 1 2] [--against OLD.so]`.

Random weights; every row has `--context` tokens behind it. For each part of a step: its median time (with
`--best` the least), its share, and how many times longer it takes than reading its weights does. The time of
reading is measured beside it: a loop of loads and nothing else over as many bytes, compiled here. With
`--against`, another build of the library takes turns with this one on weights of its own, and the last column
is its time over ours (above 1: ours is faster).
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.engine.native_decoder import MODELS, Side, spec
from penstock.engine.native import NativeLibrary
from penstock.engine.native.build import compiler
from penstock.engine.native.decoder import NativeDecoder
from penstock.engine.native.library import STEP_PARTS
from penstock.engine.native.weights import NativeWeight

MODELS["28m"] = spec(16384, 512, 1088, 8, (8, 4, 64), tied_head=True)
WEIGHTS = ("qkv", "o", "gate_up", "down")
READ_LOOP = """
#include <omp.h>
#include <immintrin.h>
extern "C" int read_all(const char *at, long bytes, int threads) {
  int sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
  {
    long piece = bytes / threads / 4096 * 4096, first = piece * omp_get_thread_num();
    __m256i s[4] = {};
    for (long i = first; i + 256 <= first + piece; i += 256)
      for (int j = 0; j < 4; j++) {
        _mm_prefetch(at + i + 4096 + 64 * j, _MM_HINT_T0);
        s[j] = _mm256_xor_si256(s[j], _mm256_loadu_si256((const __m256i *)(at + i + 64 * j)));
        s[j] = _mm256_xor_si256(s[j], _mm256_loadu_si256((const __m256i *)(at + i + 64 * j + 32)));
      }
    __m256i all = _mm256_xor_si256(_mm256_xor_si256(s[0], s[1]), _mm256_xor_si256(s[2], s[3]));
    sum += _mm256_extract_epi32(all, 0);
  }
  return sum;
}
"""


def read_loop() -> Callable[[int, int, int], int]:
    """(address, bytes, threads): loads and nothing else."""
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch) / "read.cpp", Path(scratch) / "read.so"
        source.write_text(READ_LOOP)
        flags = ["-O3", "-mavx2", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([compiler(), *flags, str(source), "-o", str(made)], check=True)
        read = ctypes.CDLL(str(made)).read_all
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return read


def part_bytes(side: Side) -> dict[str, int]:
    """Weights that each part of a step reads."""
    assert isinstance(side.decoder, NativeDecoder)
    packed = [each for each in side.decoder._kept if isinstance(each, NativeWeight)]
    layers = len(packed) // len(WEIGHTS)
    sizes = {
        name: sum(packed[layer * len(WEIGHTS) + i].num_bytes for layer in range(layers))
        for i, name in enumerate(WEIGHTS)
    }
    return sizes | {"head": packed[-1].num_bytes}


class Timed:
    """One library's decoder and what its steps took."""

    def __init__(self, kernels: NativeLibrary, args: argparse.Namespace, rows: int) -> None:
        self.side = Side(MODELS[args.model], rows, args.context, kernels, args.precision)
        self.totals: list[float] = []
        self.parts: list[np.ndarray] = []

    def step(self, context: int) -> None:
        assert isinstance(self.side.decoder, NativeDecoder)
        self.side.decoder.part_ns = counts = np.zeros(len(STEP_PARTS), np.int64)
        start = time.perf_counter()
        self.side.step(context, 1)
        self.totals.append(time.perf_counter() - start)
        self.parts.append(counts / 1e9)

    def typical(self, best: bool) -> dict[str, float]:
        """Seconds of every part, of what is between the parts in Python, and of all."""
        parts = (np.min if best else np.median)(self.parts, axis=0)
        outside = [all_ - parts.sum() for all_, parts in zip(self.totals, self.parts, strict=True)]
        total = parts.sum() + (min if best else statistics.median)(outside)
        named = dict(zip(STEP_PARTS, parts.tolist(), strict=True))
        return named | {"Python": total - sum(named.values()), "step": total}


def report(ours: Timed, other: Timed | None, reads: list[float], best: bool, title: str) -> None:
    sizes = part_bytes(ours.side)
    sizes["step"] = sum(sizes.values())
    reading = min(reads) if best else statistics.median(reads)
    per_byte = reading / sizes["step"]
    print(
        f"{title}: {sizes['step'] / 1e6:.1f} MB of weights, "
        f"read at {1 / per_byte / 1e9:.1f} GB/s in {reading * 1e3:.2f} ms"
    )
    mine, theirs = ours.typical(best), other.typical(best) if other else {}
    for name, seconds in sorted(mine.items(), key=lambda item: -item[1]):
        floor = f"{seconds / (sizes[name] * per_byte):6.2f}x of reading" if name in sizes else " " * 18
        ratio = f"  {theirs[name] / seconds:5.2f}x" if theirs else ""
        print(f"  {name:10} {seconds * 1e3:8.3f} ms {seconds / mine['step']:6.1%} {floor}{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="28m")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=142)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--precision", default="native")
    parser.add_argument("--best", action="store_true", help="for a busy machine: the least time of each part")
    parser.add_argument("--against", type=Path, help="another build of the library, of the same ABI")
    args = parser.parse_args()
    torch.set_num_threads(1)
    read = read_loop()
    libraries = [NativeLibrary()] + ([NativeLibrary(args.against)] if args.against else [])
    for rows in args.rows:
        sides = [Timed(each, args, rows) for each in libraries]
        buffer = torch.ones(sum(part_bytes(sides[0].side).values()), dtype=torch.uint8)
        for threads in args.threads:
            reads: list[float] = []
            for each in libraries:
                each.set_threads(threads)
            for side in sides:
                side.totals, side.parts = [], []
            for _ in range(args.rounds):
                for side in sides:
                    side.step(args.context)
                start = time.perf_counter()
                read(buffer.data_ptr(), buffer.nbytes, threads)
                reads.append(time.perf_counter() - start)
            other = sides[1] if args.against else None
            report(sides[0], other, reads, args.best, f"{rows} rows, {threads} threads")


if __name__ == "__main__":
    main()
