"""What `penstock quantize` wrote of our demo model, in a real vLLM on the CPU and in our engine: greedy
answers, and the log-probabilities of given tokens.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from engine_driver import Driver

from penstock.engine.quantize.publish import Quantizer, Target
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams

pytestmark = [pytest.mark.workers, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PEERS = ROOT / "bench" / "out" / "peers"
TIMEOUT_S = 800.0
DEMO = ROOT / "models" / "penstock-demo"
PUBLISHED = {
    "gptq-int4": ROOT / "models/penstock-demo-mini-int4",
    "int8": ROOT / "models/penstock-demo-mini-int8",
}
"""Of the smaller model, which has the same tokens; the other formats are made here of the larger one."""
TOKENS = 32
ASKED = (
    "Hello!", "What is the capital of France?", "Write a haiku", "Count from 1 to 10", "Tell me a story",
    "What is Penstock?", "How do I serve a model?", "What is 12 + 30?",
)  # fmt: skip
NEAR: dict[Target, float] = {"gptq-int4": 0.08, "awq-int4": 0.08, "int8": 0.06, "fp8": 0.06}
"""Mean difference of a given token's log-probability at most. Both round their products in bfloat16; ours
rounds the inputs of four-bit layers to eight bits as well, vLLM rounds those of `fp8`."""
TIED = 0.25
"""Log-probabilities of two tokens that may be taken either way for these differences."""
NEEDS: dict[Target, str] = {"gptq-int4": "avx512f", "awq-int4": "avx512f", "int8": "avx2", "fp8": "avx2"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(DEMO)
    return [
        list(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))
        for text in ASKED
    ]


def made(target: Target, prompts: list[list[int]], place: Path) -> Path:
    """The published directory, or one made here."""
    if target in PUBLISHED:
        return PUBLISHED[target]
    Quantizer(DEMO, place / "model", target, prompts).run(lambda _done, _total: None)
    return place / "model"


def asked_of_vllm(model: Path, prompts: list[list[int]], place: Path) -> dict[str, list[list[float]]]:
    python = PEERS / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.fail("vLLM is not installed: bench/peers/install_vllm.sh")
    (place / "prompts.json").write_text(json.dumps(prompts))
    script, log = Path(__file__).with_name("vllm_answers.py"), place / "log"
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
    }
    command = [python, script, model, place / "prompts.json", str(TOKENS), place / "out.json"]
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    return json.loads((place / "out.json").read_text())


@pytest.mark.parametrize("target", NEEDS)
def test_vllm_answers_as_we_do(target: Target, prompts: list[list[int]], tmp_path: Path) -> None:
    flags = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if flags is None or NEEDS[target] not in flags[1].split():
        pytest.skip(f"vLLM computes {target} with {NEEDS[target]}, which this processor lacks")
    model = made(target, prompts, tmp_path)
    ours = Driver(model, dtype="bfloat16", kernels="auto", max_model_len=1024)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=5)
    answers = ours.ask(prompts, [greedy] * len(prompts))
    # Both say how likely the tokens of our answers are.
    whole = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    scored = ours.ask(whole, [SamplingParams(max_tokens=1, prompt_logprobs=0)] * len(whole))
    theirs = asked_of_vllm(model, [*prompts, *whole], tmp_path)
    pairs = [
        (mine.logprob, other)
        for reported, others in zip(scored, theirs["logprobs"][len(prompts) :], strict=True)
        for mine, other in zip(reported.prompt_logprobs, others, strict=True)
    ]
    difference = sum(abs(mine - other) for mine, other in pairs) / len(pairs)
    equal = 0
    for answer, other in zip(answers, theirs["answers"][: len(prompts)], strict=True):
        first = next((at for at in range(TOKENS) if answer.token_ids[at] != other[at]), None)
        equal += first is None
        if first is not None:  # Then both were nearly as likely.
            likely = dict(answer.logprobs[first].top)
            taken, instead = answer.token_ids[first], int(other[first])
            assert likely[taken] - likely.get(instead, -torch.inf) < TIED, (first, taken, instead, likely)
    print(f"{target}: {equal} of {len(answers)} answers equal, log-probabilities {difference:.4f} apart")
    assert difference < NEAR[target]
    assert equal >= len(answers) // 2
