"""Qwen3 mixtures of experts (Yang et al. 2025, arXiv 2505.09388): Qwen3 with experts in every layer."""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, experts, positive
from penstock.models.families.qwen3 import qwen3_spec
from penstock.models.spec import AttentionSpec, DecoderSpec
from penstock.models.windows import every_layer


def qwen3_moe_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Qwen3MoeForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if config.mlp_only_layers or (config.decoder_sparse_step or 1) != 1:
        raise CheckpointError(
            f"{CONFIG_FILE}: mlp_only_layers and decoder_sparse_step are not supported; expected experts in every layer"
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
