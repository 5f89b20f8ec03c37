"""Write a trained model as a Hugging Face directory: `python -m training.export penstock-demo` (last
checkpoint).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.chat import END_OF_TEXT, TURN_END
from training.model import CausalLM
from training.settings import BUILD, RECIPES


def replace_text(path: Path, text: str) -> None:
    """Write a file in one move, so that a reader never sees half of it."""
    held = path.with_suffix(path.suffix + ".tmp")
    held.write_text(text, encoding="utf-8")
    held.replace(path)


def export_model(model: CausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `config.json`, `generation_config.json` and bfloat16 weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    turn_end, end = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    assert turn_end is not None
    assert end is not None
    config = model.config.to_hf(eos_token_id=turn_end, pad_token_id=end)
    generation = {"do_sample": False, "eos_token_id": [turn_end, end], "pad_token_id": end}
    replace_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    replace_text(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    weights = {
        name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "model.safetensors.tmp").chmod(0o644)
    (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")


def export_checkpoint(name: str, folder: Path) -> None:
    """Export the last checkpoint of a run, finished or not."""
    recipe = RECIPES[name]
    state: dict[str, Any] = torch.load(BUILD / f"{name}.pt", map_location="cpu")
    model = CausalLM(recipe.shape)
    model.load_state_dict(state["model"])
    export_model(model, Tokenizer.from_file(str(recipe.folder / "tokenizer.json")), folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Export the last checkpoint of a demo model.")
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--folder", type=Path, help="where to write; the model's own folder if not given")
    arguments = parser.parse_args()
    export_checkpoint(arguments.model, arguments.folder or RECIPES[arguments.model].folder)


if __name__ == "__main__":
    main()
