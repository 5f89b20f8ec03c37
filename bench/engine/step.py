"""How long does a decoder's step take, ours beside torch? Milliseconds by rows, and ratios.

    python -m bench.engine.step [--model 28m|0.5B|demo|gemma3|moe] [--rows 1 8 32] [--threads 2] [--parts]
        [--context 128] [--sides torch bf16 int8 int4] [--cpu-time] [--rounds 20] [--json FILE]

With `--parts` also where ours goes. Random weights; every row has `--context` tokens behind it. torch
computes in the type that `engine.dtype: auto` takes here, `torch-bf16` as with `engine.dtype: bfloat16`,
`torch-narrow` so too, but multiplies in bfloat16 even where the processor has no instruction for it; ratios
are torch's time over a side's (above 1: it is faster). `PENSTOCK_NATIVE_ISA=avx2` holds ours to less,
`--cpu-time` counts the calling thread's processor time (with `--threads 1`, on a busy machine).
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.harness import command_line, in_turns, ratio, spread, table, write_result
from penstock.config.engine_settings import EngineSettings
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.decoder import Decoder, DecoderLimits
from penstock.engine.kernels import TorchKernels
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import random_weights
from penstock.engine.native import NativeLibrary
from penstock.engine.native.decoder import NativeAttention, NativeDecoder
from penstock.engine.native.library import STEP_PARTS
from penstock.engine.step_model import choose_computing
from penstock.models.spec import AttentionSpec, DecoderSpec, MoeSpec, RopeSpec
from penstock.types import BLOCK_TOKENS

PROMPT = 110
PRECISIONS = {"bf16": "native", "int8": "int8", "int4": "int4"}
TORCH = {"torch": "auto", "torch-bf16": "bfloat16", "torch-narrow": "bfloat16"}
"""`engine.dtype` of the sides that torch computes."""


def spec(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: object
) -> DecoderSpec:
    return DecoderSpec(
        architecture="bench", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], max_position=4096,
        norm_eps=1e-6, rope=RopeSpec(), **more,
    )  # fmt: skip


MODELS = {
    "28m": spec(16384, 512, 1088, 8, (8, 4, 64), tied_head=True),
    "demo": spec(4096, 384, 1024, 6, (6, 2, 64), qk_norm=True, tied_head=True),
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
        self, model: DecoderSpec, rows: int, context: int, side: str, kernels: NativeLibrary
    ) -> None:
        tokens, cpu = context + PROMPT, torch.device("cpu")
        limits = DecoderLimits(step_tokens=max(512, rows), max_samples=rows, max_model_len=tokens)
        per_row = -(-tokens // BLOCK_TOKENS)
        dtype = products = torch.bfloat16
        if side in TORCH:
            computing = choose_computing(EngineSettings(kernels="torch", dtype=TORCH[side]), model)
            dtype, products = computing.dtype, computing.products
            if side == "torch-narrow":
                products = dtype
        cache = KVCache(model, per_row * rows, dtype, cpu, products=products)
        cache.tensor.normal_()
        weights = random_weights(model, dtype, 0, lambda done, total: None)
        if side in TORCH:
            made = TorchKernels(model, max_tokens=limits.step_tokens, device=cpu, products=products)
            self.decoder = Decoder(model, weights, made, limits)
            self.attention = made.attention(cache, self.decoder.rotary)
        else:
            self.decoder = NativeDecoder(model, weights, kernels, limits, cache, PRECISIONS[side])
            self.attention = NativeAttention()
        self.tables = np.arange(per_row * rows, dtype=np.int32).reshape(rows, -1)

    @torch.inference_mode()
    def step(self, computed: int, count: int, rows: int) -> None:
        """`count` tokens of each of the first `rows` rows, behind `computed` others."""
        self.attention.begin(
            AttentionBatch(
                num_computed=np.full(rows, computed, np.int32), num_tokens=np.full(rows, count, np.int32),
                positions=torch.arange(computed, computed + count).repeat(rows),
                block_tables=self.tables[:rows],
            )
        )  # fmt: skip
        samples = torch.arange(1, rows + 1) * count - 1
        self.decoder.forward(torch.arange(rows * count) % 1000, samples, self.attention)

    def timed(self, step: tuple[int, int, int], clock: Callable[[], float]) -> float:
        """Milliseconds: the least of three, behind one while torch's idle threads still spin."""
        least = float("inf")
        for number in range(4):
            start = clock()
            self.step(*step)
            least = min(least, clock() - start) if number else least
        return least * 1e3

    def parts_ms(self, step: tuple[int, int, int], rounds: int) -> dict[str, float]:
        """What the parts of a step take, by the kernels' own clock: the median of steps."""
        assert isinstance(self.decoder, NativeDecoder)
        counted: list[np.ndarray] = []
        for _ in range(rounds):
            self.decoder.part_ns = counts = np.zeros(len(STEP_PARTS), np.int64)
            self.step(*step)
            counted.append(counts)
        self.decoder.part_ns = None
        return dict(zip(STEP_PARTS, (np.median(counted, axis=0) / 1e6).round(4).tolist(), strict=True))


def measure(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """By kind of step: milliseconds by side and round, and parts."""
    kernels = NativeLibrary()
    kernels.set_threads(args.threads)
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    made = MODELS[args.model], max(args.rows), args.context
    sides = {name: Side(*made, name, kernels) for name in args.sides}
    steps = {f"{rows} rows": (args.context, 1, rows) for rows in args.rows} | {"prompt": (0, PROMPT, 1)}
    found: dict[str, dict[str, object]] = {}
    for name, step in steps.items():
        timed = {side: lambda each=each, step=step: each.timed(step, clock) for side, each in sides.items()}
        ms = in_turns(args.rounds, timed)
        found[name] = {"ms": ms}
        rows = [
            (side, spread(each), ratio(ms["torch"], each) if "torch" in ms else "")
            for side, each in ms.items()
        ]
        print(table((f"{args.model}, {name}", "ms", "torch / it"), rows), flush=True)
        if args.parts:
            native = {side: each for side, each in sides.items() if side in PRECISIONS}
            parts = {side: each.parts_ms(step, args.rounds) for side, each in native.items()}
            found[name]["parts_ms"] = parts
            print(
                table(
                    ("part, ms", *parts), [(at, *(each[at] for each in parts.values())) for at in STEP_PARTS]
                )
            )
    return found


def main() -> None:
    parser = command_line(__doc__, rounds=20)
    parser.add_argument("--model", choices=MODELS, default="28m")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--sides", nargs="*", choices=[*TORCH, *PRECISIONS], default=["torch", *PRECISIONS])
    parser.add_argument("--parts", action="store_true", help="where a native step goes")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of the calling thread")
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    write_result(args.json, {**settings, "isa": NativeLibrary().isa, "steps": measure(args)})


if __name__ == "__main__":
    main()
