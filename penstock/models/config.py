"""Reading `config.json`: the fields that we understand, typed, with errors that name the field.

Two spellings of the rotary settings are in the wild: `rope_theta` with an optional `rope_scaling`
(transformers 4) and `rope_parameters` (transformers 5). `models/config.py` turns both into a `RopeSpec`.

Rotary settings of `config.json` to a `RopeSpec`, with errors that name the field.

Sliding windows of `config.json`, layer by layer, with errors that name the field.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.models.spec import MoeSpec, RopeSpec

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
    """Gemma's name of `hidden_act`."""
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
    is_causal: bool | None = None
    is_decoder: bool | None = None
    layer_norm_eps: float | None = None
    type_vocab_size: int | None = None
    position_embedding_type: str | None = None
    pad_token_id: int | None = None
    id2label: dict[str, Any] | None = None
    num_labels: int | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None


def read_config_file(path: Path) -> HfConfig:
    """The configuration in one file: for the engine's loader and for the planner, which needs no weights.

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


_KINDS = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")


def rope(config: HfConfig) -> RopeSpec:
    """The rotary settings of an architecture whose heads turn as a whole.

    Raises:
        CheckpointError: a kind of scaling that is not supported, or one of its numbers is missing.
    """
    spec = partial_rope(config)
    if spec.partial != 1.0:
        raise CheckpointError(f"{CONFIG_FILE}: partial_rotary_factor is not supported for this architecture")
    return spec


def partial_rope(config: HfConfig) -> RopeSpec:
    """As `rope`, for architectures of whose heads a share of the dimensions may turn.

    Raises:
        CheckpointError: a kind of scaling that is not supported, or one of its numbers is missing or wrong.
    """
    given = config.rope_parameters or config.rope_scaling or RopeParameters()
    kind = given.rope_type or given.type or "default"
    theta = given.rope_theta or config.rope_theta or 10_000.0
    partial = given.partial_rotary_factor or config.partial_rotary_factor or 1.0
    if kind in ("default", "dynamic"):
        # Dynamic NTK changes nothing up to max_position_embeddings, and no longer context is served: beyond
        # it the angles depend on how long each text has become, so keys in the cache would be wrong with the
        # next token.
        return RopeSpec(theta=theta, partial=partial)
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, partial=partial, factor=_needed(given, "factor"))
    if kind == "llama3":
        return RopeSpec(
            kind="llama3",
            theta=theta,
            partial=partial,
            factor=_needed(given, "factor"),
            low_freq_factor=_needed(given, "low_freq_factor"),
            high_freq_factor=_needed(given, "high_freq_factor"),
            original_max_position=int(_needed(given, "original_max_position_embeddings")),
        )
    if kind == "yarn":
        return _yarn(config, given, theta, partial)
    if kind == "longrope":
        return _longrope(config, given, theta, partial)
    raise CheckpointError(
        f"{CONFIG_FILE}: rope type {kind!r} is not supported; expected one of {', '.join(_KINDS)}"
    )


def _yarn(config: HfConfig, given: RopeParameters, theta: float, partial: float) -> RopeSpec:
    factor = _needed(given, "factor")

    def stretch(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = given.attention_factor or stretch(1.0)
    if given.attention_factor is None and given.mscale and given.mscale_all_dim:
        attention = stretch(given.mscale) / stretch(given.mscale_all_dim)
    return RopeSpec(
        kind="yarn",
        theta=theta,
        partial=partial,
        factor=factor,
        original_max_position=_original(config, given),
        attention_factor=attention,
        beta_fast=given.beta_fast or 32.0,
        beta_slow=given.beta_slow or 1.0,
        truncate=given.truncate,
    )


def _longrope(config: HfConfig, given: RopeParameters, theta: float, partial: float) -> RopeSpec:
    original = _original(config, given)
    attention = given.attention_factor
    if attention is None:
        factor = given.factor or positive(config, "max_position_embeddings") / original
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    spec = RopeSpec(
        kind="longrope",
        theta=theta,
        partial=partial,
        original_max_position=original,
        attention_factor=attention,
        short_factor=tuple(given.short_factor or ()),
        long_factor=tuple(given.long_factor or ()),
    )
    pairs = spec.rotary_dim(heads(config)[2]) // 2
    for name, factors in (("short_factor", spec.short_factor), ("long_factor", spec.long_factor)):
        if len(factors) != pairs or min(factors) <= 0:
            raise CheckpointError(f"{CONFIG_FILE}: longrope needs {name}, {pairs} numbers above zero")
    return spec


def _original(config: HfConfig, given: RopeParameters) -> int:
    length = given.original_max_position_embeddings or config.original_max_position_embeddings
    return length or positive(config, "max_position_embeddings")


def _needed(given: RopeParameters, field: str) -> float:
    value = getattr(given, field)
    if not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{CONFIG_FILE}: rope scaling needs {field} above zero, got {value}")
    return float(value)


WINDOWED, FULL = "sliding_attention", "full_attention"
_MAX_WINDOW_LAYERS = 28


def every_layer(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """One window for all layers (Mistral); empty if the config has none.

    Raises:
        CheckpointError: the window is not positive.
    """
    return () if config.sliding_window is None else (positive(config, "sliding_window"),) * num_layers


def by_kind(config: HfConfig, num_layers: int, default: Sequence[str]) -> tuple[int, ...]:
    """Windows of the layers that `layer_types` (else `default`) calls windowed; empty if none is.

    Raises:
        CheckpointError: as many kinds as there are layers were expected, a kind is unknown, or there is no
            window.
    """
    kinds = config.layer_types or default
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{CONFIG_FILE}: layer_types names {len(kinds)} layers, num_hidden_layers {num_layers}"
        )
    unknown = set(kinds) - {WINDOWED, FULL}
    if unknown:
        raise CheckpointError(f"{CONFIG_FILE}: layer type {unknown.pop()!r} is not supported")
    if WINDOWED not in kinds:
        return ()
    window = positive(config, "sliding_window")
    return tuple(window if kind == WINDOWED else 0 for kind in kinds)


def qwen_windows(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Qwen's: only if `use_sliding_window` says so, and only from layer `max_window_layers` on.

    Raises:
        CheckpointError: as `by_kind`.
    """
    if not config.use_sliding_window:
        return ()
    first = _MAX_WINDOW_LAYERS if config.max_window_layers is None else config.max_window_layers
    return by_kind(config, num_layers, [WINDOWED if i >= first else FULL for i in range(num_layers)])


