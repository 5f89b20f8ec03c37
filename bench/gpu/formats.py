"""Whole models with quantized weights and with a KV cache in FP8, on the device.

Checkpoints of every published form against their dense twins; then one trained model over its whole context:
how far the log-probabilities of a text's tokens move, by how far into the context they stand.
"""

import math
import pydoc_data.topics
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.gpu.common import Bench, Report, checked
from bench.gpu.correctness import SCORED, ask, differences, on_device, prompts, quiet
from penstock.engine.gpu.load import load_on_device
from penstock.engine.gpu.runner import DeviceRunner

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""FP8 blocks are 128 by 128."""
FAMILY = {"gptq-act-order": "llama", "awq": "gemma2", "fp8-block": "mistral"}
LIMITS = {"int": 0.15, "fp8": 1.5}
"""Largest difference of a log-probability to the dense twin. The tiny models are random: FP8's rounding of
inputs, which a trained model hardly notices, moves theirs."""
DEMO = Path(__file__).parents[2] / "models" / "penstock-demo"
SPANS = (0, 512, 1024, 2048, 3072, 4096)
SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {},
    "bf16 in other chunks": {},
    "fp8 KV": {"kv_dtype": "fp8"},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
}
"""The second says how far rounding alone moves them."""
OTHER_CHUNKS = 48


def run(bench: Bench, report: Report) -> None:
    import quantized_checkpoints
    import tiny_models

    torch.set_num_threads(1 if bench.tiny else 8)
    formats = quantized_checkpoints.FORMATS

    def make_and_check(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            tiny_models.save(tiny_models.tiny_model(FAMILY.get(name, "qwen3"), **SIZES), path / "dense")
            quantized_checkpoints.quantize(path / "dense", path / "quantized", path / "twin", formats[name])
            return check(bench, path, "fp8" if name.startswith("fp8") else "int")

    asked = list(formats)[:2] if bench.tiny else list(formats)
    wrong = checked(report, {name: partial(make_and_check, name) for name in asked}, "forms")
    report.put("context", over_the_context(bench))
    report.fail_if(wrong)


def check(bench: Bench, path: Path, kind: str) -> dict[str, Any]:
    dtype = "float32" if bench.cpu else "bfloat16"
    quantized, twin = (on_device(bench, path / each, dtype=dtype) for each in ("quantized", "twin"))
    asked = prompts(bench)[1:]
    found = differences(ask(quantized, asked, [SCORED]), ask(twin, asked, [SCORED]))
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in quantized.weight_tensors()}
    kept = sum(tensor.nbytes for tensor in quantized.weight_tensors())
    whole = sum(tensor.nbytes for tensor in twin.weight_tensors())
    return {
        "ok": bool(found) and max(found) <= LIMITS[kind],
        "largest_difference": max(found),
        "mean_difference": sum(found) / len(found),
        "types": sorted(types),
        "bytes_of_dense": round(kept / whole, 3),
    }


def over_the_context(bench: Bench) -> dict[str, Any]:
    """Of the demo model, on Python's documentation."""
    from penstock.text.tokenizer import Tokenizer

    length, count = (160, 1) if bench.tiny else (4000, 8)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))[: 24 * length * count]
    ids = Tokenizer.load(DEMO).encode(text)
    sequences = [list(ids[i * length : (i + 1) * length]) for i in range(count)]
    exact: list[list[float]] = []
    found: dict[str, Any] = {}
    for name, changes in SETTINGS.items():
        runner = demo(bench, length, changes)
        chunk = OTHER_CHUNKS if name.endswith("chunks") else 64
        answers = ask(runner, sequences, [SCORED], step_tokens=chunk)
        scores = [[one.logprob for one in answer[1][: length - 1]] for answer in answers]
        exact = exact or scores
        found[name] = [
            {"from": low, "to": min(high, length), **errors(scores, exact, low, high)}
            for low, high in pairwise(SPANS)
            if low < length - 1
        ]
        del runner
    return found


def demo(bench: Bench, length: int, changes: dict[str, object]) -> DeviceRunner:
    settings: dict[str, object] = {
        "dtype": "float32" if bench.cpu else "bfloat16", "kv_memory_bytes": 1 << (26 if bench.tiny else 30),
        "max_running": 8, "step_tokens": 64, "max_model_len": length + 2,
    }  # fmt: skip
    return load_on_device(DEMO, bench.target(**(settings | changes)), quiet)


def errors(scores: list[list[float]], exact: list[list[float]], low: int, high: int) -> dict[str, float]:
    pairs = [
        (one, right)
        for ours, theirs in zip(scores, exact, strict=True)
        for one, right in zip(ours[low:high], theirs[low:high], strict=True)
    ]
    moved = [abs(one - right) for one, right in pairs]
    mean = sum(one for one, _ in pairs) / len(pairs)
    return {
        "tokens": len(pairs),
        "perplexity": round(math.exp(-mean), 4),
        "perplexity_exact": round(math.exp(-sum(right for _, right in pairs) / len(pairs)), 4),
        "mean_difference": round(sum(moved) / len(moved), 5),
        "largest_difference": round(max(moved), 4),
    }
