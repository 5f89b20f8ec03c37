"""Reading `config.json`: the fields that we understand, typed, with errors that name the field.

Two spellings of the rotary settings are in the wild: `rope_theta` with an optional `rope_scaling`
(transformers 4) and `rope_parameters` (transformers 5). `models/rope.py` turns both into a `RopeSpec`.
"""

from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.models.sizes import CONFIG_BYTES_MAX, check_sizes
from penstock.models.spec import MoeSpec

CONFIG_FILE = "config.json"


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `rope_parameters` or `rope_scaling`."""

    rope_type: str | None = None
    type: str | None = None
    """The old name of `rope_type`."""
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    full_attention: "RopeParameters | None" = None
    sliding_attention: "RopeParameters | None" = None
    """Gemma 3 has settings per kind of layer instead."""


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`config.json` of a decoder.

    Fields that a family must have are checked by `positive`; null is as good as silence.
    """

    architectures: list[str] | None = None
    model_type: str | None = None
    text_config: "HfConfig | None" = None
    """The decoder's own configuration, in checkpoints that see as well as read."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rms_norm_eps: float | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    """What Gemma calls `hidden_act`."""
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    use_sliding_window: bool | None = None
    use_bidirectional_attention: bool | None = None
    sliding_window: int | None = None
    max_window_layers: int | None = None
    sliding_window_pattern: int | None = None
    layer_types: list[str] | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | msgspec.UnsetType | None = msgspec.UNSET
    final_logit_softcapping: float | msgspec.UnsetType | None = msgspec.UNSET
    rope_local_base_freq: float | None = None
    rope_theta: float | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: int | None = None
    pretraining_tp: int | None = None
    quantization_config: dict[str, Any] | None = None


def read_config(directory: Path) -> HfConfig:
    """The configuration of the model in `directory`.

    Raises:
        CheckpointError: there is no such directory or file, or a field has the wrong type or an absurd size.
    """
    return read_config_file(directory / CONFIG_FILE)


def read_config_file(path: Path) -> HfConfig:
    """The configuration in one file: for the engine's loader and for the planner, which needs no weights
    beside it.

    Raises:
        CheckpointError: it cannot be read, or a field has the wrong type or an absurd size.
    """
    try:
        if (size := path.stat().st_size) > CONFIG_BYTES_MAX:
            raise CheckpointError(f"{path}: {size} bytes is over the bound of {CONFIG_BYTES_MAX}")
        config = msgspec.json.decode(path.read_bytes(), type=HfConfig)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); expected a model directory"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: nests too deeply") from None
    for part in (config, config.text_config):
        if part is not None:
            check_sizes(part, str(path))
    return config


def positive(config: HfConfig, field: str) -> int:
    """A whole number above zero that every family needs.

    Raises:
        CheckpointError: the field is missing or not positive.
    """
    value = getattr(config, field)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{CONFIG_FILE}: {field} is {value}, expected a whole number above zero")
    return value


def heads(config: HfConfig) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size) with the defaults that transformers applies.

    Raises:
        CheckpointError: the numbers do not fit each other.
    """
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = (
        num_heads if config.num_key_value_heads is None else positive(config, "num_key_value_heads")
    )
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{CONFIG_FILE}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    head_dim = config.head_dim or positive(config, "hidden_size") // num_heads
    if head_dim % 2 or head_dim < 2:
        raise CheckpointError(f"{CONFIG_FILE}: head_dim is {head_dim}, expected an even number")
    return num_heads, num_kv_heads, head_dim


def experts(config: HfConfig, *, normalise: bool) -> MoeSpec:
    """The mixture of experts; their number goes by two names.

    Raises:
        CheckpointError: a number is missing, or more experts are to be chosen than there are.
    """
    field = "num_experts" if config.num_local_experts is None else "num_local_experts"
    num_experts, top_k = positive(config, field), positive(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(
            f"{CONFIG_FILE}: num_experts_per_tok is {top_k}, expected at most {field} {num_experts}"
        )
    return MoeSpec(num_experts=num_experts, top_k=top_k, normalise=normalise)
