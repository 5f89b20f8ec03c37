"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on queries, keys and values."""

from dataclasses import replace

from penstock.engine.models.config import CONFIG_FILE, HfConfig
from penstock.engine.models.llama import llama_spec
from penstock.engine.models.spec import DecoderSpec
from penstock.errors import CheckpointError


def qwen2_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen2ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if config.use_sliding_window:
        raise CheckpointError(f"{CONFIG_FILE}: use_sliding_window is not supported")
    return replace(
        llama_spec(config), architecture="Qwen2ForCausalLM", qkv_bias=True, o_bias=False, mlp_bias=False
    )
