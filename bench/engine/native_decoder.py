"""A decoder step, native against torch:
`python -m bench.engine.native_decoder [--model demo|28M|0.5B|gemma3|moe] [--json FILE]`.

Random weights; every row has `--context` tokens behind it. torch computes in the type that
`engine.dtype: auto` takes on this machine. The sides take turns in every round, which gives one ratio; told
are the median and the deciles of the rounds. On a busy machine: `--threads 1 --cpu-time`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from bench.harness import command_line
from penstock.config.engine_settings import EngineSettings
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import Decoder, DecoderLimits
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import random_weights
from penstock.engine.native import NativeLibrary
from penstock.engine.native.decoder import NativeAttention, NativeDecoder
from penstock.engine.step_model import choose_computing
from penstock.models.spec import AttentionSpec, DecoderSpec, MoeSpec, RopeSpec
from penstock.types import BLOCK_TOKENS


def spec(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: object
) -> DecoderSpec:
    return DecoderSpec(
        architecture="bench", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], max_position=4096,
        norm_eps=1e-6, rope=RopeSpec(), **more,
    )  # fmt: skip


MODELS = {
    "demo": spec(4096, 384, 1024, 6, (6, 2, 64), qk_norm=True, tied_head=True),
    "28M": spec(16384, 512, 1408, 6, (8, 4, 64)),
    "0.5B": spec(151936, 896, 4864, 24, (14, 2, 64), qkv_bias=True, tied_head=True),
    # Gemma 3 270M, and Qwen3-MoE made small: 226M weights in experts, an eighth of which computes each token.
    "gemma3": spec(
        262144, 640, 2048, 18, (4, 1, 256), qk_norm=True, tied_head=True, activation="gelu_tanh",
        norm_offset=1.0, sublayer_norms=True, embedding_scale=640**0.5, local_rope=RopeSpec(),
        attention=AttentionSpec(windows=tuple(0 if i % 6 == 5 else 512 for i in range(18))),
    ),
    "moe": spec(
        32768, 768, 384, 8, (12, 2, 64), qk_norm=True, moe=MoeSpec(num_experts=32, top_k=4, normalise=True)
    ),
}  # fmt: skip


class Side:
    """One decoder with its own cache and attention."""

    def __init__(
        self, model: DecoderSpec, rows: int, context: int, kernels: NativeLibrary | None, precision: str,
        *, torch_dtype: str = "auto",
    ) -> None:  # fmt: skip
        tokens = context + 64
        limits = DecoderLimits(step_tokens=max(512, rows), max_samples=rows, max_model_len=tokens)
        cpu = torch.device("cpu")
        per_row = -(-tokens // BLOCK_TOKENS)
        dtype = products = torch.bfloat16
        if kernels is None:
            computing = choose_computing(EngineSettings(kernels="torch", dtype=torch_dtype), model)
            dtype, products = computing.dtype, computing.products
        cache = KVCache(model, per_row * rows, dtype, cpu, products=products)
        cache.tensor.normal_()
        weights = random_weights(model, dtype, 0, lambda done, total: None)
        if kernels is None:
            made = TorchKernels(model, max_tokens=limits.step_tokens, device=cpu, products=products)
            self.decoder = Decoder(model, weights, made, limits)
            self.attention = made.attention(cache, self.decoder.rotary)
        else:
            self.decoder = NativeDecoder(model, weights, kernels, limits, cache, precision)
            self.attention = NativeAttention()
        self.tables = np.arange(per_row * rows, dtype=np.int32).reshape(rows, -1)

    @torch.inference_mode()
    def step(self, computed: int, count: int, rows: int | None = None) -> None:
        """`count` tokens of each of the first `rows` rows (all of them, if not said), behind `computed`
        others.
        """
        rows = rows or len(self.tables)
        self.attention.begin(
            AttentionBatch(
                num_computed=np.full(rows, computed, np.int32),
                num_tokens=np.full(rows, count, np.int32),
                positions=torch.arange(computed, computed + count).repeat(rows),
                block_tables=self.tables[:rows],
            )
        )
        samples = torch.arange(1, rows + 1) * count - 1
        self.decoder.forward(torch.arange(rows * count) % 1000, samples, self.attention)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The time of one kind of step on one side; ratios are torch's time over its own (above 1: it is
    faster).
    """

    model: str
    step: str
    rows: int
    tokens: int
    side: str
    milliseconds: float
    ratio: float
    ratio_p10: float
    ratio_p90: float


def measure(
    sides: dict[str, Side], step: tuple[int, int, int], args: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of a step on every side, one per round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            # In bursts: torch's idle threads spin for a while after a call and would slow the next side down.
            time.sleep(0.02)
            side.step(*step)
            burst: list[float] = []
            for _ in range(args.burst):
                start = clock()
                side.step(*step)
                burst.append(clock() - start)
            times[name].append(statistics.median(burst))
    return times


def figures(model: str, step: tuple[str, int, int], times: dict[str, list[float]]) -> list[Figure]:
    found: list[Figure] = []
    for side, taken in times.items():
        ratios = [base / own for base, own in zip(times["torch"], taken, strict=True)]
        deciles = statistics.quantiles(ratios, n=10, method="inclusive")
        found.append(
            Figure(
                model=model, step=step[0], rows=step[1], tokens=step[2], side=side,
                milliseconds=round(statistics.median(taken) * 1e3, 3),
                ratio=round(statistics.median(ratios), 2), ratio_p10=round(deciles[0], 2),
                ratio_p90=round(deciles[-1], 2),
            )
        )  # fmt: skip
    return found


def main() -> None:
    parser = command_line(__doc__, rounds=20)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["28M"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--cpu-time", action="store_true", help="processor time of the calling thread")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = NativeLibrary()
    kernels.set_threads(args.threads)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    steps = [("decode", rows, args.context, 1) for rows in args.rows] + [("prefill", 1, 0, 110)]
    found: list[Figure] = []
    for model in args.model:
        made = MODELS[model], max((1, *args.rows)), args.context + steps[-1][-1]
        sides = {
            "torch": Side(*made, None, "native"),
            "bf16": Side(*made, kernels, "native"),
            "int8": Side(*made, kernels, "int8"),
            "int4": Side(*made, kernels, "int4"),
        }
        for name, rows, computed, count in steps:
            found += figures(model, (name, rows, count), measure(sides, (computed, count, rows), args, clock))
            for each in found[-len(sides) :]:
                spread = f"{each.ratio:6.2f}x ({each.ratio_p10:.2f} to {each.ratio_p90:.2f})"
                print(
                    f"{model} {name} rows={rows:<3} {each.side:6} {each.milliseconds:9.3f} ms {spread}",
                    flush=True,
                )
            if args.json:
                args.json.write_text(json.dumps(document(args, kernels, found), indent=1) + "\n")


def document(args: argparse.Namespace, kernels: NativeLibrary, found: list[Figure]) -> dict[str, object]:
    setting = {name: value for name, value in vars(args).items() if name != "json"}
    torch_dtype = choose_computing(EngineSettings(kernels="torch"), MODELS["28M"]).dtype
    return {
        "bench": "native_decoder", "isa": kernels.isa, "torch_dtype": str(torch_dtype),
        "cores": os.cpu_count(), "load_average": os.getloadavg()[0], **setting,
        "figures": [asdict(each) for each in found],
    }  # fmt: skip


if __name__ == "__main__":
    main()
