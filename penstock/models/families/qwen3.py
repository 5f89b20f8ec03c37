"""Qwen3 dense models (Yang et al. 2025, arXiv 2505.09388): RMSNorm on query and key heads, explicit head size."""

from dataclasses import replace

import msgspec

from penstock.models.config import HfConfig
from penstock.models.families.llama import llama_spec
from penstock.models.spec import AttentionSpec, DecoderSpec
from penstock.models.windows import qwen_windows


def qwen3_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen3ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    # The family's default head size does not follow from the hidden size as Llama's does.
    config = msgspec.structs.replace(config, head_dim=config.head_dim or 128)
    spec = llama_spec(config)
    return replace(
        spec,
        architecture="Qwen3ForCausalLM",
        attention=AttentionSpec(windows=qwen_windows(config, spec.num_layers)),
        qk_norm=True,
        mlp_bias=False,
    )
