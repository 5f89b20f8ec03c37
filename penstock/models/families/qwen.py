"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on queries, keys and values.
Qwen3 (Yang et al. 2025, arXiv 2505.09388): RMSNorm on query and key heads, explicit head size; dense, or with
experts in every layer.
"""

from dataclasses import replace

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, every_layer, experts, positive, qwen_windows
from penstock.models.families.llama import llama_spec
from penstock.models.spec import AttentionSpec, DecoderSpec


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


def qwen3_moe_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen3MoeForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if config.mlp_only_layers or (config.decoder_sparse_step or 1) != 1:
        raise CheckpointError(
            f"{CONFIG_FILE}: mlp_only_layers and decoder_sparse_step are not supported; expected experts in "
            f"every layer"
        )
    spec = qwen3_spec(config)
    # Where dense models count the layers before the first window, this architecture has it in all of them.
    windows = every_layer(config, spec.num_layers) if config.use_sliding_window else ()
    return replace(
        spec,
        attention=AttentionSpec(windows=windows),
        architecture="Qwen3MoeForCausalLM",
        intermediate_size=positive(config, "moe_intermediate_size"),
        moe=experts(config, normalise=bool(config.norm_topk_prob)),
    )
