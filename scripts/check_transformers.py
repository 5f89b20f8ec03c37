"""Load what `penstock quantize` writes in transformers, with the packages that it wants for each format, and
compare the log-probability of every token of some texts with ours.

`make test-transformers` installs those packages first. 0 if the mean difference of each format is within
`NEAR`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "doubles"))

from engine_driver import Driver

from penstock.engine.quantize.publish import Quantizer, Target
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams

MINI = ROOT / "models" / "penstock-demo-mini"
PUBLISHED = {
    "gptq-int4": ROOT / "models/penstock-demo-mini-int4",
    "int8": ROOT / "models/penstock-demo-mini-int8",
}
NEAR: dict[str, float] = {"gptq-int4": 0.03, "awq-int4": 0.03, "int8": 0.03, "fp8": 0.06}
"""Mean difference of a given token's log-probability at most. Theirs is computed in bfloat16; ours, with the
torch twin in float32, is what the files stand for. transformers rounds the inputs of `fp8` as well."""
ASKED = (
    "Hello!", "What is the capital of France?", "Write a haiku", "Count from 1 to 10", "Tell me a story",
    "What is Penstock?", "How do I serve a model?", "What is 12 + 30?",
)  # fmt: skip
TOKENS = 32


def ours(model: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers, and how likely each token of the prompts and these is."""
    engine = Driver(model, dtype="float32", kernels="torch", max_model_len=1024)
    answers = [
        answer.token_ids
        for answer in engine.ask(prompts, [SamplingParams(temperature=0.0, max_tokens=TOKENS)] * len(prompts))
    ]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    scored = engine.ask(whole, [SamplingParams(max_tokens=1, prompt_logprobs=0)] * len(whole))
    return answers, [[each.logprob for each in reported.prompt_logprobs] for reported in scored]


def theirs(model: Path, texts: list[list[int]], place: Path) -> dict[str, list[list[float]]]:
    """How likely transformers finds their tokens, and the likeliest at each place."""
    python = Path(os.environ.get("VENV", ROOT / ".venv")) / "gptqmodel" / "bin" / "python"
    (place / "texts.json").write_text(json.dumps(texts))
    command = [
        str(python), str(ROOT / "scripts" / "transformers_logprobs.py"), str(model),
        str(place / "texts.json"), str(place / "out.json"),
    ]  # fmt: skip
    # Their layers would be compiled first, which takes minutes and is of no use for a few texts.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads((place / "out.json").read_text())


def main(targets: list[str]) -> int:
    """Carry it out, for these formats or for all."""
    tokenizer, good = Tokenizer.load(MINI), True
    prompts = [
        list(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))
        for text in ASKED
    ]
    for target, near in NEAR.items():
        if targets and target not in targets:
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-transformers-") as name:
            model = PUBLISHED.get(target, Path(name) / "model")
            if target not in PUBLISHED:
                Quantizer(MINI, model, cast(Target, target), prompts).run(lambda _done, _total: None)
            answers, mine = ours(model, prompts)
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            found = theirs(model, whole, Path(name))
        pairs = [
            (one, other)
            for reported, others in zip(mine, found["logprobs"], strict=True)
            for one, other in zip(reported, others, strict=True)
        ]
        difference = sum(abs(one - other) for one, other in pairs) / len(pairs)
        equal = sum(
            answer == likeliest[-TOKENS:]
            for answer, likeliest in zip(answers, found["likeliest"], strict=True)
        )
        good &= difference <= near
        print(
            f"{target}: {equal} of {len(answers)} greedy answers of {TOKENS} tokens equal, log-probabilities "
            f"{difference:.4f} apart in the mean (at most {near})",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