# Bounds on the sizes that a model's `config.json` may name, so that a file of numbers cannot make anything
# be built.
#
# They are several times what published models have. The description in the neighbouring files is a second,
# closer bound (engine/loader.py).

SIZES_MAX = {
    "num_hidden_layers": 1024,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "moe_intermediate_size": 1_048_576,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 8192,
    "vocab_size": 8_388_608,
    "type_vocab_size": 65_536,
    "num_experts": 8192,
    "num_local_experts": 8192,
    "num_experts_per_tok": 8192,
    "max_position_embeddings": 134_217_728,
    "sliding_window": 134_217_728,
}
LAYERS_TIMES_EXPERTS_MAX = 262_144
"""Each is three tensors with names."""
CONFIG_BYTES_MAX = 16 * 1024 * 1024
"""Of `config.json`; published ones have a few thousand."""


def check_sizes(config: object, where: str) -> None:
    """Refuse sizes that no model has. `config` has some of `SIZES_MAX` as attributes, perhaps None.

    Raises:
        CheckpointError: naming the field.
    """
    for field, limit in SIZES_MAX.items():
        value = getattr(config, field, None)
        if isinstance(value, int) and value > limit:
            raise CheckpointError(f"{where}: {field} is {value}; expected at most {limit}")
    layers = getattr(config, "num_hidden_layers", None) or 0
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    if layers * experts > LAYERS_TIMES_EXPERTS_MAX:
        raise CheckpointError(
            f"{where}: {layers} layers of {experts} experts each; expected at most "
            f"{LAYERS_TIMES_EXPERTS_MAX} "
            "experts in all"
        )
