"""Our logits are transformers' logits, for every family and every way of rotating and grouping."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, tiny_runner
from router_ties import decided_otherwise, router_ties
from tiny_models import FAMILIES, LLAMA3_ROPE, PHI3, VOCAB_SIZE, longrope, save, tiny_model
from transformers import PreTrainedModel

from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.engine.runner import Runner
from penstock.rng import stream
from penstock.schedule.plan import NewRow, RowWork, Sampled, StepPlan
from penstock.types import RequestId, SamplingParams

DECODE_STEPS = 32
"""From any prompt they go on through the next two blocks."""
EVERY_LOGPROB = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 160,
}
GEMMA2 = {
    "sliding_window": 21,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 7.0,
}
GEMMA3 = {"sliding_window": 33, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}
QWEN3_MOE = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
CASES = {
    "llama2": ("llama", {"num_key_value_heads": 6}),
    "llama2, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama3, tied": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one head size of its own": (
        "llama",
        {"head_dim": 26, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None, "num_key_value_heads": 3}),
    "mistral, window within a block": ("mistral", {"sliding_window": 5}),
    "mistral, window of one tile and one": ("mistral", {"sliding_window": 129, "num_attention_heads": 4}),
    "llama, yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama, yarn with its optional numbers": (
        "llama",
        {
            "rope_parameters": YARN_ROPE
            | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
        },
    ),
    "llama, dynamic rope within its context": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5000.0}},
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2, no caps, own head": (
        "gemma2",
        GEMMA2
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3, stretched, group of 6": (
        "gemma3",
        GEMMA3
        | {
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3, the text part of a whole": (
        "gemma3_whole",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 33},
    ),
    "mistral3, the text part of a whole": ("mistral3_whole", {"sliding_window": 50}),
    "mistral3, tied": ("mistral3_whole", {"sliding_window": None, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe, shares as they are": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": False}),
    "phi3, window": ("phi3", PHI3 | {"sliding_window": 21}),
    "phi3, a part turns": (
        "phi3",
        PHI3
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope within the original context": ("phi3", PHI3 | {"rope_parameters": longrope(0.5, 640)}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2, group of 8, tied": (
        "qwen2",
        {
            "head_dim": None,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2, windows from layer 1": (
        "qwen2",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3, windows from layer 2": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 130, "max_window_layers": 2},
    ),
    "qwen3_moe, windows in all layers": (
        "qwen3_moe",
        QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    ),
    "qwen3, group of 3": ("qwen3", {}),
    "qwen3, group of 2": ("qwen3", {"num_attention_heads": 4}),
    "qwen3, group of 8, large heads": ("qwen3", {"num_attention_heads": 16, "head_dim": 64}),
}

NATIVE_CHANGES = {
    "mistral": {"sliding_window": 37},
    "phi3": PHI3 | {"rope_parameters": longrope(0.5, 640)},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "mixtral": {"num_local_experts": 5, "sliding_window": 40},
    "qwen3_moe": QWEN3_MOE,
}


@dataclass
class Told:
    """One row's prompt and what was drawn after it."""

    num_prompt: int
    tokens: list[int]
    drawn: list[Sampled] = field(default_factory=list)


def decode(runner: Runner, *asked: tuple[list[int], int]) -> list[Told]:
    """Each prompt in chunks, one prompt after the other, then greedy steps of all rows together."""
    rows: list[Told] = []
    first_block = 3
    for row, (prompt, chunk) in enumerate(asked):
        reported = Told(len(prompt), list(prompt))
        num_blocks = (len(prompt) + DECODE_STEPS) // 16 + 1
        blocks = tuple(range(first_block, first_block + num_blocks))
        first_block += num_blocks
        new = (NewRow(RequestId(f"r{row}"), row, tuple(prompt), len(prompt), EVERY_LOGPROB),)
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            work = RowWork(row, start, end - start, end == len(prompt), blocks if start == 0 else ())
            reported.drawn += runner.run(StepPlan(1, new if start == 0 else (), (work,))).sampled
        rows.append(reported)
    for step in range(DECODE_STEPS + 1):
        for reported in rows:
            reported.tokens.append(reported.drawn[-1].token_id)
        if step < DECODE_STEPS:
            work = [RowWork(row, len(reported.tokens) - 1, 1, True) for row, reported in enumerate(rows)]
            for reported, sampled in zip(rows, runner.run(StepPlan(1, (), tuple(work))).sampled, strict=True):
                reported.drawn.append(sampled)
    return rows


