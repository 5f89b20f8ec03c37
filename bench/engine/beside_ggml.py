"""Our products beside ggml's on AVX2, the weights that llama.cpp reads: one thread, processor time, in turns.

    bench/peers/install_llama_cpp.sh avx2
    python -m bench.engine.beside_ggml [--rounds 7] [--shapes "28M gate_up"] [--json FILE]

A round runs ggml's program (`peers/ggml_products.cpp`), then our kernels, for every shape, precision and
number of rows; told are the median of the rounds' ratios (above 1: ours takes less time) and their range.
Processor time is what a busy machine disturbs least; shared caches and memory it disturbs all the same.
"""

import statistics
import subprocess
import sys
import time
from ctypes import pointer
from pathlib import Path

import torch

from bench.harness import command_line, ratio, table, write_result
from bench.peers.engines import LLAMA_CPP, OUT
from penstock.engine.native import NativeLibrary
from penstock.engine.native.library import PsLinear, Type
from penstock.engine.native.weights import Matrix, exact, int4, int8, pack

SOURCE = Path(__file__).parents[1] / "peers" / "ggml_products.cpp"
SHAPES = {
    "28M gate_up": (2176, 512),
    "28M down": (512, 1088),
    "494M gate_up": (9728, 896),
    "494M down": (896, 4864),
}
ROTATION_BYTES = 128 << 20
"""Of copies of a weight: more than one core's share of the last cache."""
SWEEPS = 5
"""Of a round; the least counts."""
PRECISIONS = {"bf16": "f16", "int8": "q8_0", "int4": "q4_0"}


def build() -> Path:
    """Compile ggml's side against the libraries that the installation keeps."""
    home = LLAMA_CPP["avx2"].parent
    program = OUT / "ggml_products"
    libraries = [str(home / "lib" / f"lib{name}.a") for name in ("ggml", "ggml-cpu", "ggml-base")]
    flags = ("-O2", "-std=c++17", f"-I{home / 'include'}", str(SOURCE), "-o", str(program))
    command = ["g++", *flags, *libraries, "-lgomp", "-lpthread", "-lm", "-ldl"]
    subprocess.run(command, check=True)
    return program


def theirs(program: Path, kind: str, shape: tuple[int, int], rows: int, copies: int) -> float:
    sizes = (*shape, rows, copies, SWEEPS)
    done = subprocess.run([str(program), kind, *map(str, sizes)], check=True, capture_output=True, text=True)
    return float(done.stdout)


class Ours:
    """Copies of one weight, as our kernels read them."""

    def __init__(self, kernels: NativeLibrary, precision: str, shape: tuple[int, int], copies: int) -> None:
        self._kernels = kernels
        weight = torch.randn(shape).bfloat16()
        matrix = self._matrix(precision, weight)
        self._weights = [pack(kernels, matrix) for _ in range(copies)]

    def _matrix(self, precision: str, weight: torch.Tensor) -> Matrix:
        if precision == "bf16":
            return exact(weight)
        return (int8 if precision == "int8" else int4)(self._kernels, weight)

    def microseconds(self, x: torch.Tensor) -> float:
        """Of one product, whose call is made ready before: a model's step is one call for all of them."""
        m, out, least = len(x), torch.empty(len(x), self._weights[0].n, dtype=x.dtype), float("inf")
        jobs = [
            PsLinear(
                weight=pointer(weight.struct), x=x.data_ptr(), y=out.data_ptr(), residual=None, m=m,
                ldx=x.stride(0), ldy=out.stride(0), ldr=0, x_type=int(Type.BF16), y_type=int(Type.BF16),
            )
            for weight in self._weights
        ]  # fmt: skip
        for _ in range(SWEEPS + 1):
            begun = time.process_time()
            for job in jobs:
                self._kernels.linear(job)
            least = min(least, time.process_time() - begun)
        return least / len(self._weights) * 1e6


def main() -> int:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of those (default: all)")
    args = parser.parse_args()
    shapes = {name: SHAPES[name] for name in args.shapes.split(",")}
    program = build()
    torch.set_num_threads(1)
    kernels = NativeLibrary(isa="avx2")
    kernels.set_threads(1)
    rows_of: list[list[object]] = []
    figures: list[dict[str, object]] = []
    for name, (n, k) in shapes.items():
        copies = max(2, ROTATION_BYTES // (n * k * 2))
        for precision, kind in PRECISIONS.items():
            ours = Ours(kernels, precision, (n, k), copies)
            for rows in (1, 8, 32):
                x = torch.randn(rows, k).bfloat16()
                times: tuple[list[float], list[float]] = [], []
                for _ in range(args.rounds):
                    times[0].append(ours.microseconds(x))
                    times[1].append(theirs(program, kind, (n, k), rows, copies))
                won = ratio(times[1], times[0])
                medians = [round(statistics.median(each), 1) for each in times]
                rows_of.append([name, f"{precision} / {kind}", rows, *medians, str(won)])
                figures.append(
                    {
                        "shape": name, "precision": precision, "ggml": kind, "rows": rows,
                        "ours_us": medians[0], "ggml_us": medians[1], "ratio": won.rounded(3),
                    }
                )  # fmt: skip
                print(table(["", "", "rows", "ours us", "ggml us", "ratio"], rows_of[-1:]), flush=True)
    print(table(["shape", "weights", "rows", "ours us", "ggml us", "ggml / ours"], rows_of))
    write_result(args.json, {"isa": kernels.isa, "figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
