"""The attention contract: what the decoder needs of an implementation, on any device.

It begins at the fused projection of queries, keys and values: norms of the heads, rotation and the write into
the cache are one pass over the same data, and devices fuse them.

One step's batch is any mixture of rows: one that decodes has one new token, a chunk of a prompt has many.
Token `t` of the step belongs to one row; rows lie one after another. For every row the tokens before its
chunk are already in the cache, and those of the chunk are stored by `store` before `attend` reads them.

The differences between models and layers (scale, soft cap, windows: `AttentionSpec`) is given when an
implementation is made. Windows only mask: the KV blocks that leave one are kept.

**Promise**: the bits of a token's output depend on its own query and on the keys and values at and before its
position, and on nothing else: not on the other rows, not on how the prompt was cut into chunks, nor on
whether its prefix was computed now or found in the cache.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.engine.arrays import Int32Array


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """Where one step's rows lie. Arrays are the runner's and may be overwritten after the step.

    Host arrays, since shapes must be known when kernels are launched; an implementation for a device keeps
    its own copies and needs no answer from the device to continue.
    """

    num_computed: Int32Array
    """`[num_rows]` tokens of the row whose keys and values are in the cache already."""
    num_tokens: Int32Array
    """`[num_rows]` new tokens of the row, at least 1."""
    positions: Tensor
    """`[num_tokens]` int64, on the model's device."""
    block_tables: Int32Array
    """`[num_rows, max_blocks]` block ids in order; only those that hold known positions are read."""


class Attention(Protocol):
    """Causal grouped-query attention over the paged KV cache, for all layers of one model.

    An implementation owns its scratch and whatever it prepares in `begin`; the cache and all tensors that
    are passed in stay the caller's. `begin` is called once per step, then `store` and `attend` once per
    layer, in order.
    """

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare a step (indices, masks): everything that its layers share. Valid until the next `begin`."""
        ...

    def store(self, layer: int, qkv: Tensor, q: Tensor) -> None:
        """Normalise (if the model does) and rotate queries and keys; write keys and values into the cache.

        Args:
            layer: from 0.
            qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, contiguous: queries, keys, values.
            q: `[num_tokens, num_heads, head_dim]` to write the finished queries to.
        """
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend from every new token to its row's positions up to its own, back to the layer's window if it
        has one.

        Args:
            layer: from 0.
            q: `[num_tokens, num_heads, head_dim]` from `store`, not yet scaled.
            out: `[num_tokens, num_heads, head_dim]` to write.
        """
        ...
