"""Run by an environment that has what transformers wants for a quantized checkpoint (`install_gptqmodel.sh`):
greedy answers to some prompts, and the log-probability of every token of some texts.

    python transformers_logprobs.py MODEL ASKED.json TOKENS OUT.json

ASKED.json has {"prompts": [[id]], "texts": [[id]]}; OUT.json gets {"answers": [[id]], "logprobs": [[float]]}.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


def main() -> None:
    """Carry it out."""
    model_dir, asked_file, tokens, out = sys.argv[1:]
    stored = json.loads((Path(model_dir) / "config.json").read_text())["quantization_config"]
    how = {}
    if stored["quant_method"] == "gptq":
        how = {"quantization_config": GPTQConfig(bits=stored["bits"], backend="torch")}
    elif stored["quant_method"] == "awq":
        how = {"quantization_config": AwqConfig(bits=stored["bits"], backend="torch_awq")}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, device_map="cpu", **how)
    asked = json.loads(Path(asked_file).read_text())
    answers: list[list[int]] = []
    logprobs: list[list[float]] = []
    with torch.inference_mode():
        for text in asked["texts"]:
            ids = torch.tensor([text])
            found = model(ids).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(found.gather(1, ids[0, 1:, None])[:, 0].tolist())
        for prompt in asked["prompts"]:
            ids = torch.tensor([prompt])
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=int(tokens),
                min_new_tokens=int(tokens), pad_token_id=0,
            )  # fmt: skip
            answers.append(said[0, len(prompt) :].tolist())
    Path(out).write_text(json.dumps({"answers": answers, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
