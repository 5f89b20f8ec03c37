"""Phi-3, Phi-3.5 and Phi-4 text models (Abdin et al. 2024, arXiv 2404.14219): fused projections, LongRoPE."""

from dataclasses import replace

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, RopeParameters, every_layer, partial_rope
from penstock.models.families.llama import llama_spec
from penstock.models.names import CheckpointNames
from penstock.models.spec import AttentionSpec, DecoderSpec

PHI3_NAMES = CheckpointNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def phi3_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Phi3ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    given = config.rope_parameters or config.rope_scaling or RopeParameters()
    if (given.rope_type or given.type) in ("su", "yarn"):
        # The name of longrope in this family's first checkpoints.
        given = msgspec.structs.replace(given, rope_type="longrope")
    turning = partial_rope(msgspec.structs.replace(config, rope_parameters=given))
    whole = msgspec.structs.replace(
        config,
        rope_parameters=RopeParameters(),
        partial_rotary_factor=None,
        attention_bias=False,
        mlp_bias=False,
    )
    spec = llama_spec(whole)
    if turning.rotary_dim(spec.head_dim) % 2 or not 0 < turning.partial <= 1:
        raise CheckpointError(
            f"{CONFIG_FILE}: partial_rotary_factor {turning.partial} must give an even number of head_dim "
            f"{spec.head_dim}"
        )
    return replace(
        spec,
        architecture="Phi3ForCausalLM",
        rope=turning,
        attention=AttentionSpec(windows=every_layer(config, spec.num_layers)),
    )
