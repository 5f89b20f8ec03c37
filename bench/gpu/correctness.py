"""Whole models on the device against the reference on the CPU and against transformers, on tiny random
checkpoints; quantized ones against their dense twins.

float32: the same tokens as the CPU's runner for every kind of sampling, log-probabilities up to rounding.
bf16: log-probabilities of fixed prompts (so that one other token does not change all that follow).
Invariance: a batch, graphs and overlap change no token.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tiny_models
import torch
from engine_driver import Answer, Driver
from quantized_checkpoints import FORMATS, quantize

from bench.gpu.common import CLOCK, Bench, Report, checked
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import StepRunner, build_core
from penstock.engine.gpu.load import load_on_device
from penstock.engine.gpu.runner import DeviceRunner
from penstock.engine.runner import load_runner
from penstock.rng import stream
from penstock.types import SamplingParams, TokenLogprob

FAMILIES = ("qwen3", "llama", "gemma2", "mistral", "mixtral", "qwen2")
LENGTHS = (1, 9, 33, 130, 200)
FLOAT32_LIMIT, BFLOAT16_LIMIT = 2e-3, 1.5e-1
"""Largest difference of a log-probability. float32 products on matrix units may have tf32 inputs (2**-11)."""
ROUTED_SHARE_MIN = 0.9
"""Where a router cannot tell two experts apart in bf16, a token goes to the other one and its log-probability
is another model's. So of models with experts this share of the tokens has to be within the limit, and float32
has to be exact."""
QUANTIZED_LIMITS = {"int": 0.15, "fp8": 1.5}
"""Largest difference of a log-probability to the dense twin. The tiny models are random: FP8's rounding of
inputs, which a trained model hardly notices, moves theirs."""
QUANTIZED_FAMILY = {"gptq-act-order": "llama", "awq": "gemma2", "fp8-block": "mistral"}
QUANTIZED_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2
}  # fmt: skip
"""FP8 blocks are 128 by 128."""
SIZES: dict[str, object] = {
    "kv_memory_bytes": 8 << 20, "max_running": 8, "step_tokens": 64, "max_model_len": 256
}  # fmt: skip
MAX_TOKENS = 10
VOCAB_SIZE = 211
KINDS = (
    SamplingParams(temperature=0.0, logprobs=3, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0.8, seed=11, logprobs=0, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=1.3, seed=12, top_k=20, top_p=0.9, logprobs=2, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=1.0, seed=13, min_p=0.05, logprobs=1, max_tokens=MAX_TOKENS),
    SamplingParams(
        temperature=0.9, seed=14, top_p=0.95, presence_penalty=0.5, frequency_penalty=1.3,
        repetition_penalty=1.2, logit_bias=((3, 2.5), (5, -100.0)), stop_token_ids=tuple(range(20, 60)),
        min_tokens=MAX_TOKENS, logprobs=1, max_tokens=MAX_TOKENS,
    ),
)  # fmt: skip
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def run(bench: Bench, report: Report, under: str) -> None:
    """`under`: "families" or "forms"."""
    check, names = {"families": (check_family, FAMILIES), "forms": (check_form, tuple(FORMATS))}[under]
    torch.set_num_threads(1 if bench.tiny else 8)

    def in_a_folder(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            return check(bench, name, Path(directory))

    asked = names[:2] if bench.tiny else names
    report.fail_if(checked(report, {name: partial(in_a_folder, name) for name in asked}, under))


def check_form(bench: Bench, name: str, path: Path) -> dict[str, Any]:
    dense = tiny_models.tiny_model(QUANTIZED_FAMILY.get(name, "qwen3"), **QUANTIZED_SIZES)
    quantize(tiny_models.save(dense, path / "dense"), path / "quantized", path / "twin", FORMATS[name])
    dtype, kind = "float32" if bench.cpu else "bfloat16", "fp8" if name.startswith("fp8") else "int"
    quantized, twin = (on_device(bench, path / each, dtype=dtype) for each in ("quantized", "twin"))
    found = differences(scores(quantized, bench), scores(twin, bench))
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in quantized.weight_tensors()}
    kept, whole = (sum(each.nbytes for each in one.weight_tensors()) for one in (quantized, twin))
    return {
        "ok": bool(found) and max(found) <= QUANTIZED_LIMITS[kind],
        "largest_difference": max(found),
        "mean_difference": sum(found) / len(found),
        "types": sorted(types),
        "bytes_of_dense": round(kept / whole, 3),
    }


def check_family(bench: Bench, name: str, path: Path) -> dict[str, Any]:
    model = tiny_models.tiny_model(name)
    tiny_models.save(model, path)
    reference = load_runner(
        path, EngineSettings(device="cpu", dtype="float32", kernels="torch", **SIZES), quiet
    )
    ours = on_device(bench, path, dtype="float32")
    asked, kinds = prompts(bench), [KINDS[i % len(KINDS)] for i in range(len(prompts(bench)))]
    expected, batched = ask(reference, asked, kinds), ask(ours, asked, kinds)
    found: dict[str, Any] = {
        "float32_same_tokens": tokens_of(batched) == tokens_of(expected),
        "float32_largest_difference": max(differences(batched, expected), default=0.0),
        "graph_replays": ours.graphs.replays,
    }
    alone = [ask(ours, [prompt], [how])[0] for prompt, how in zip(asked, kinds, strict=True)]
    ours.graphs.enabled = False
    found["alone_same_tokens"] = tokens_of(alone) == tokens_of(batched)
    found["eager_same_tokens"] = tokens_of(ask(ours, asked, kinds)) == tokens_of(batched)
    rounded = differences(scores(on_device(bench, path, dtype="bfloat16"), bench), scores(reference, bench))
    within = sum(each <= BFLOAT16_LIMIT for each in rounded) / max(len(rounded), 1)
    has_experts = bool(model.config.to_dict().get("num_local_experts"))
    found["bfloat16_largest_difference"] = max(rounded, default=0.0)
    found["bfloat16_share_within"] = round(within, 4)
    found["bfloat16_share_wanted"] = ROUTED_SHARE_MIN if has_experts else 1.0
    found["transformers_largest_difference"] = max(
        against_transformers(model, prompt, answer.prompt_logprobs)
        for prompt, answer in zip(asked[1:], scores(ours, bench), strict=True)
    )
    same = all(found[f"{which}_same_tokens"] for which in ("float32", "alone", "eager"))
    near = all(found[f"{which}_largest_difference"] <= FLOAT32_LIMIT for which in ("float32", "transformers"))
    found["ok"] = same and near and found["bfloat16_share_within"] >= found["bfloat16_share_wanted"]
    return found


def on_device(bench: Bench, path: Path, *, dtype: str) -> DeviceRunner:
    return load_on_device(path, bench.target(dtype=dtype, **SIZES), quiet)


def quiet(_stage: str, _done: int, _total: int) -> None:
    """Nobody watches the loading."""


def prompts(bench: Bench) -> list[list[int]]:
    random = stream(5, "prompts")
    lengths = (1, 9, 33) if bench.tiny else LENGTHS
    return [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


class _Asked(Driver):
    """An engine around a runner that is there already."""

    def __init__(self, runner: StepRunner) -> None:
        settings = EngineSettings(dtype="float32", prefix_cache=False, **SIZES)
        self.core = build_core(runner, settings, b"k" * 32, CLOCK)
        self._asked, self._mail = 0, SimpleQueue()


def ask(runner: StepRunner, asked: Sequence[list[int]], how: Sequence[SamplingParams]) -> list[Answer]:
    """Answers to requests that start together."""
    answers = _Asked(runner).ask(asked, how)
    assert not any(answer.error for answer in answers), answers
    return answers


def scores(runner: StepRunner, bench: Bench) -> list[Answer]:
    """Of the fixed prompts but the shortest."""
    asked = prompts(bench)[1:]
    return ask(runner, asked, [SCORED] * len(asked))


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def differences(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[float]:
    """Between log-probabilities of the same tokens, of prompts and answers."""
    pairs = [
        pair
        for one, other in zip(ours, theirs, strict=True)
        for name in ("prompt_logprobs", "logprobs")
        for pair in zip(getattr(one, name), getattr(other, name), strict=True)
    ]
    return [abs(a.logprob - b.logprob) for a, b in pairs if a.token_id == b.token_id]


@torch.inference_mode()
def against_transformers(model: Any, prompt: list[int], scores: list[TokenLogprob]) -> float:  # noqa: ANN401
    logits = model(torch.tensor([prompt])).logits[0].float()
    expected = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [one.token_id for one in scores[: len(prompt) - 1]] == prompt[1:]
    found = torch.tensor([one.logprob for one in scores[: len(prompt) - 1]])
    return float((found - expected).abs().max())
