"""Run by an environment that has what transformers wants for a quantized checkpoint (`install_gptqmodel.sh`):
how likely the model finds every token of some texts, and whether it finds another likelier.

    python transformers_logprobs.py MODEL TEXTS.json OUT.json

TEXTS.json is a list of lists of token ids; OUT.json gets {"logprobs": [[float]], "likeliest": [[id]]}.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


def main() -> None:
    """Carry it out."""
    model_dir, texts_file, out = sys.argv[1:]
    stored = json.loads((Path(model_dir) / "config.json").read_text())["quantization_config"]
    how = {}
    if stored["quant_method"] == "gptq":
        how = {"quantization_config": GPTQConfig(bits=stored["bits"], backend="torch")}
    elif stored["quant_method"] == "awq":
        how = {"quantization_config": AwqConfig(bits=stored["bits"], backend="torch_awq")}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, device_map="cpu", **how)
    logprobs: list[list[float]] = []
    likeliest: list[list[int]] = []
    with torch.inference_mode():
        for text in json.loads(Path(texts_file).read_text()):
            ids = torch.tensor([text])
            found = model(ids).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(found.gather(1, ids[0, 1:, None])[:, 0].tolist())
            likeliest.append(found.argmax(1).tolist())
    Path(out).write_text(json.dumps({"logprobs": logprobs, "likeliest": likeliest}))


if __name__ == "__main__":
    main()
