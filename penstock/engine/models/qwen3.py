"""Qwen3 dense models (Yang et al. 2025, arXiv 2505.09388): RMSNorm on query and key heads, explicit head size."""

from dataclasses import replace

import msgspec

from penstock.engine.models.config import CONFIG_FILE, HfConfig
from penstock.engine.models.llama import llama_spec
from penstock.engine.models.spec import DecoderSpec
from penstock.errors import CheckpointError


def qwen3_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen3ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if config.use_sliding_window:
        raise CheckpointError(f"{CONFIG_FILE}: use_sliding_window is not supported")
    # The family's default head size does not follow from the hidden size as Llama's does.
    config = msgspec.structs.replace(config, head_dim=config.head_dim or 128)
    return replace(llama_spec(config), architecture="Qwen3ForCausalLM", qk_norm=True, mlp_bias=False)
