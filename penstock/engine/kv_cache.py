"""The KV cache tensor: where keys and values of every block lie.

Which block is whose is decided elsewhere.
"""

from math import prod

import numpy as np
import torch

from penstock.engine.arrays import as_tensor
from penstock.models.spec import DecoderSpec
from penstock.types import BLOCK_TOKENS

HUGE_PAGE_BYTES = 2 * 1024 * 1024


class KVCache:
    """Physical layout `[num_blocks + 1, num_layers, 2, 16 tokens, num_kv_heads, head_dim]`, keys before
    values.

    A block is one contiguous piece across all layers, so that it can be moved (host tier, another worker) in
    one copy. The last block is never allocated and stays zero: gathers are padded with it.

    Two flat views serve the layers without any per-layer tensors: *pages* are
    `[2 * layers * blocks, 16 * heads * dim]` (keys, or values, of one block in one layer) and *slots* are
    `[16 * pages, heads * dim]` (one token's).
    """

    __slots__ = ("head_dim", "num_blocks", "num_kv_heads", "num_layers", "pages", "slots", "tensor")

    def __init__(self, spec: DecoderSpec, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks, self.num_layers = num_blocks, spec.num_layers
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        shape = (num_blocks + 1, spec.num_layers, 2, BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        self.tensor = (
            _lazy_zeros(shape, dtype)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.pages = self.tensor.view(-1, BLOCK_TOKENS * spec.kv_size)
        self.slots = self.tensor.view(-1, spec.kv_size)

    @property
    def zero_block(self) -> int:
        """The block that pads gathers."""
        return self.num_blocks

    @property
    def pages_per_block(self) -> int:
        """Distance in `pages` from one block to the next."""
        return self.num_layers * 2

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that change hands: a masked position is still multiplied, and 0 x NaN of an earlier
        owner is NaN.
        """
        for block in blocks:
            self.tensor[block].zero_()


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system hands out page by page when they are first touched.

    Zeroing gigabytes at the start would cost seconds and hold memory that few requests ever use. Starts on a
    huge page.
    """
    num_bytes = prod(shape) * dtype.itemsize
    memory = as_tensor(np.zeros(num_bytes + HUGE_PAGE_BYTES, np.uint8))
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)