def errors(model: PreTrainedModel, reported: Told) -> list[float]:
    """The largest difference of any token's log-probability, draw by draw."""
    with torch.inference_mode():
        expected = model(torch.tensor([reported.tokens])).logits[0].float().log_softmax(-1)
    found: list[float] = []
    for position, sampled in enumerate(reported.drawn, start=reported.num_prompt - 1):
        assert sampled.logprob is not None
        assert len(sampled.logprob.top) == VOCAB_SIZE
        ours = torch.empty(VOCAB_SIZE)
        for token_id, logprob in sampled.logprob.top:
            ours[token_id] = logprob
        found.append(float((ours - expected[position]).abs().max()))
    assert len(found) == DECODE_STEPS + 1
    return found


@pytest.mark.parametrize("case", CASES)
def test_float32_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = tiny_model(family, **changes)
    runner = tiny_runner(save(model, tmp_path))
    random = stream(7, case)
    asked = [
        ([random.randrange(VOCAB_SIZE) for _ in range(length)], chunk)
        for length, chunk in ((1, 1), (37, 512), (141, 50), (290, 512))
    ]
    for reported in decode(runner, *asked):
        assert max(errors(model, reported)) <= 1e-4


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("step_tokens", [7, 512])
def test_prompt_logprobs_equal_transformers(kernels: str, step_tokens: int, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    driver = Driver(
        save(model, tmp_path), kernels="auto" if kernels == "native" else kernels, step_tokens=step_tokens
    )
    prompt = [stream(12, kernels).randrange(VOCAB_SIZE) for _ in range(150)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=VOCAB_SIZE, max_tokens=1)
    found = driver.ask([prompt], [params])[0].prompt_logprobs
    assert [each.token_id for each in found] == prompt[1:]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for position, each in enumerate(found):
        ours = torch.empty(VOCAB_SIZE)
        for token_id, logprob in each.top:
            ours[token_id] = logprob
        assert float((ours - expected[position]).abs().max()) <= 1e-4
        assert each.logprob == float(ours[each.token_id])
        assert each.rank == 1 + int((ours > each.logprob).sum())


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_longrope_beyond_the_original_context(kernels: str, tmp_path: Path) -> None:
    model = tiny_model("phi3", **PHI3, rope_parameters=longrope(1.0, 64))
    runner = tiny_runner(save(model, tmp_path), kernels="auto" if kernels == "native" else kernels)
    prompt = [stream(10, kernels).randrange(VOCAB_SIZE) for _ in range(131)]
    (reported,) = decode(runner, (prompt, 50))
    assert max(errors(model, reported)) <= 1e-4


BFLOAT16_CHANGES: dict[str, dict[str, object]] = {
    "phi3": PHI3,
    "mistral": {"sliding_window": 45},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "mixtral": {},
    "qwen3_moe": QWEN3_MOE,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_close_to_transformers_in_float32(family: str, tmp_path: Path) -> None:
    changes = {"initializer_range": 0.03, "head_dim": 8} | BFLOAT16_CHANGES.get(family, {})
    model = tiny_model(family, **changes).bfloat16()
    runner = tiny_runner(save(model, tmp_path), dtype="bfloat16")
    prompt = [stream(8, family).randrange(VOCAB_SIZE) for _ in range(149)]
    (reported,) = decode(runner, (prompt, 64))
    reference = model.float()
    found = errors(reference, reported)
    if hasattr(model.config, "num_experts_per_tok"):
        # Where bfloat16 cannot tell which expert is the better one, the answer must be that of one or of the
        # other.
        for tie in router_ties(reference, reported.tokens):
            draw = tie[1] - reported.num_prompt + 1
            if 0 <= draw <= DECODE_STEPS and found[draw] > 2e-2:
                with decided_otherwise(reference, tie):
                    found[draw] = min(found[draw], errors(reference, reported)[draw])
    assert max(found) <= 2e-2


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "mixtral", "qwen3_moe"]
)
def test_native_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    try:
        NativeLibrary()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    model = tiny_model(family, **NATIVE_CHANGES.get(family, {}))
    runner = tiny_runner(save(model, tmp_path), kernels="native")
    prompt = [stream(9, family).randrange(VOCAB_SIZE) for _ in range(141)]
    (reported,) = decode(runner, (prompt, 50))
    assert max(errors(model, reported)) <= 1e-4


def test_a_float32_checkpoint_can_run_in_bfloat16(qwen3: Path) -> None:
    assert tiny_runner(qwen3, dtype="bfloat16").info.dtype == "bfloat16"
