"""The client's view: `penstock serve` on the device and `penstock bench` over HTTP, as real processes.

Shapes with random weights give speed; the trained demo model gives answers, which are held against the CPU's.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from word_vocabulary import make_vocabulary, save_tokenizer

from bench.gpu.common import Bench, Report, config_of
from bench.harness import REPOSITORY
from bench.process import Served, ask, load_report

DEMO = REPOSITORY / "models" / "penstock-demo-mini"
KEY = "sk-of-the-gpu-bench-0123456789"
QUESTIONS = (
    "What is the capital of France?", "What is 12 + 30?", "Say hello in German.", "Count from 1 to 10.",
    "What colour is the sky?", "What is the weather in Paris?", "Who are you?", "Name three animals.",
)  # fmt: skip
LEVELS, PROMPT_TOKENS, OUTPUT_TOKENS, STEP_TOKENS = (1, 64, 256), 512, 128, 2048
REQUESTS_EACH = 3
"""Of every caller, and 8 at least."""


def run(bench: Bench, report: Report) -> None:
    report.put("answers", found := answers(bench))
    summary = f"{found['equal']} of {len(QUESTIONS)} answers as on the CPU"
    for name in ("qwen3-0.6b",) if bench.tiny else ("qwen3-0.6b", "llama-3-8b"):
        report.put(name, measured := load(bench, name))
        last = measured["levels"][-1]
        summary += f"; {name} c={last['concurrency']}: {last['output_tokens_per_s']:.0f} tok/s"
        report.put("summary", summary)


def answers(bench: Bench) -> dict[str, Any]:
    """Greedy answers of the trained demo model on this device and on the CPU. bf16 may differ where two
    tokens are nearly level.
    """
    devices = ("cpu", "cpu") if bench.cpu else ("cuda", "cpu")
    texts: list[list[str]] = []
    for device in devices:
        with served({"models": [{"path": str(DEMO), "engine": {"device": device}}]}) as server:
            texts.append([answer(server, question) for question in QUESTIONS])
    equal = sum(one == other for one, other in zip(*texts, strict=True))
    return {"equal": equal, "differ": [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]]}


@contextmanager
def served(settings: dict[str, Any]) -> Iterator[Served]:
    """A server, and a folder that is gone with it."""
    with (
        tempfile.TemporaryDirectory(prefix="gpu-serving-") as name,
        Served(Path(name), settings, PENSTOCK_API_KEY=KEY) as server,
    ):
        yield server


def answer(server: Served, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 48}
    body["model"] = DEMO.name
    _, text = ask(server.port, "/v1/chat/completions", body, KEY)
    return json.loads(text)["choices"][0]["message"]["content"]


def load(bench: Bench, name: str) -> dict[str, Any]:
    levels = (1, 2) if bench.tiny else LEVELS
    prompt, output = (16, 4) if bench.tiny else (PROMPT_TOKENS, OUTPUT_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / name
        model.mkdir()
        config, context = config_of(name, tiny=bench.tiny), 1024 if bench.tiny else 8192
        (model / "config.json").write_text(json.dumps(config))
        save_tokenizer(make_vocabulary(config["vocab_size"]), model, context=context)
        engine = {"device": "cpu"} if bench.cpu else {"device": "cuda", "dtype": "bfloat16"}
        engine |= {"load_format": "random", "max_running": max(levels), "max_model_len": context}
        engine["step_tokens"] = 64 if bench.tiny else STEP_TOKENS
        # Nothing is promised: callers in a closed loop ask for all that the server can do, however late.
        admission = {"ttft_target_ms": 0, "tpot_target_ms": 0, "targets": []}
        settings = {"models": [{"path": str(model), "engine": engine}], "admission": admission}
        with served(settings) as server:
            found: list[dict[str, Any]] = []
            for callers in levels:
                requests = str(max(REQUESTS_EACH * callers, 8))
                sizes = ("--prompt-tokens", str(prompt), "--output-tokens", str(output), "--seed", "1")
                loop = ("--concurrency", str(callers), "--requests", requests)
                found += load_report(server.url, KEY, *loop, *sizes)["levels"]
            return {
                "ready_s": server.ready_s, "prompt_tokens": prompt, "output_tokens": output,
                "levels": [figures(one) for one in found],
            }  # fmt: skip


def figures(level: dict[str, Any]) -> dict[str, Any]:
    kept = ("concurrency", "requests_ok", "requests_failed", "requests_per_s", "output_tokens_per_s")
    times = {
        name: {p: level[name][p] for p in ("p50", "p99")} for name in ("ttft_ms", "tpot_ms", "send_delay_ms")
    }
    return {name: level[name] for name in kept} | times
