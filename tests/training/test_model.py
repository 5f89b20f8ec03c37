"""The training model equals Qwen3, and what is exported loads elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.export import export_model
from training.model import CausalLM, ModelConfig, read_config
from training.settings import RECIPES, Recipe

TINY = ModelConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, head_dim=16,
)  # fmt: skip
MADE = [recipe for recipe in RECIPES.values() if (recipe.folder / "model.safetensors").exists()]
made = pytest.mark.parametrize("recipe", MADE, ids=lambda recipe: recipe.persona.name)


def tiny_model() -> CausalLM:
    """A small model with every weight drawn, norms included."""
    generator = torch.Generator().manual_seed(1)
    model = CausalLM(TINY)
    model.initialise(generator)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16).float()  # The export rounds to bfloat16.
    tokenizer = Tokenizer.from_str(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        )
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    export_model(model, tokenizer, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_packed_documents_do_not_see_each_other() -> None:
    model = tiny_model()
    first, second = torch.arange(1, 31).view(1, 30), torch.arange(40, 60).view(1, 20)
    packed = torch.cat([first, second], dim=1)
    numbers = torch.tensor([[0] * 30 + [1] * 20])
    with torch.no_grad():
        alone = model.hidden(second, torch.zeros_like(second))
        torch.testing.assert_close(model.hidden(packed, numbers)[:, 30:], alone, rtol=1e-4, atol=1e-4)


def test_loss_counts_only_weighted_tokens() -> None:
    model, tokens = tiny_model(), torch.arange(20).view(1, 20)
    weights = torch.zeros(1, 20)
    weights[0, 5], weights[0, 9] = 1.0, 0.5
    with torch.no_grad():
        logs = model(tokens).log_softmax(-1)
        expected = -(logs[0, 4, 5] + 0.5 * logs[0, 8, 9])
        torch.testing.assert_close(model.loss(tokens, weights, torch.zeros_like(tokens)), expected)


@made
def test_the_exported_directory_loads(recipe: Recipe) -> None:
    config = json.loads((recipe.folder / "config.json").read_text())
    assert read_config(json.dumps(config)) == recipe.shape
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == config["eos_token_id"] == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@made
def test_the_exported_weights_give_the_same_logits(recipe: Recipe) -> None:
    model = CausalLM(recipe.shape)
    model.load_state_dict(
        {name: weight.float() for name, weight in load_file(recipe.folder / "model.safetensors").items()}
    )
    theirs = AutoModelForCausalLM.from_pretrained(recipe.folder, dtype=torch.float32)
    tokens = torch.randint(7, recipe.shape.vocab_size, (2, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-3, atol=1e-3)


def test_both_models_fit_in_the_repository() -> None:
    total = sum(path.stat().st_size for recipe in RECIPES.values() for path in recipe.folder.glob("*"))
    assert total < 31 * 2**20
