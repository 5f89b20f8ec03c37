"""Mistral 7B and its successors (Jiang et al. 2023, arXiv 2310.06825): Llama, with a sliding window in early
versions. Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with a mixture of experts in every layer.
"""

from dataclasses import replace

from penstock.models.config import HfConfig, every_layer, experts
from penstock.models.families.llama import llama_spec
from penstock.models.names import CheckpointNames
from penstock.models.spec import AttentionSpec, DecoderSpec


def mistral_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `MistralForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    spec = llama_spec(config)
    return replace(
        spec,
        architecture="MistralForCausalLM",
        attention=AttentionSpec(windows=every_layer(config, spec.num_layers)),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )


MIXTRAL_NAMES = CheckpointNames(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{e}.w1",
    expert_up="block_sparse_moe.experts.{e}.w3",
    expert_down="block_sparse_moe.experts.{e}.w2",
)


def mixtral_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `MixtralForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    moe = experts(config, normalise=True)
    return replace(mistral_spec(config), architecture="MixtralForCausalLM", moe=moe)
