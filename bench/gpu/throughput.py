"""nano-vllm's benchmark shape: 256 requests of 100-1,024 tokens in and 100-1,024 out on Qwen3-0.6B, through
scheduler and runner.
"""

from queue import SimpleQueue

from engine_driver import Driver

from bench.gpu.common import CLOCK, Bench, Report, build, seconds_of, shape
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import StepRunner, build_core
from penstock.rng import stream
from penstock.types import SamplingParams


class Asked(Driver):
    """An engine around a runner that is there already."""

    def __init__(self, runner: StepRunner, **settings: object) -> None:
        settings = {"dtype": "float32", "prefix_cache": False, **settings}
        self.core = build_core(runner, EngineSettings(**settings), b"k" * 32, CLOCK)
        self._asked, self._mail = 0, SimpleQueue()


def run(bench: Bench, report: Report) -> None:
    count, shortest, longest, max_len = (6, 3, 12, 64) if bench.tiny else (256, 100, 1024, 4096)
    settings: dict[str, object] = {
        "dtype": "float32" if bench.cpu else "bfloat16", "max_running": count, "max_model_len": max_len,
        "step_tokens": 64 if bench.tiny else 8192, "prefix_cache": False,
        **({"kv_memory_bytes": 4 << 20} if bench.tiny else {}),
    }  # fmt: skip
    runner, start_up_s = build(bench, shape("qwen3-0.6b", tiny=bench.tiny), **settings)
    report.put("start_up_s", start_up_s)
    engine, random = Asked(runner, **settings), stream(0, "throughput")

    def serve(sizes: list[tuple[int, int]]) -> float:
        """Seconds from submitting all at once to the end of the last."""
        prompts = [[random.randrange(runner.info.vocab_size) for _ in range(length)] for length, _ in sizes]
        how = [SamplingParams(temperature=0.6, seed=i, max_tokens=out) for i, (_, out) in enumerate(sizes)]
        answers, took_s = seconds_of(lambda: engine.ask(prompts, how))
        assert [len(each.token_ids) for each in answers] == [out for _, out in sizes], answers
        return took_s

    serve([(8, 4)] * min(count, 8))  # Code that is compiled or captured at first use.
    asked = [(random.randint(shortest, longest), random.randint(shortest, longest)) for _ in range(count)]
    before, tokens = engine.core.stats(), sum(out for _, out in asked)
    took_s, stats = serve(asked), engine.core.stats()
    steps = stats.step - before.step
    figures = {
        "requests": count, "output_tokens": tokens, "wall_s": round(took_s, 3),
        "output_tokens_per_s": round(tokens / took_s, 1), "steps": steps,
        "host_ms_per_step": round((stats.host_ns - before.host_ns) / 1e6 / max(steps, 1), 4),
        "graph_replays": runner.graphs.replays, "preemptions": stats.preemptions,
    }  # fmt: skip
    for name, value in figures.items():
        report.put(name, value)
    report.put("summary", f"{tokens / took_s:.0f} tok/s")
