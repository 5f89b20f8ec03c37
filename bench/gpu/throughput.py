"""nano-vllm's benchmark shape: 256 requests of 100-1,024 tokens in and 100-1,024 out on Qwen3-0.6B, through
scheduler and runner.
"""

from array import array

from bench.gpu.common import CLOCK, Bench, Report, build, shape
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.protocol.worker import Submit
from penstock.rng import stream
from penstock.types import RequestId, SamplingParams


def run(bench: Bench, report: Report) -> None:
    count, shortest, longest, max_len = (6, 3, 12, 64) if bench.tiny else (256, 100, 1024, 4096)
    settings: dict[str, object] = {
        "dtype": "float32" if bench.cpu else "bfloat16", "max_running": count, "max_model_len": max_len,
        "step_tokens": 64 if bench.tiny else 8192, "prefix_cache": False,
        **({"kv_memory_bytes": 4 << 20} if bench.tiny else {}),
    }  # fmt: skip
    runner, start_up_s = build(bench, shape("qwen3-0.6b", tiny=bench.tiny), **settings)
    report.put("start_up_s", start_up_s)
    core = build_core(runner, EngineSettings(**settings), b"k" * 32, CLOCK)
    random = stream(0, "throughput")
    vocab_size = runner.info.vocab_size
    asked = [(random.randint(shortest, longest), random.randint(shortest, longest)) for _ in range(count)]
    serve(core, [(8, 4)] * min(count, 8), vocab_size)  # Code that is compiled or captured at first use.
    start_ns = CLOCK.now_ns()
    tokens, steps = serve(core, asked, vocab_size)
    seconds = (CLOCK.now_ns() - start_ns) / 1e9
    assert tokens == sum(out for _, out in asked), (tokens, asked)
    stats = core.stats()
    figures = {
        "requests": count, "output_tokens": tokens, "wall_s": round(seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1), "steps": steps,
        "host_ms_per_step": round(stats.host_ns / 1e6 / max(stats.step, 1), 4),
        "graph_replays": runner.graphs.replays, "preemptions": stats.preemptions,
    }  # fmt: skip
    for name, value in figures.items():
        report.put(name, value)
    report.put("summary", f"{tokens / seconds:.0f} tok/s")


def serve(core: EngineCore, asked: list[tuple[int, int]], vocab_size: int) -> tuple[int, int]:
    """Submit all at once and run to the end: (tokens that came out, calls of `step`)."""
    random = stream(1, "prompts")
    for index, (length, out) in enumerate(asked):
        prompt = array("i", [random.randrange(vocab_size) for _ in range(length)]).tobytes()
        how = SamplingParams(temperature=0.6, seed=index, max_tokens=out)
        core.submit(0, Submit(request_id=RequestId(f"{len(asked)}-{index}"), prompt=prompt, sampling=how), 0)
    tokens = steps = 0
    while core.has_work:
        steps += 1
        for output in core.step().get(0, []):
            tokens += len(output.token_ids)
            assert output.finish is None or output.finish.error is None, output.finish
    return tokens, steps
