"""What overlap is worth: tokens per second of the engine core with `EngineSettings.overlap` on and off,
beside each other.

    python bench/overlap.py MODEL_DIR [--batch 1 8 32] [--tokens 96] [--rounds 5] [--kernels auto] [--json
    FILE]

Both engines hold the same model and answer the same prompts in turns, on and off, so that what else the
machine does hits both. After each step its outputs are encoded as a worker would. The figure is the ratio on
/ off of each round: its median and its spread.
"""

import argparse
import statistics
from pathlib import Path

from provenance import add_json_option, write_result

from penstock import rng
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import StepOutput, Submit, encode
from penstock.types import RequestId, SamplingParams

CLOCK = SystemClock()
PROMPT_TOKENS = 110


def build(path: Path, overlap: str, kernels: str) -> EngineCore:
    """An engine with a runner of its own."""
    config = EngineSettings(overlap=overlap, kernels=kernels, prefix_cache=False, kv_memory_bytes=256 << 20)
    runner = build_runner(path, config, CLOCK, lambda _stage, _done, _total: None)
    runner.warm_up()
    return build_core(runner, config, b"bench" * 8, CLOCK)


def tokens_per_s(core: EngineCore, batch: int, tokens: int, round_: int) -> float:
    """One closed batch: every prompt to its last token."""
    random = rng.stream(round_, "overlap bench")
    for index in range(batch):
        prompt = token_array(random.randrange(10, 1000) for _ in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=tokens)
        request_id = RequestId(f"{batch}/{round_}/{index}")
        message = Submit(request_id=request_id, prompt=prompt.tobytes(), sampling=sampling)
        core.submit(0, message, CLOCK.now_ns())
    start_ns, step = CLOCK.now_ns(), 0
    while core.has_work:
        for outputs in core.step().values():
            step += 1
            encode(StepOutput(step, tuple(outputs)))
    return batch * tokens * NS_PER_S / (CLOCK.now_ns() - start_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", default="auto")
    add_json_option(parser)
    args = parser.parse_args()
    engines = {overlap: build(args.model, overlap, args.kernels) for overlap in ("off", "on")}
    print(f"{'batch':>5} {'off tok/s':>10} {'on tok/s':>10} {'on / off':>9} {'min':>6} {'max':>6}")
    found: list[dict[str, object]] = []
    for batch in args.batch:
        rates: dict[str, list[float]] = {overlap: [] for overlap in engines}
        for round_ in range(args.rounds + 1):  # The first one warms up.
            order = list(engines) if round_ % 2 else list(reversed(engines))
            for overlap in order:
                rates[overlap].append(tokens_per_s(engines[overlap], batch, args.tokens, round_))
        ratios = [on / off for on, off in zip(rates["on"][1:], rates["off"][1:], strict=True)]
        print(
            f"{batch:>5} {statistics.median(rates['off'][1:]):>10.1f} "
            f"{statistics.median(rates['on'][1:]):>10.1f} {statistics.median(ratios):>9.3f} "
            f"{min(ratios):>6.3f} {max(ratios):>6.3f}",
            flush=True,
        )
        medians = {f"{name}_tok_s": statistics.median(rates[name][1:]) for name in rates}
        found.append({"batch": batch, **medians, "on_over_off": ratios, "median": statistics.median(ratios)})
    write_result(args.json, {"model": args.model.name, "tokens": args.tokens, "by_batch": found})


if __name__ == "__main__":
    main()
