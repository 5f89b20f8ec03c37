"""Whole models on the device against the reference on the CPU and against transformers, on tiny random
checkpoints.

float32: the same tokens as the CPU's runner for every kind of sampling, log-probabilities up to rounding.
bf16: log-probabilities of fixed prompts (so that one other token does not change all that follow).
Invariance: a batch, graphs and overlap change no token.
"""

import tempfile
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.common import CLOCK, Bench, Report, checked
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import StepRunner, build_core
from penstock.engine.gpu.load import load_on_device
from penstock.engine.gpu.runner import DeviceRunner
from penstock.engine.runner import load_runner
from penstock.protocol.worker import Submit
from penstock.rng import stream
from penstock.types import RequestId, SamplingParams, TokenLogprob

FAMILIES = ("qwen3", "llama", "gemma2", "mistral", "mixtral", "qwen2")
LENGTHS = (1, 9, 33, 130, 200)
FLOAT32_LIMIT, BFLOAT16_LIMIT = 2e-3, 1.5e-1
"""Largest difference of a log-probability. float32 products on matrix units may have tf32 inputs (2**-11)."""
ROUTED_SHARE_MIN = 0.9
"""Where a router cannot tell two experts apart in bf16, a token goes to the other one and its log-probability
is another model's. So of models with experts this share of the tokens has to be within the limit, and float32
has to be exact."""
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
Answer = tuple[list[int], list[TokenLogprob]]


def run(bench: Bench, report: Report) -> None:
    import tiny_models  # The tests' own makers of checkpoints; they need transformers.

    torch.set_num_threads(1 if bench.tiny else 8)

    def check(family: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny_models.tiny_model(family)
            return check_family(bench, model, tiny_models.save(model, Path(directory)))

    asked = FAMILIES[:1] if bench.tiny else FAMILIES
    report.fail_if(checked(report, {family: partial(check, family) for family in asked}, "families"))


def check_family(bench: Bench, model: Any, path: Path) -> dict[str, Any]:  # noqa: ANN401
    reference = load_runner(path, settings(kernels="torch"), quiet)
    ours = on_device(bench, path, dtype="float32")
    expected = ask(reference, prompts(bench), KINDS)
    batched = ask(ours, prompts(bench), KINDS)
    found: dict[str, Any] = {
        "float32_same_tokens": tokens_of(batched) == tokens_of(expected),
        "float32_largest_difference": difference(batched, expected),
        "graph_replays": ours.graphs.replays,
    }
    alone = [ask(ours, [prompt], [how])[0] for prompt, how in zip(prompts(bench), kinds(bench), strict=True)]
    ours.graphs.enabled = False
    eager = ask(ours, prompts(bench), KINDS)
    found["alone_same_tokens"] = tokens_of(alone) == tokens_of(batched)
    found["eager_same_tokens"] = tokens_of(eager) == tokens_of(batched)
    scores = ask(on_device(bench, path, dtype="bfloat16"), prompts(bench)[1:], [SCORED])
    plain = ask(reference, prompts(bench)[1:], [SCORED])
    found["bfloat16_largest_difference"] = difference(scores, plain)
    found["bfloat16_share_within"] = share_within(scores, plain, BFLOAT16_LIMIT)
    found["bfloat16_share_wanted"] = (
        ROUTED_SHARE_MIN if model.config.to_dict().get("num_local_experts") else 1.0
    )
    found["transformers_largest_difference"] = max(
        against_transformers(model, prompt, answer[1])
        for prompt, answer in zip(prompts(bench)[1:], ask(ours, prompts(bench)[1:], [SCORED]), strict=True)
    )
    found["ok"] = (
        found["float32_same_tokens"]
        and found["alone_same_tokens"]
        and found["eager_same_tokens"]
        and found["float32_largest_difference"] <= FLOAT32_LIMIT
        and found["transformers_largest_difference"] <= FLOAT32_LIMIT
        and found["bfloat16_share_within"] >= found["bfloat16_share_wanted"]
    )
    return found


def settings(**changes: object) -> EngineSettings:
    base: dict[str, object] = {
        "device": "cpu", "dtype": "float32", "kv_memory_bytes": 8 << 20, "max_running": 8, "step_tokens": 64,
        "max_model_len": 256,
    }  # fmt: skip
    return EngineSettings(**(base | changes))


def on_device(bench: Bench, path: Path, *, dtype: str) -> DeviceRunner:
    sizes = {
        "dtype": dtype,
        "kv_memory_bytes": 8 << 20,
        "max_running": 8,
        "step_tokens": 64,
        "max_model_len": 256,
    }
    return load_on_device(path, bench.target(**sizes), quiet)


def quiet(_stage: str, _done: int, _total: int) -> None:
    """Nobody watches the loading."""


def prompts(bench: Bench) -> list[list[int]]:
    random = stream(5, "prompts")
    lengths = (1, 9, 33) if bench.tiny else LENGTHS
    return [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def kinds(bench: Bench) -> list[SamplingParams]:
    return [KINDS[index % len(KINDS)] for index in range(len(prompts(bench)))]


def ask(
    runner: StepRunner,
    asked: list[list[int]],
    how: tuple[SamplingParams, ...] | list[SamplingParams],
    **changes: object,
) -> list[Answer]:
    """Tokens and log-probabilities (of the prompt, then of the answer) of requests that start together."""
    core = build_core(runner, settings(prefix_cache=False, **changes), b"k" * 32, CLOCK)
    answers: dict[str, Answer] = {}
    for index, prompt in enumerate(asked):
        request_id = RequestId(f"r{index}")
        answers[request_id] = ([], [])
        message = Submit(
            request_id=request_id, prompt=array("i", prompt).tobytes(), sampling=how[index % len(how)]
        )
        core.submit(0, message, 0)
    while core.has_work:
        for output in core.step().get(0, []):
            tokens, logprobs = answers[output.request_id]
            tokens += output.token_ids
            logprobs += (*output.prompt_logprobs, *(output.logprobs or ()))
            assert output.finish is None or output.finish.error is None, output.finish
    return list(answers.values())


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [tokens for tokens, _ in answers]


def difference(ours: list[Answer], theirs: list[Answer]) -> float:
    """The largest between log-probabilities of the same tokens."""
    return max(differences(ours, theirs), default=0.0)


def share_within(ours: list[Answer], theirs: list[Answer], limit: float) -> float:
    """The share of tokens whose log-probabilities differ by at most `limit`."""
    found = differences(ours, theirs)
    return round(sum(one <= limit for one in found) / max(len(found), 1), 4)


def differences(ours: list[Answer], theirs: list[Answer]) -> list[float]:
    pairs = [
        (a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one[1], other[1], strict=True)
    ]
    return [abs(a.logprob - b.logprob) for a, b in pairs if a.token_id == b.token_id]


@torch.inference_mode()
def against_transformers(model: Any, prompt: list[int], scores: list[TokenLogprob]) -> float:  # noqa: ANN401
    logits = model(torch.tensor([prompt])).logits[0].float()
    expected = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [one.token_id for one in scores[: len(prompt) - 1]] == prompt[1:]
    found = torch.tensor([one.logprob for one in scores[: len(prompt) - 1]])
    return float((found - expected).abs().max())
