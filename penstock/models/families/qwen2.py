"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on queries, keys and values."""

from dataclasses import replace

from penstock.models.config import HfConfig
from penstock.models.families.llama import llama_spec
from penstock.models.spec import AttentionSpec, DecoderSpec
from penstock.models.windows import qwen_windows


def qwen2_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen2ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    spec = llama_spec(config)
    return replace(
        spec,
        architecture="Qwen2ForCausalLM",
        attention=AttentionSpec(windows=qwen_windows(config, spec.num_layers)),
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
    )
