"""Mistral 7B and its successors (Jiang et al. 2023, arXiv 2310.06825): Llama, with a sliding window in early versions."""

from dataclasses import replace

from penstock.engine.models.config import HfConfig, sliding_window
from penstock.engine.models.llama import llama_spec
from penstock.engine.models.spec import AttentionSpec, DecoderSpec


def mistral_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `MistralForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    spec = llama_spec(config)
    window = sliding_window(config)
    return replace(
        spec,
        architecture="MistralForCausalLM",
        attention=AttentionSpec(windows=(window,) * spec.num_layers if window else ()),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
