"""Tiny random checkpoints in Hugging Face's layout, made by transformers itself."""

from pathlib import Path

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

_SEEING = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""The vision part of models that have one: as small as can be, for nobody looks at it."""


def _gemma3_whole(**text: object) -> Gemma3Config:
    return Gemma3Config(text_config=text, vision_config=_SEEING, mm_tokens_per_image=1)


def _mistral3_whole(**text: object) -> Mistral3Config:
    text, seeing = text | {"model_type": "mistral"}, _SEEING | {"model_type": "pixtral"}
    return Mistral3Config(
        text_config=text, vision_config=seeing, tie_word_embeddings=text.get("tie_word_embeddings", False)
    )


FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
WHOLES = {
    "gemma3_whole": (_gemma3_whole, Gemma3ForConditionalGeneration),
    "mistral3_whole": (_mistral3_whole, Mistral3ForConditionalGeneration),
}
"""Models of which we read the text part."""
VOCAB_SIZE = 211
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PHI3 = {"head_dim": None, "hidden_size": 96, "pad_token_id": 0}
"""Settings without which the family's defaults do not fit a tiny model."""


def longrope(partial: float, original: int) -> dict[str, object]:
    """Rotary settings for 16 dimensions per head, stretched to 640 positions."""
    pairs = int(16 * partial) // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
    }


logging.disable_progress_bar()


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """A float32 model with random weights (biases and norms too), large enough that attention matters."""
    config_class, model_class = (FAMILIES | WHOLES)[family]
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 640,
        "initializer_range": 0.1,
        "head_dim": 16,
    }
    settings = {name: value for name, value in (settings | changes).items() if value is not None}
    torch.manual_seed(1234)
    model = model_class(config_class(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: PreTrainedModel, directory: Path, **how: object) -> Path:
    model.save_pretrained(directory, **how)
    return directory
