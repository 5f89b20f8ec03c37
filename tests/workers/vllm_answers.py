"""Run by vLLM's own Python: one model, greedy answers to some prompts and the log-probability of every prompt
token.

    python vllm_answers.py MODEL PROMPTS.json TOKENS OUT.json

PROMPTS.json is a list of lists of token ids; OUT.json gets {"answers": [[id]], "logprobs": [[float]]}.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    model, prompts_file, tokens, out = sys.argv[1:]
    prompts = json.loads(Path(prompts_file).read_text())
    engine = LLM(model, dtype="bfloat16", max_model_len=1024, enforce_eager=True, max_num_seqs=len(prompts))
    params = SamplingParams(
        temperature=0.0, max_tokens=int(tokens), ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(prompts, outputs, strict=True)
    ]
    Path(out).write_text(json.dumps({"answers": answers, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
