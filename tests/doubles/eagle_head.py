"""A head in the manner of EAGLE (Li et al. 2024, arXiv 2401.15077), read from its published layout.

    state of a token, embedding of the next one -> fc -> a decoder layer without its first norm
                                                -> the next token's state -> the target's output head

In torch, without KV of its own: it computes a row's pairs again for every guess, which is enough for texts of
tests. Of rows whose prefix came out of the cache it knows no states, and guesses nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from penstock.engine.arrays import Int32Array, Int64Array
from penstock.engine.inputs import RowTables
from penstock.schedule.plan import StepPlan

HEADS, KV_HEADS, HEAD_DIM, ROPE_BASE, EPS = 6, 2, 16, 10_000.0, 1e-6


class Layer(nn.Module):
    """The weights, under the names of published checkpoints."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        attention = nn.Module()
        for name, inputs, outputs in (
            ("q_proj", hidden, HEADS * HEAD_DIM),
            ("k_proj", hidden, KV_HEADS * HEAD_DIM),
            ("v_proj", hidden, KV_HEADS * HEAD_DIM),
            ("o_proj", HEADS * HEAD_DIM, hidden),
        ):
            attention.add_module(name, nn.Linear(inputs, outputs, bias=False))
        mlp = nn.Module()
        for name, inputs, outputs in (
            ("gate_proj", hidden, inner),
            ("up_proj", hidden, inner),
            ("down_proj", inner, hidden),
        ):
            mlp.add_module(name, nn.Linear(inputs, outputs, bias=False))
        one = nn.Module()
        one.self_attn, one.mlp = attention, mlp
        one.post_attention_layernorm = nn.RMSNorm(hidden, eps=EPS)
        self.layers = nn.ModuleList([one])

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """`[num_pairs, hidden]` both: the states that follow."""
        layer, x = self.layers[0], self.fc(torch.cat([embeddings, states], -1))
        attention, mlp, count = layer.self_attn, layer.mlp, len(x)
        q, k, v = (
            project(x).view(count, -1, HEAD_DIM).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        mixed = scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(mixed.transpose(0, 1).reshape(count, -1))
        normed = layer.post_attention_layernorm(x)
        return x + mlp.down_proj(silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def _turned(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[1])[:, None] * ROPE_BASE ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class EagleHead:
    """A `ReadsStates`."""

    def __init__(
        self, checkpoint: Path, embedding: Tensor, head: Tensor, *, step_tokens: int, dtype: torch.dtype
    ) -> None:
        """`embedding` and `head` are the target's, `[vocab, hidden]`."""
        weights = load_file(checkpoint / "model.safetensors")
        inner = weights["layers.0.mlp.gate_proj.weight"].shape[0]
        self._layer = Layer(embedding.shape[1], inner)
        self._layer.load_state_dict({name: each for name, each in weights.items() if "embed" not in name})
        self._embedding, self._head = embedding.float(), head.float()
        self.states = torch.zeros(step_tokens, embedding.shape[1], dtype=dtype)
        self.of_rows: dict[int, list[Tensor]] = {}
        """Each row's states, position by position."""

    def begin(self, plan: StepPlan, fresh_blocks: Sequence[int]) -> None:
        """See `Proposer`."""
        for row in (*plan.freed_rows, *(new.row for new in plan.new_rows)):
            self.of_rows.pop(row, None)

    def spent(self) -> None:
        """See `Proposer`."""

    def idle(self) -> bool:
        """See `Proposer`."""
        return False

    def read(self, rows: Int64Array, firsts: Int32Array, counts: Int32Array, tables: RowTables) -> None:
        """See `ReadsStates`."""
        at = 0
        for row, first, count in zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            held = self.of_rows.setdefault(row, [])
            if first <= len(held):
                held[first:] = self.states[at : at + count].float().clone()
            at += count

    def propose(
        self, rows: Int64Array, known: Int64Array, limit: Int64Array, tables: RowTables
    ) -> Int64Array:
        """See `Proposer`: the likeliest tokens."""
        found = np.zeros(len(rows), np.int64)
        for i, (row, count, wanted) in enumerate(
            zip(rows.tolist(), known.tolist(), limit.tolist(), strict=True)
        ):
            held = self.of_rows.get(row, [])
            if len(held) < count - 1 or count < 2:
                continue
            states = torch.stack(held[: count - 1])
            for place in range(count, count + wanted):
                tokens = torch.from_numpy(tables.token_ids[row, 1:place].astype(np.int64))
                after = self._layer(states, self._embedding[tokens])
                tables.token_ids[row, place] = int((self._head @ after[-1]).argmax())
                states = torch.cat([states, after[-1:]])
            found[i] = wanted
        return found
