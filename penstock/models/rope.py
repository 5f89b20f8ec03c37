"""Rotary settings of `config.json` to a `RopeSpec`, with errors that name the field."""

import math

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, RopeParameters, heads, positive
from penstock.models.spec import RopeSpec

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
