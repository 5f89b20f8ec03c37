"""Gemma 3, text only (Gemma Team 2025, arXiv 2503.19786): head norms, and windowed layers that turn at their own rate."""

from dataclasses import replace

import msgspec

from penstock.models.config import HfConfig, RopeParameters
from penstock.models.families.gemma2 import gemma_spec
from penstock.models.rope import rope
from penstock.models.spec import DecoderSpec

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
