"""The models that every engine serves: known shapes with random weights of a fixed seed, as a user would have
them on disk.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from word_vocabulary import END_OF_TEXT, TURN_END, Vocabulary, make_vocabulary, save_tokenizer

SEED = 20_26
WEIGHT_STD = 0.02
CONTEXT = 4096
COMPLETE = "complete"
"""Written last: a directory without it was cut off while it was made."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's dimensions. Heads are of `hidden // heads`; the output head is the embedding."""

    name: str
    family: str
    """"llama" or "qwen2" (the same with biases on queries, keys and values)."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    rope_theta: float
    norm_eps: float

    @property
    def parameters(self) -> int:
        """How many weights there are."""
        return sum(map(math.prod, self.tensors().values()))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint names and shapes, in the order that their random weights are drawn."""
        kv_width = self.hidden // self.heads * self.kv_heads
        sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            widths = {"q": self.hidden, "k": kv_width, "v": kv_width}
            sizes[f"{at}.input_layernorm.weight"] = (self.hidden,)
            for letter, width in widths.items():
                sizes[f"{at}.self_attn.{letter}_proj.weight"] = (width, self.hidden)
                if self.family == "qwen2":
                    sizes[f"{at}.self_attn.{letter}_proj.bias"] = (width,)
            sizes[f"{at}.self_attn.o_proj.weight"] = (self.hidden, self.hidden)
            sizes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
            sizes[f"{at}.mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            sizes[f"{at}.mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            sizes[f"{at}.mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        sizes["model.norm.weight"] = (self.hidden,)
        return sizes

    def config(self) -> dict[str, object]:
        """The `config.json` of this shape."""
        kind = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[self.family]
        return {
            "architectures": [kind], "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": TURN_END,
            "hidden_act": "silu", "hidden_size": self.hidden, "initializer_range": WEIGHT_STD,
            "intermediate_size": self.intermediate, "max_position_embeddings": CONTEXT,
            "model_type": self.family, "num_attention_heads": self.heads, "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads, "pad_token_id": END_OF_TEXT, "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "use_cache": True, "vocab_size": self.vocab,
        }  # fmt: skip


SHAPES = {
    "28m": Shape(
        name="28m", family="llama", hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1088,
        vocab=16_384, rope_theta=10_000.0, norm_eps=1e-5,
    ),
    "494m": Shape(
        name="494m", family="qwen2", hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864,
        vocab=151_936, rope_theta=1_000_000.0, norm_eps=1e-6,
    ),
}  # fmt: skip
"""A model where the host's time per token is everything, and Qwen2.5-0.5B's shape, where reading weights
is."""


def make_model(shape: Shape, folder: Path) -> Path:
    """The model directory, made now if it is not there yet."""
    if (folder / COMPLETE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = make_vocabulary(shape.vocab)
    save_tokenizer(vocabulary, folder, context=CONTEXT)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")
    ends = {"eos_token_id": [TURN_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
    save_file(random_weights(shape, vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / COMPLETE).touch()
    return folder


def random_weights(shape: Shape, vocabulary: Vocabulary) -> dict[str, torch.Tensor]:
    """bfloat16 weights, the same every time. Tokens that are not whole text are made unlikely to be drawn:
    what a client sees as chunks is then what the model generated.
    """
    chance = torch.Generator().manual_seed(SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, size in shape.tensors().items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(size).normal_(0.0, WEIGHT_STD, generator=chance)
            weights[name] = drawn.to(torch.bfloat16)
    weights["model.embed_tokens.weight"][list(vocabulary.unreadable)] *= 0.01
    return weights
