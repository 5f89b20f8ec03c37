"""Attention as the formula says it, one row at a time in float32: the twin that every fast one is tested
against.
"""

import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.rowwise import RotaryWeights
from penstock.models.spec import AttentionSpec
from penstock.types import BLOCK_TOKENS


class ReferenceAttention:
    """`softmax(q k^T / sqrt(d) + causal) v` (Vaswani et al. 2017, arXiv 1706.03762). See `Attention`."""

    def __init__(
        self,
        cache: KVCache,
        rotary: RotaryWeights,
        spec: AttentionSpec = AttentionSpec(),  # noqa: B008  (frozen)
    ) -> None:
        self._cache, self._weights, self._spec = cache, rotary, spec
        self._positions = torch.empty(0)
        self._rows: list[tuple[int, int, Tensor]] = []

    def begin(self, batch: AttentionBatch) -> None:
        """See `Attention`."""
        self._positions = batch.positions
        self._rows = [
            (int(computed), int(tokens), as_tensor(table).long())
            for computed, tokens, table in zip(
                batch.num_computed, batch.num_tokens, batch.block_tables, strict=True
            )
        ]

    def store(self, layer: int, qkv: Tensor, q: Tensor) -> None:
        """See `Attention`."""
        num_heads, num_kv_heads = self._weights.num_heads, self._weights.num_kv_heads
        queries, keys = qkv[:, :num_heads].float(), qkv[:, num_heads : num_heads + num_kv_heads].float()
        values = qkv[:, num_heads + num_kv_heads :].float()
        if self._weights.head_norms:
            q_norm, k_norm = self._weights.head_norms[layer]
            queries, keys = self._normed(queries, q_norm), self._normed(keys, k_norm)
        q.copy_(self._rotated(queries, layer))
        kv = torch.stack((self._rotated(keys, layer), values), dim=1).to(qkv.dtype)
        start = 0
        for computed, tokens, table in self._rows:
            positions = torch.arange(computed, computed + tokens)
            blocks, offsets = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
            self._cache.tensor[blocks, layer, :, offsets] = kv[start : start + tokens]
            start += tokens

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._weights.norm_eps) * weight.float()

    def _rotated(self, x: Tensor, layer: int) -> Tensor:
        table = self._weights.tables[layer]
        cos, sin = (part[self._positions][:, None] for part in (table.cos, table.sin))
        turning, still = x[..., : table.rotary_dim], x[..., table.rotary_dim :]
        flipped = torch.cat((turning.roll(table.rotary_dim // 2, dims=-1), torch.zeros_like(still)), dim=-1)
        return x * cos + flipped * sin

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """See `Attention`."""
        start = 0
        for computed, tokens, table in self._rows:
            end = computed + tokens
            blocks = table[: -(-end // BLOCK_TOKENS)]
            kv = self._cache.tensor[blocks, layer].transpose(0, 1).flatten(1, 2)[:, :end].float()
            group = q.shape[1] // kv.shape[2]
            k, v = kv.repeat_interleave(group, dim=2).permute(0, 2, 1, 3)
            scale, cap = self._spec.scale or q.shape[2] ** -0.5, self._spec.softcap
            scores = q[start : start + tokens].float().transpose(0, 1) @ k.transpose(1, 2) * scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            distance = torch.arange(computed, end)[:, None] - torch.arange(end)
            seen = (distance >= 0) & (distance < (self._spec.window(layer) or end))
            scores = scores.masked_fill(~seen, -torch.inf)
            out[start : start + tokens] = (scores.softmax(-1) @ v).transpose(0, 1)
            start += tokens
