"""Tiny random checkpoints in Hugging Face's layout, made by transformers itself."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB_SIZE = 211
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
logging.disable_progress_bar()


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """A float32 model with random weights (biases and norms too), large enough that attention matters."""
    config_class, model_class = FAMILIES[family]
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
