"""A decoder step, native against torch: `python bench/native_decoder.py [--model demo|28M|0.5B] [--threads N] [--best]`.

Random weights; every row has `--context` tokens behind it. Both decoders take turns; times are medians, or
with `--best` (for a busy machine, one thread) the least CPU time.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import random_weights
from penstock.engine.models.decoder import Decoder, DecoderLimits
from penstock.engine.models.spec import DecoderSpec, RopeSpec
from penstock.engine.native import Kernels
from penstock.engine.native.decoder import NativeAttention, NativeDecoder
from penstock.types import BLOCK_TOKENS


def spec(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: bool
) -> DecoderSpec:
    return DecoderSpec(
        architecture="bench", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], max_position=4096, norm_eps=1e-6,
        rope=RopeSpec(), **more,
    )  # fmt: skip


MODELS = {
    "demo": spec(4096, 384, 1024, 6, (6, 2, 64), qk_norm=True, tied_head=True),
    "28M": spec(16384, 512, 1408, 6, (8, 4, 64)),
    "0.5B": spec(151936, 896, 4864, 24, (14, 2, 64), qkv_bias=True, tied_head=True),
}


class Side:
    """One decoder with its own cache and attention."""

    def __init__(
        self, model: DecoderSpec, rows: int, context: int, kernels: Kernels | None, precision: str
    ) -> None:
        tokens = context + 64
        limits = DecoderLimits(step_tokens=max(512, rows), max_samples=rows, max_model_len=tokens)
        cpu = torch.device("cpu")
        per_row = -(-tokens // BLOCK_TOKENS)
        cache = KVCache(model, per_row * rows, torch.bfloat16, cpu)
        cache.tensor.normal_()
        weights = random_weights(model, torch.bfloat16, 0, lambda done, total: None)
        if kernels is None:
            made = TorchKernels(model, max_tokens=limits.step_tokens, device=cpu)
            self.decoder = Decoder(model, weights, made, limits)
            self.attention = made.attention(cache, self.decoder.rotary)
        else:
            self.decoder = NativeDecoder(model, weights, kernels, limits, cache, precision)
            self.attention = NativeAttention()
        self.tables = np.arange(per_row * rows, dtype=np.int32).reshape(rows, -1)

    @torch.inference_mode()
    def step(self, computed: int, count: int) -> None:
        rows = len(self.tables)
        self.attention.begin(
            AttentionBatch(
                num_computed=np.full(rows, computed, np.int32),
                num_tokens=np.full(rows, count, np.int32),
                positions=torch.arange(computed, computed + count).repeat(rows),
                block_tables=self.tables,
            )
        )
        samples = torch.arange(1, rows + 1) * count - 1
        self.decoder.forward(torch.arange(rows * count) % 1000, samples, self.attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="28M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--best", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = Kernels()
    kernels.set_threads(args.threads)
    model = MODELS[args.model]
    clock, typical = (time.thread_time, min) if args.best else (time.perf_counter, statistics.median)
    cases = [("decode", rows, args.context, 1) for rows in args.rows] + [
        ("prefill", 1, 0, 110),
        ("prefill", 4, 0, 128),
    ]
    for name, rows, computed, count in cases:
        sides = {
            "torch": Side(model, rows, args.context + count, None, "native"),
            "bf16": Side(model, rows, args.context + count, kernels, "native"),
            "int8": Side(model, rows, args.context + count, kernels, "int8"),
            "int4": Side(model, rows, args.context + count, kernels, "int4"),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.rounds):
            for side, each in sides.items():
                # In bursts: torch's idle threads spin for a while after a call and would slow the next side down.
                time.sleep(0.02)
                each.step(computed, count)
                for _ in range(5):
                    start = clock()
                    each.step(computed, count)
                    times[side].append(clock() - start)
        ms = {side: typical(taken) * 1e3 for side, taken in times.items()}
        ratios = "  ".join(f"{side} {t:8.3f} ms {ms['torch'] / t:5.2f}x" for side, t in ms.items())
        print(f"{args.model} {name} rows={rows:<3} tokens={count:<4} {ratios}", flush=True)


if __name__ == "__main__":
    main()
