"""Mistral 7B and its successors (Jiang et al. 2023, arXiv 2310.06825): Llama, with a sliding window in early versions."""

from dataclasses import replace

from penstock.models.config import HfConfig
from penstock.models.families.llama import llama_spec
from penstock.models.spec import AttentionSpec, DecoderSpec
from penstock.models.windows import every_layer


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
