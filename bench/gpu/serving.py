"""The client's view: `penstock serve` on the device and `penstock bench` over HTTP, as real processes.

Shapes with random weights give speed; the trained demo model gives answers, which are held against the CPU's.
"""

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from word_vocabulary import make_vocabulary, save_tokenizer

from bench.gpu.common import Bench, Report, shape
from bench.harness import REPOSITORY
from bench.process import Served, load_report
from penstock.models.spec import DecoderSpec

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
            texts.append([ask(server, question) for question in QUESTIONS])
    equal = sum(one == other for one, other in zip(*texts, strict=True))
    return {"equal": equal, "differ": [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]]}


def served(settings: dict[str, Any]) -> Served:
    """A server whose folder is gone when this process ends."""
    place = Path(tempfile.mkdtemp(prefix="gpu-serving-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Served(place, settings, PENSTOCK_API_KEY=KEY)


def ask(server: Served, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 48}
    body["model"] = DEMO.name
    _, text = server.ask("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
    return json.loads(text)["choices"][0]["message"]["content"]


def load(bench: Bench, name: str) -> dict[str, Any]:
    levels = (1, 2) if bench.tiny else LEVELS
    prompt, output = (16, 4) if bench.tiny else (PROMPT_TOKENS, OUTPUT_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / name
        write_shape(shape(name, tiny=bench.tiny), model, max_position=1024 if bench.tiny else 8192)
        engine = {"device": "cpu"} if bench.cpu else {"device": "cuda", "dtype": "bfloat16"}
        engine |= {"load_format": "random", "max_running": max(levels)}
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


def write_shape(spec: DecoderSpec, model: Path, *, max_position: int) -> None:
    """A directory with the config of a shape, and a tokenizer of as many tokens."""
    model.mkdir()
    vocab_size = max(spec.vocab_size, 1200)  # Of tiny shapes: all bytes, and the load generator's words.
    config = {
        "architectures": [spec.architecture],
        "model_type": spec.architecture.removesuffix("ForCausalLM").lower(), "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size, "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "vocab_size": vocab_size, "max_position_embeddings": max_position,
        "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope.theta, "tie_word_embeddings": spec.tied_head,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    save_tokenizer(make_vocabulary(vocab_size), model, context=max_position)
