"""Bringing a prompt's KV back from host memory against computing it again: time to the first token, and the
ratio.

    python bench/host_tier.py [--model 28M|0.5B] [--lengths 16 32 64 ... 16384] [--rounds 5] [--json FILE]

Random weights. Each round asks for a prompt that nobody knows (computed), asks for it again (a hit on the
device), lets all its blocks move to host memory, takes them from the device, and asks for it a third time
(reloaded). All go through the real scheduler and runner. The last block of a prompt is computed each time,
since its last token's logits are wanted and only full blocks are cached: so computed / hit is what the best
of host tiers could reach, and reloaded / hit is what ours costs on top. The goal is 5x at every length.
"""

import json
import statistics
import tempfile
from pathlib import Path

from harness import command_line, write_result

from penstock import rng
from penstock.clock import NS_PER_MS, SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array, token_bytes
from penstock.protocol.worker import Submit
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

CLOCK = SystemClock()
MODELS = {
    "28M": {
        "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    },
    "0.5B": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip


LENGTHS = [16, 32, 64, 128, 256, 1024, 4096, 16384]


def make_core(model: str, tokens_max: int, threads: int) -> EngineCore:
    """An engine whose device and host memory each hold the longest prompt, and that stores what is idle at
    once.
    """
    shape = MODELS[model]
    block_bytes = BLOCK_TOKENS * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 64
    memory = (tokens_max // BLOCK_TOKENS + 4) * block_bytes
    fixed = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "max_position_embeddings": tokens_max + 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    config = EngineSettings(
        device="cpu", dtype="bfloat16", load_format="random", kv_memory_bytes=memory,
        host_kv_memory_bytes=memory, host_kv_idle_s=0.0, threads=threads,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(fixed | shape))
        runner = build_runner(directory, config, CLOCK, lambda _stage, _done, _total: None)
    runner.warm_up()
    return build_core(runner, config, b"bench" * 8, CLOCK)


def ask(core: EngineCore, name: str, prompt: bytes) -> tuple[float, int]:
    """Milliseconds to the first (and only) token, and how many of the prompt's tokens came from host
    memory.
    """
    start = CLOCK.now_ns()
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    core.submit(0, Submit(request_id=RequestId(name), prompt=prompt, sampling=sampling), start)
    while True:
        for output in core.step().get(0, []):
            if output.finish is not None:
                assert output.finish.error is None, output.finish.error
                elapsed = (CLOCK.now_ns() - start) / NS_PER_MS
                return elapsed, output.finish.usage.host_cached_tokens


def one_round(core: EngineCore, name: str, length: int) -> tuple[float, float, float]:
    """(computed, hit on the device, reloaded) in milliseconds for a new prompt."""
    tokens = rng.stream(0, name)
    prompt = token_bytes(token_array(tokens.randrange(16_000) for _ in range(length)))
    stored = core.stats().host_stores
    computed, cached = ask(core, f"{name} computed", prompt)
    assert not cached
    hit, cached = ask(core, f"{name} hit", prompt)
    assert not cached, "it was on the device"
    while core.stats().host_stores < stored + length // BLOCK_TOKENS:
        core.step()
    pool = core.kv.pool
    pool.free(pool.allocate(pool.num_available) or ())
    reloaded, cached = ask(core, f"{name} reloaded", prompt)
    assert cached == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS, "it was all in host memory"
    return computed, hit, reloaded


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--model", choices=MODELS, default="28M")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    args = parser.parse_args()
    core = make_core(args.model, max(args.lengths), args.threads)
    one_round(core, "warm-up", max(args.lengths))  # Touches all memory once.
    rows: list[dict[str, float]] = []
    print(
        f"{'tokens':>7} {'computed ms':>12} {'hit ms':>8} {'reloaded ms':>12} "
        f"{'ratio':>7} {'min':>7} {'max':>7} {'best':>6}"
    )
    for length in args.lengths:
        found = [one_round(core, f"{length}/{number}", length) for number in range(args.rounds)]
        ratios = [computed / reloaded for computed, _, reloaded in found]
        row = {
            "tokens": length,
            "computed_ms": statistics.median(each[0] for each in found),
            "hit_ms": statistics.median(each[1] for each in found),
            "reloaded_ms": statistics.median(each[2] for each in found),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "ratio_of_a_hit_on_the_device": statistics.median(each[0] / each[1] for each in found),
        }
        rows.append(row)
        print(
            f"{length:>7} {row['computed_ms']:>12.2f} {row['hit_ms']:>8.2f} {row['reloaded_ms']:>12.2f} "
            f"{row['ratio']:>7.1f} {row['ratio_min']:>7.1f} {row['ratio_max']:>7.1f} "
            f"{row['ratio_of_a_hit_on_the_device']:>6.1f}",
            flush=True,
        )
    figures = {"model": args.model, "rounds": args.rounds, "threads": args.threads, "rows": rows}
    write_result(args.json, figures)


if __name__ == "__main__":
    main()
