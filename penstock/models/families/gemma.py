"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): norms around sublayers, soft caps, a window in every other
layer. Gemma 3, text only (Gemma Team 2025, arXiv 2503.19786): head norms, and windowed layers that turn at
their own rate.
"""

from dataclasses import replace

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import (
    CONFIG_FILE,
    FULL,
    WINDOWED,
    HfConfig,
    RopeParameters,
    by_kind,
    positive,
    rope,
)
from penstock.models.families.llama import llama_spec
from penstock.models.names import CheckpointNames
from penstock.models.spec import AttentionSpec, DecoderSpec

GEMMA_NAMES = CheckpointNames(post_attention_norm="pre_feedforward_layernorm")
GEMMA_ACTIVATION = "gelu_pytorch_tanh"
_HEAD_DIM = 256


def gemma2_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Gemma2ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    return gemma_spec(config, "Gemma2ForCausalLM", pattern=2, softcaps=(50.0, 30.0))


def gemma_spec(
    config: HfConfig, architecture: str, *, pattern: int, softcaps: tuple[float, float]
) -> DecoderSpec:
    """The common parts of Gemma 2 and 3.

    Args:
        config: of the text model.
        architecture: its name.
        pattern: every how many layers one has no window, if the config does not name the layers' types.
        softcaps: of attention and logits, if the config is silent; 0 for none.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    if config.use_bidirectional_attention:
        raise CheckpointError(f"{CONFIG_FILE}: use_bidirectional_attention is not supported")
    kinds = [WINDOWED if (i + 1) % pattern else FULL for i in range(positive(config, "num_hidden_layers"))]
    spec = llama_spec(msgspec.structs.replace(config, head_dim=config.head_dim or _HEAD_DIM, mlp_bias=False))
    return replace(
        spec,
        architecture=architecture,
        attention=AttentionSpec(
            scale=_above_zero(config, "query_pre_attn_scalar", _HEAD_DIM) ** -0.5,
            softcap=_softcap(config.attn_logit_softcapping, softcaps[0]),
            windows=by_kind(config, spec.num_layers, kinds),
        ),
        activation="gelu_tanh",
        norm_offset=1.0,
        sublayer_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        logit_softcap=_softcap(config.final_logit_softcapping, softcaps[1]),
        tied_head=config.tie_word_embeddings is not False,
    )


def _softcap(given: float | msgspec.UnsetType | None, default: float) -> float:
    """The cap; null in the config means none, silence the family's default."""
    return default if given is msgspec.UNSET else given or 0.0


def _above_zero(config: HfConfig, field: str, default: float) -> float:
    value = getattr(config, field)
    if value is not None and value <= 0:
        raise CheckpointError(f"{CONFIG_FILE}: {field} is {value}, expected a number above zero")
    return value or default


_PATTERN = 6
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def gemma3_spec(config: HfConfig) -> DecoderSpec:
    """The decoder that a `Gemma3ForCausalLM` config describes.

    Raises:
        CheckpointError: a field is missing, or its value is not supported.
    """
    by_kind = config.rope_parameters or RopeParameters()
    full = _with_theta(
        by_kind.full_attention or config.rope_scaling or RopeParameters(), config.rope_theta or _THETA
    )
    local = _with_theta(
        by_kind.sliding_attention or RopeParameters(), config.rope_local_base_freq or _LOCAL_THETA
    )
    spec = gemma_spec(
        msgspec.structs.replace(config, rope_parameters=full),
        "Gemma3ForCausalLM",
        pattern=config.sliding_window_pattern or _PATTERN,
        softcaps=(0.0, 0.0),
    )
    local_rope = rope(msgspec.structs.replace(config, rope_parameters=local))
    return replace(spec, qk_norm=True, local_rope=local_rope)


def _with_theta(given: RopeParameters, default: float) -> RopeParameters:
    return msgspec.structs.replace(given, rope_theta=given.rope_theta or default)
