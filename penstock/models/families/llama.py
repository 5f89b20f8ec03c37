"""Llama 2 and 3.x (Touvron et al. 2023, arXiv 2307.09288; Dubey et al. 2024, arXiv 2407.21783)."""

from penstock.models.config import HfConfig, heads, positive, rope
from penstock.models.spec import DecoderSpec


def llama_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `LlamaForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    num_heads, num_kv_heads, head_dim = heads(config)
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=positive(config, "max_position_embeddings"),
        norm_eps=config.rms_norm_eps or 1e-6,
        rope=rope(config),
        qkv_bias=bool(config.attention_bias),
        o_bias=bool(config.attention_bias),
        mlp_bias=bool(config.mlp_bias),
        tied_head=bool(config.tie_word_embeddings),
    )
