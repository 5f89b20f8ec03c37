"""A long prompt arrives among streams: processor time of the steps before and meanwhile, in one process, with
and without memory of the KV cache that is committed ahead of use; or in chunks of given sizes.

    python -m bench.engine.arrival [--model DIRECTORY] [--quantization int8] [--chunks 4,8] [--rounds 3]
        [--json FILE]

The engine itself, on one thread, and its clock counts that thread's processor time: other work on the machine
disturbs little, and there is no socket. Eight streams run for 24 tokens; then a prompt of 1,000 comes. Told
are the usual step (p50 of those before) and, over it, p99 of the steps before and of those until it answers;
and, from the prompt to its answer, the processor time of that thread (`ttft_ms`) and of all the process's
(`process_ms`), for memory is committed by a thread of its own, which is not on the engine's clock. Every
round begins with a cache that nothing has touched. `after` is the step of the streams alone behind it, over
the usual one: their contexts have grown. `--chunks` has the prompt come in chunks of so many tokens, in turns
with those that the law of step times grants, and leaves out the comparison of memories.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from bench.harness import command_line, table, write_result
from penstock.config.engine_settings import EngineSettings
from penstock.config.tree import EngineConfig
from penstock.engine.core import EngineCore, build_core
from penstock.engine.kv_cache import KVCache
from penstock.engine.runner import load_runner
from penstock.protocol.worker import Submit
from penstock.schedule import prefill_budget
from penstock.types import RequestId, SamplingParams

STREAMS, QUIET_TOKENS, PROMPT, LONG = 8, 24, 110, 1000
WARM = (1, 1, 8, 8, 32)
"""Callers at once, before: the step law is known then, as it is on a server that has served."""
STRETCHES = prefill_budget.STRETCH_MIN, prefill_budget.STRETCH_MAX


class ThreadClock:
    """Time that passes while this thread computes."""

    now_ns = staticmethod(time.thread_time_ns)
    wall_ns = staticmethod(time.time_ns)


class Arrival:
    """One engine whose cache is new."""

    def __init__(self, model: Path, quantization: str, *, ahead: bool, chunk: int = 0) -> None:
        config = EngineConfig(
            dtype="bfloat16", max_model_len=2048, max_running=32, kv_memory_bytes=1 << 30, threads=1,
            quantization=quantization, tpot_target_ms=0,
        )  # fmt: skip
        kept = KVCache.commit_ahead
        try:
            if not ahead:
                KVCache.commit_ahead = lambda self: None
            runner = load_runner(model, config, lambda *progress: None)
            runner.warm_up()
        finally:
            KVCache.commit_ahead = kept
        settings = EngineSettings.of(config)
        if chunk:  # Nothing fits a limit of no time, and then the least is granted.
            settings = replace(settings, prefill_tokens_min=chunk)
        prefill_budget.STRETCH_MIN, prefill_budget.STRETCH_MAX = (-1.0, -1.0) if chunk else STRETCHES
        self._core: EngineCore = build_core(runner, settings, b"k" * 32, ThreadClock())
        self._rng, self._num = np.random.default_rng(1), 0

    def submit(self, prompt: int, output: int) -> RequestId:
        self._num += 1
        name, tokens = RequestId(f"r{self._num}"), self._rng.integers(5, 16_000, prompt).astype(np.int32)
        drawn = SamplingParams(temperature=0.0, max_tokens=output)
        message = Submit(request_id=name, prompt=tokens.tobytes(), sampling=drawn)
        self._core.submit(1, message, ThreadClock.now_ns())
        return name

    def step(self) -> tuple[float, list[RequestId]]:
        """Its milliseconds, and whose tokens it brought."""
        began_ns = ThreadClock.now_ns()
        outputs = self._core.step()
        took_ms = (ThreadClock.now_ns() - began_ns) / 1e6
        return took_ms, [each.request_id for found in outputs.values() for each in found]

    def run(self) -> dict[str, float]:
        for callers in WARM:
            for _ in range(callers):
                self.submit(PROMPT, 64)
            while self._core.has_work:
                self.step()
        got = dict.fromkeys([self.submit(PROMPT, 1500) for _ in range(STREAMS)], 0)
        before: list[float] = []
        while min(got.values()) < QUIET_TOKENS:
            all_run = min(got.values()) > 0
            took, names = self.step()
            for name in names:
                got[name] += 1
            before += [took] if all_run else []
        began_s, during, long = time.process_time(), list[float](), self.submit(LONG, 1)
        while True:
            took, names = self.step()
            during.append(took)
            if long in names:
                break
        process_ms, usual = (time.process_time() - began_s) * 1e3, statistics.median(before)
        after = statistics.median(self.step()[0] for _ in range(12)) / usual
        tails = {"before": np.percentile(before, 99) / usual, "during": np.percentile(during, 99) / usual}
        return {
            "usual_ms": usual, "p99_before": float(tails["before"]), "p99_during": float(tails["during"]),
            "p50_during": statistics.median(during) / usual, "ttft_ms": sum(during), "steps": len(during),
            "process_ms": process_ms, "after": after,
        }  # fmt: skip


def main() -> int:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--model", type=Path, default=Path("bench/out/models/28m"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument(
        "--chunks", default="", metavar="N,N", help="chunks of so many tokens, beside the law's"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways = {"ahead": (True, 0), "touched by steps": (False, 0)}
    if args.chunks:
        ways = {"law": (True, 0)} | {
            f"chunks of {size}": (True, int(size)) for size in args.chunks.split(",")
        }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name in found if number % 2 else reversed(found):
            ahead, chunk = ways[name]
            found[name].append(Arrival(args.model, args.quantization, ahead=ahead, chunk=chunk).run())
    names = list(next(iter(found.values()))[0])
    rows = [
        [name, *(" ".join(f"{one[key]:.2f}" for one in runs) for key in names)]
        for name, runs in found.items()
    ]
    print(table(["", *names], rows))
    write_result(args.json, {"quantization": args.quantization, "rounds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
