"""Rotary positions, with the optional norm of query and key heads that goes before them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.layers.frequencies import rotary_angles
from penstock.engine.layers.norm import RMSNorm
from penstock.models.spec import RopeSpec


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
    """What happens to query and key heads before attention, for all layers."""

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
