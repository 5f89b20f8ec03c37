"""Rotary frequencies and the ways in which contexts were stretched: how fast each pair of dimensions turns.

All functions take a `RopeSpec` and give float32; positions and heads are `rotary.py`'s.
"""

import math

import torch
from torch import Tensor

from penstock.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_len: int = 0) -> Tensor:
    """`[rotary_dim / 2]` angles per position, stretched as the spec says for contexts of up to `max_len`."""
    exponents = torch.arange(0, rope.rotary_dim(head_dim), 2, dtype=torch.int64).float()
    inverse = 1.0 / (rope.theta ** (exponents / rope.rotary_dim(head_dim)))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse)
    if rope.kind == "longrope":
        return _longrope(rope, inverse, max_len)
    return inverse


def rotary_angles(rope: RopeSpec, head_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to `max_len`, `[max_len, rotary_dim / 2]`, with the spec's attention
    factor.
    """
    positions = torch.arange(max_len, dtype=torch.int64).float()
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_len))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def _llama3(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """Llama 3.1's rule: long waves are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    slowed = torch.where(wavelength > rope.original_max_position / low, inverse / rope.factor, inverse)
    between = (wavelength >= rope.original_max_position / high) & (
        wavelength <= rope.original_max_position / low
    )
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeSpec, inverse: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): a ramp over the dimensions between kept and slowed waves."""
    dim = 2 * len(inverse)

    def dimension(turns: float) -> float:
        """The dimension whose wave turns this often within the original context."""
        waves = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return dim * waves / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / rope.factor * slowed + inverse * (1 - slowed)


def _longrope(rope: RopeSpec, inverse: Tensor, max_len: int) -> Tensor:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a factor per wave, of one list or of the other.

    Which list is decided by the longest context that is served, not by each text's length: keys are rotated
    once, and a text that grows past the original context must not need others.
    """
    factors = rope.long_factor if max_len > rope.original_max_position else rope.short_factor
    return inverse / torch.tensor(factors)
