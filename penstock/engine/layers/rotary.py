"""Rotary positions, with the optional norm of query and key heads that goes before them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.layers.norm import RMSNorm
from penstock.engine.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """`[head_dim / 2]` float32 angles per position, stretched as the spec says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    return inverse


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


class RotaryTable:
    """Cosines and sines of every position, `[max_len, head_dim]` float32; the sines carry the rotation's sign."""

    __slots__ = ("cos", "sin")

    def __init__(self, rope: RopeSpec, head_dim: int, max_len: int, device: torch.device) -> None:
        angles = torch.outer(
            torch.arange(max_len, dtype=torch.int64).float(), inverse_frequencies(rope, head_dim)
        )
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=1).to(device)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=1).to(device)


@dataclass(slots=True, frozen=True)
class RotaryWeights:
    """What happens to query and key heads before attention, for all layers."""

    table: RotaryTable
    head_norms: tuple[tuple[Tensor, Tensor], ...]
    """Per layer the `[head_dim]` norm weights of query and key heads; empty if the model has none."""
    norm_eps: float
    num_heads: int
    num_kv_heads: int


class QKRotary:
    """Normalises query and key heads if the model does, and rotates them, in float32 inside.

    Queries and keys lie side by side in the fused projection, so one pass serves both.
    """

    __slots__ = ("_flipped", "_heads", "_norms", "_num_heads", "_rotated")

    def __init__(self, weights: RotaryWeights, max_tokens: int, device: torch.device) -> None:
        self._num_heads = weights.num_heads
        head_dim = weights.table.cos.shape[1]
        shape = (max_tokens, weights.num_heads + weights.num_kv_heads, head_dim)
        self._heads, self._rotated, self._flipped = (torch.empty(shape, device=device) for _ in range(3))
        self._norms: list[RMSNorm] = []
        for q, k in weights.head_norms:
            both = (q.float().expand(weights.num_heads, -1), k.float().expand(weights.num_kv_heads, -1))
            self._norms.append(RMSNorm(torch.cat(both), weights.norm_eps))

    def __call__(self, layer: int, qk: Tensor, angles: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> None:
        """Write rotated queries and keys.

        Args:
            layer: from 0.
            qk: `[num_tokens, num_heads + num_kv_heads, head_dim]` of the projection (may be strided).
            angles: cosines and signed sines, each `[num_tokens, 1, head_dim]` float32.
            q: `[num_tokens, num_heads, head_dim]` to write.
            k: `[num_tokens, num_kv_heads, head_dim]` to write.
        """
        num_tokens, half = qk.shape[0], qk.shape[2] // 2
        heads, rotated = self._heads[:num_tokens], self._rotated[:num_tokens]
        flipped = self._flipped[:num_tokens]
        if self._norms:
            self._norms[layer](qk, heads)
        else:
            heads.copy_(qk)
        cos, sin = angles
        torch.mul(heads, cos, out=rotated)
        flipped[..., :half] = heads[..., half:]
        flipped[..., half:] = heads[..., :half]
        # Multiply and add apart: a fused multiply-add would round differently in a vector's tail.
        rotated.add_(flipped.mul_(sin))
        q.copy_(rotated[:, : self._num_heads])
        k.copy_(rotated[:, self._num_heads :])
