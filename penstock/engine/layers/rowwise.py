"""Operations on single rows: norm, soft cap, embedding; and rotary positions, with the optional norm of query
and key heads that goes before them. A row's bits do not depend on the batch.

Rotary frequencies and the ways in which contexts were stretched say how fast each pair of dimensions turns:
functions of a `RopeSpec`, which give float32.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from penstock.models.spec import RopeSpec

_linalg = cast(Any, torch.linalg)  # Its stubs declare no types.


class RMSNorm:
    """`x / rms(x) * weight` over the last dimension, in float32 inside (Zhang and Sennrich 2019, arXiv
    1910.07467).
    """

    __slots__ = ("_eps", "_scale", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._scale = 1.0 / weight.shape[-1]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised rows of `x` `[..., size]` to `out` (same shape)."""
        # Only exactly rounded operations and per-row sums: a row's bits do not depend on the batch.
        norm: Tensor = _linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        norm.mul_(norm).mul_(self._scale).add_(self._eps).rsqrt_()
        torch.mul(x, norm, out=out)
        out.mul_(self._weight)

    def add(self, residual: Tensor, x: Tensor, out: Tensor) -> None:
        """Add `x` to `residual` in place and write the normalised sum to `out`; all `[num_rows, size]`."""
        residual.add_(x)
        self(residual, out)


# Soft caps of scores and logits (Gemma Team 2024, arXiv 2408.00118).


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Turn `x` (float32) into `cap * tanh(x / cap)` in place, whatever its shape."""
    # As 1 - 2 / (exp(2x) + 1): torch's own tanh rounds a vector's tail otherwise, so its bits depend on the
    # batch.
    return x.mul_(2.0 / cap).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).mul_(cap)


# Token embeddings: rows of a table, for some families scaled.


class Embedding:
    """Rows of a `[vocab_size, hidden]` table."""

    __slots__ = ("_table",)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """Write the rows of `token_ids` `[num_tokens]` to `out` `[num_tokens, hidden]`."""
        torch.index_select(self._table, 0, token_ids, out=out)


class ScaledEmbedding(Embedding):
    """Rows times a constant that has the table's precision (Gemma)."""

    __slots__ = ("_scale",)

    def __init__(self, table: Tensor, scale: float) -> None:
        super().__init__(table)
        self._scale = float(torch.tensor(scale, dtype=table.dtype))

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """See `Embedding`."""
        super().__call__(token_ids, out)
        out.mul_(self._scale)


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


class RotaryTable:
    """Cosines and sines of every position, `[max_len, head_dim]` float32; the sines carry the rotation's
    sign.

    Dimensions from `rotary_dim` on do not turn: 1 and 0.
    """

    __slots__ = ("cos", "rotary_dim", "sin")

    def __init__(self, rope: RopeSpec, head_dim: int, max_len: int, device: torch.device) -> None:
        cos, sin = rotary_angles(rope, head_dim, max_len)
        self.rotary_dim = 2 * cos.shape[1]
        rest = cos.new_zeros(max_len, head_dim - self.rotary_dim)
        self.cos = torch.cat((cos, cos, rest + 1.0), dim=1).to(device)
        self.sin = torch.cat((-sin, sin, rest), dim=1).to(device)


@dataclass(slots=True, frozen=True)
class RotaryWeights:
    """The rotation of query and key heads before attention, for all layers."""

    tables: tuple[RotaryTable, ...]
    """Per layer; layers that turn alike share one object."""
    head_norms: tuple[tuple[Tensor, Tensor], ...]
    """Per layer the `[head_dim]` norm weights of query and key heads; empty if the model has none."""
    norm_eps: float
    num_heads: int
    num_kv_heads: int


class QKRotary:
    """Normalises query and key heads if the model does, and rotates them, in float32 inside.

    Queries and keys lie side by side in the fused projection, so one pass serves both.
    """

    __slots__ = ("_angles", "_flipped", "_half", "_heads", "_norms", "_num_heads", "_rotated", "_tables")

    def __init__(self, weights: RotaryWeights, max_tokens: int, device: torch.device) -> None:
        self._num_heads = weights.num_heads
        self._tables = weights.tables
        self._angles: dict[RotaryTable, tuple[Tensor, Tensor]] = {}
        self._half = weights.tables[0].rotary_dim // 2
        head_dim = weights.tables[0].cos.shape[1]
        shape = (max_tokens, weights.num_heads + weights.num_kv_heads, head_dim)
        self._heads, self._rotated = (torch.empty(shape, device=device) for _ in range(2))
        # Zeros stay where dimensions do not turn.
        self._flipped = torch.zeros(shape, device=device)
        self._norms: list[RMSNorm] = []
        for q, k in weights.head_norms:
            both = (q.float().expand(weights.num_heads, -1), k.float().expand(weights.num_kv_heads, -1))
            self._norms.append(RMSNorm(torch.cat(both), weights.norm_eps))

    def begin(self, positions: Tensor) -> None:
        """Look up the angles of a step's tokens, `[num_tokens]`."""
        self._angles = {
            table: (table.cos[positions][:, None], table.sin[positions][:, None])
            for table in set(self._tables)
        }

    def __call__(self, layer: int, qk: Tensor, q: Tensor, k: Tensor) -> None:
        """Write rotated queries and keys.

        Args:
            layer: from 0.
            qk: `[num_tokens, num_heads + num_kv_heads, head_dim]` of the projection (may be strided).
            q: `[num_tokens, num_heads, head_dim]` to write.
            k: `[num_tokens, num_kv_heads, head_dim]` to write.
        """
        num_tokens, half = qk.shape[0], self._half
        heads, rotated = self._heads[:num_tokens], self._rotated[:num_tokens]
        flipped = self._flipped[:num_tokens]
        if self._norms:
            self._norms[layer](qk, heads)
        else:
            heads.copy_(qk)
        cos, sin = self._angles[self._tables[layer]]
        torch.mul(heads, cos, out=rotated)
        flipped[..., :half] = heads[..., half : 2 * half]
        flipped[..., half : 2 * half] = heads[..., :half]
        # Multiply and add apart: a fused multiply-add would round differently in a vector's tail.
        rotated.add_(flipped.mul_(sin))
        q.copy_(rotated[:, : self._num_heads])
        k.copy_(rotated[:, self._num_heads :])
