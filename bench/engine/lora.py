"""The cost of adapters (LoRA) in a decode step of the native kernels.

    python -m bench.engine.lora [--model 0.5B] [--against OLD.so] [--json FILE]

Random weights, and random adapters of all linears. In every round a step without adapters and one with them
take turns, so a round gives one ratio; told are the median and the deciles of the rounds. The last figure is
what the adapters' bytes alone would cost at the speed at which the step of one row reads its weights: the
least that is possible where memory is what limits. On a busy machine: `--threads 1 --cpu-time`, and the least
times (`cost_of_best`).
With `--against`, another build of the library takes its turns in the same rounds.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.engine.native_decoder import MODELS, Side
from bench.harness import command_line, write_result
from penstock.engine.adapters.files import AdapterWeights, LoraPart, never
from penstock.engine.adapters.native_layout import NativePacked, NativePacker
from penstock.engine.native import NativeLibrary
from penstock.engine.native.decoder import NativeAttention
from penstock.models.adapters import AdapterConfig
from penstock.models.spec import DecoderSpec
from penstock.rng import stream

CASES = ((1, 1), (32, 1), (32, 8), (32, 20))
"""Rows of the batch, and how many adapters they have between them."""


def made_adapter(spec: DecoderSpec, rank: int, seed: int, kernels: NativeLibrary) -> NativePacked:
    """Of all linears, as the engine lays one out."""
    generator = torch.Generator().manual_seed(stream(seed, "lora bench").getrandbits(32))

    def part(inputs: int, outputs: int, first: int) -> LoraPart:
        a, b = (torch.randn(shape, generator=generator) * 0.02 for shape in ((rank, inputs), (outputs, rank)))
        return LoraPart(a.bfloat16(), b.bfloat16(), 1.0, first)

    hidden, inner, q_size, kv_size = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    keys = (q_size, q_size + kv_size)
    layers = tuple(
        {
            "qkv": (part(hidden, q_size, 0), *(part(hidden, kv_size, first) for first in keys)),
            "o": (part(q_size, hidden, 0),),
            "gate_up": (part(hidden, inner, 0), part(hidden, inner, inner)),
            "down": (part(inner, hidden, 0),),
        }
        for _ in range(spec.num_layers)
    )
    config = AdapterConfig(rank=rank, alpha=rank, is_stabilised=False, has_ranks=False, alphas=(), base="")
    return NativePacker(spec, kernels).pack(AdapterWeights(f"{seed}", layers, config), never)


class Build:
    """One build of the library with a decoder of its own, and what its steps took."""

    def __init__(self, name: str, kernels: NativeLibrary, args: argparse.Namespace, rows: int) -> None:
        self.name, self._rows, self._context = name, rows, args.context
        self._clock = time.thread_time if args.cpu_time else time.perf_counter
        self.side = Side(MODELS[args.model], rows, args.context, kernels, args.precision)
        self.plain: list[float] = []
        self.adapted: list[float] = []

    def step(self, adapters: list[NativePacked] | None) -> float:
        """Seconds."""
        attention = self.side.attention
        assert isinstance(attention, NativeAttention)
        rows = None if adapters is None else [adapters[i % len(adapters)] for i in range(self._rows)]
        attention.adapt(rows, np.ones(self._rows, np.int32))
        start = self._clock()
        self.side.step(self._context, 1)
        return self._clock() - start

    def round(self, adapters: list[NativePacked], burst: int) -> None:
        """Both kinds of steps take turns."""
        took = [(self.step(None), self.step(adapters)) for _ in range(burst)]
        self.plain.append(statistics.median(plain for plain, _ in took))
        self.adapted.append(statistics.median(adapted for _, adapted in took))


@dataclass(frozen=True, kw_only=True)
class AdapterCost:
    """Ratios are the step with adapters over the one without, less 1."""

    build: str
    rows: int
    adapters: int
    plain_ms: float
    cost: float
    cost_p10: float
    cost_p90: float
    cost_of_best: float
    """Of the least times of both."""
    bytes_cost: float


def costs(build: Build, rows: int, count: int, byte_s: float, num_bytes: int) -> AdapterCost:
    pairs = zip(build.adapted, build.plain, strict=True)
    ratios = sorted(adapted / plain - 1 for adapted, plain in pairs)
    deciles = statistics.quantiles(ratios, n=10)
    plain_s = statistics.median(build.plain)
    return AdapterCost(
        build=build.name, rows=rows, adapters=count, plain_ms=round(plain_s * 1e3, 3),
        cost=round(statistics.median(ratios), 4), cost_p10=round(deciles[0], 4),
        cost_p90=round(deciles[-1], 4), cost_of_best=round(min(build.adapted) / min(build.plain) - 1, 4),
        bytes_cost=round(num_bytes * byte_s / plain_s, 4),
    )  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, rounds=30)
    parser.add_argument("--model", choices=MODELS, default="0.5B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--precision", default="native")
    parser.add_argument("--against", type=Path, help="another build of the library, of the same ABI")
    parser.add_argument("--cpu-time", action="store_true", help="of the calling thread: with --threads 1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = MODELS[args.model]
    libraries = {"this": NativeLibrary()}
    if args.against:
        libraries["other"] = NativeLibrary(args.against)
    for each in libraries.values():
        each.set_threads(args.threads)
    adapters = [
        made_adapter(spec, args.rank, seed, libraries["this"])
        for seed in range(max(count for _, count in CASES))
    ]
    found: list[AdapterCost] = []
    byte_s = 0.0
    for rows, count in CASES:
        builds = [Build(name, each, args, rows) for name, each in libraries.items()]
        for _ in range(args.rounds + 1):
            for build in builds:
                build.round(adapters[:count], args.burst)
        for build in builds:
            del build.plain[0], build.adapted[0]  # The first round reads memory for the first time.
            if not byte_s:
                byte_s = statistics.median(build.plain) / (spec.num_parameters * 2)
            num_bytes = sum(each.num_bytes for each in adapters[:count])
            found.append(costs(build, rows, count, byte_s, num_bytes))
            print(found[-1])
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "against")}
    write_result(args.json, {"settings": settings, "costs": [asdict(each) for each in found]})


if __name__ == "__main__":
    main()
