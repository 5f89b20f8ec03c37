"""Qwen3 mixtures of experts (Yang et al. 2025, arXiv 2505.09388): Qwen3 with experts in every layer."""

from dataclasses import replace

from penstock.engine.models.config import CONFIG_FILE, HfConfig, experts, positive
from penstock.engine.models.qwen3 import qwen3_spec
from penstock.engine.models.spec import DecoderSpec
from penstock.errors import CheckpointError


def qwen3_moe_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen3MoeForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if config.mlp_only_layers or (config.decoder_sparse_step or 1) != 1:
        raise CheckpointError(
            f"{CONFIG_FILE}: mlp_only_layers and decoder_sparse_step are not supported; expected experts in every layer"
        )
    return replace(
        qwen3_spec(config),
        architecture="Qwen3MoeForCausalLM",
        intermediate_size=positive(config, "moe_intermediate_size"),
        moe=experts(config, normalise=config.norm_topk_prob),
    )
