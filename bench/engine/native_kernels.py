"""Native kernels against torch on this machine.

    python -m bench.engine.native_kernels [--quick] [--json FILE]

Weights rotate through more memory than the last-level cache gives one core, so that a product reads them from
where a model's weights would be. Both sides take turns inside one loop. Times are medians, or on a busy
machine with `--threads 1 --best` the least CPU time; with medians the ratio has its 10th and 90th percentile
beside it.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from native_ops import linear
from torch import Tensor

from bench.harness import Spread, command_line, spread, write_result
from penstock.engine.native import NativeLibrary
from penstock.engine.native.library import Type
from penstock.engine.native.weights import NativeWeight, exact, int4, int8, pack

SHAPES = {
    "demo qkv": (640, 384), "demo gate_up": (2048, 384), "demo down": (384, 1024), "demo head": (4096, 384),
    "28M qkv": (768, 512), "28M gate_up": (2816, 512), "28M down": (512, 1408),
    "0.5B qkv": (1152, 896), "0.5B gate_up": (9728, 896), "0.5B down": (896, 4864),
    "0.5B head": (151936, 896), "wide": (4096, 4096),
}  # fmt: skip
ROTATION_BYTES = 256 << 20
BURST = 8


def take_turns(
    calls: dict[str, Iterator[Callable[[], object]]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every call, `rounds` times, in turns so that a noisy neighbour hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, each in calls.items():
            # In bursts: torch's idle threads spin for a while after a call and would slow the next side down.
            time.sleep(0.005)
            next(each)()
            for _ in range(BURST):
                call = next(each)
                start = clock()
                call()
                times[name].append(clock() - start)
    return times


def cycle(items: list[Callable[[], object]]) -> Iterator[Callable[[], object]]:
    while True:
        yield from items


def compare(
    kernels: NativeLibrary, shape: tuple[int, int, int], rounds: int, best: bool
) -> dict[str, object]:
    m, n, k = shape
    copies = max(2, min(64, ROTATION_BYTES // (n * k * 2)))
    plain = [torch.randn(n, k).bfloat16() for _ in range(copies)]
    x = torch.randn(m, k).bfloat16()
    packed = [pack(kernels, exact(weight)) for weight in plain]
    out = torch.empty(m, n, dtype=torch.bfloat16)

    def native(weight: NativeWeight) -> Callable[[], object]:
        return lambda: linear(kernels, weight, x, out=out)

    def by_torch(weight: Tensor) -> Callable[[], object]:
        return lambda: F.linear(x, weight)

    calls = {"torch": cycle([by_torch(w) for w in plain]), "bf16": cycle([native(w) for w in packed])}
    if kernels.supports(Type.I8):
        calls["int8"] = cycle([native(pack(kernels, int8(kernels, w))) for w in plain])
    if m <= 32:
        calls["int4"] = cycle([native(pack(kernels, int4(kernels, w))) for w in plain])
    times = take_turns(calls, rounds, time.thread_time if best else time.perf_counter)
    typical = min if best else statistics.median
    row: dict[str, object] = {"n": n, "k": k, "m": m}
    for name, taken in times.items():
        seconds = typical(taken)
        row[name] = {"us": round(seconds * 1e6, 1), "tflops": round(2 * m * n * k / seconds / 1e12, 3)}
        if name == "bf16":
            row["weight_gb_s"] = round(n * k * 2 / seconds / 1e9, 1)
        row[f"{name}_best_ratio"] = round(min(times["torch"]) / min(taken), 2)
        ratios = sorted(a / b for a, b in zip(times["torch"], taken, strict=True))
        row[f"{name}_ratio"] = [round(ratios[int(len(ratios) * at)], 2) for at in (0.1, 0.5, 0.9)]
    return row


def measure(rounds: int) -> dict[str, Spread]:
    """For the ratchet: native over torch, of a layer's product at 1 and 32 rows; CPU of one thread."""
    torch.set_num_threads(1)
    kernels = NativeLibrary()
    kernels.set_threads(1)
    n, k = SHAPES["28M gate_up"]
    found: dict[str, Spread] = {}
    for m in (1, 32):
        row = compare(kernels, (m, n, k), rounds, best=True)
        for name in ("bf16", "int8", "int4"):
            if (tenths := row.get(f"{name}_ratio")) is not None:
                assert isinstance(tenths, list)
                found[f"{name}, {m} rows"] = spread(1 / each for each in tenths)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128, 512])
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--best", action="store_true", help="least CPU time instead of medians; one thread")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = NativeLibrary()
    kernels.set_threads(args.threads)
    print(f"isa {kernels.isa}, {args.threads} threads; times are medians, ratios are torch / native")
    rows = []
    shown = "%s_best_ratio" if args.best else "%s_ratio"
    for name, (n, k) in SHAPES.items():
        if args.only not in name:
            continue
        for m in args.rows:
            small = n * k * m < 1 << 28
            rounds = (5 if small else 2) if args.quick else (25 if small else 6)
            row = compare(kernels, (m, n, k), rounds, args.best) | {"shape": name}
            rows.append(row)
            int8 = f"  int8 {row['int8']['us']:9.1f} us {row[shown % 'int8']}x" if "int8" in row else ""
            int4s = f"  int4 {row['int4']['us']:9.1f} us {row[shown % 'int4']}x" if "int4" in row else ""
            print(
                f"{name:13} m={m:<4} torch {row['torch']['us']:9.1f} us  bf16 {row['bf16']['us']:9.1f} us "
                f"{row[shown % 'bf16']}x  "
                f"{row['weight_gb_s']:6.1f} GB/s {row['bf16']['tflops']:6.3f} TFLOP/s{int8}{int4s}",
                flush=True,
            )
    write_result(args.json, {"isa": kernels.isa, "threads": args.threads, "rows": rows})


if __name__ == "__main__":
    main()
