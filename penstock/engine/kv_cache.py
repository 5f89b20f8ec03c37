"""The KV cache tensor: where keys and values of every block lie.

Which block is whose is decided elsewhere.
"""

from math import prod

import numpy as np
import torch

from penstock.engine.arrays import as_tensor
from penstock.errors import ConfigError
from penstock.models.spec import ROUNDED_EXTRA_BYTES, DecoderSpec
from penstock.types import BLOCK_TOKENS

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_STEPS = 127.0
"""Of a rounded head, from zero to its largest value."""
_LEAST = 1e-30
"""A head whose values are all below is rounded to zeros."""


class KVCache:
    """Physical layout `[num_blocks + 1, num_layers, 2, 16 tokens, num_kv_heads, head_dim]`, keys before
    values.

    A block is one contiguous piece across all layers, so that it can be moved (host tier, another worker) in
    one copy. The last block is never allocated and stays zero: gathers are padded with it.

    Two flat views serve the layers without any per-layer tensors: *pages* are
    `[2 * layers * blocks, 16 * heads * dim]` (keys, or values, of one block in one layer) and *slots* are
    `[16 * pages, heads * dim]` (one token's).

    A rounded cache is int8: each head of a token is `head_dim` integers of at most 127 and, as the
    `ROUNDED_EXTRA_BYTES` after them, the float32 that they are to be multiplied by. So `head_dim` is that
    much more wherever a shape is said above, and a block is still one piece that carries all of its meaning.
    """

    __slots__ = (
        "dtype", "head_dim", "num_blocks", "num_kv_heads", "num_layers", "pages", "rounded", "slots", "tensor"
    )  # fmt: skip

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounded: bool = False,
    ) -> None:
        """`dtype` is that of attention's products, and of the cache unless it is `rounded`.

        Raises:
            ConfigError: heads of this size cannot be rounded.
        """
        if rounded and spec.head_dim % ROUNDED_EXTRA_BYTES:
            raise ConfigError(
                f"engine.kv_dtype is int8, which takes heads of a multiple of {ROUNDED_EXTRA_BYTES} values, "
                f"not {spec.head_dim}"
            )
        self.num_blocks, self.num_layers = num_blocks, spec.num_layers
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        self.dtype, self.rounded = dtype, rounded
        size = spec.head_dim + (ROUNDED_EXTRA_BYTES if rounded else 0)
        stored = torch.int8 if rounded else dtype
        shape = (num_blocks + 1, spec.num_layers, 2, BLOCK_TOKENS, spec.num_kv_heads, size)
        self.tensor = (
            _lazy_zeros(shape, stored)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=stored, device=device)
        )
        self.pages = self.tensor.view(-1, BLOCK_TOKENS * spec.num_kv_heads * size)
        self.slots = self.tensor.view(-1, spec.num_kv_heads * size)

    def scratch(self, *shape: int) -> torch.Tensor:
        """Memory for what is read out of the cache, or goes into it."""
        return torch.empty(shape, dtype=self.dtype, device=self.tensor.device)

    def staging(self, num_tokens: int) -> torch.Tensor | None:
        """Memory for as many tokens' keys or values as a rounded cache has them; None: it is not needed."""
        return self.slots.new_empty(num_tokens, self.slots.shape[1]) if self.rounded else None

    def gather(self, pages: torch.Tensor, out: torch.Tensor, staging: torch.Tensor | None) -> None:
        """Read pages `[count]` into `out`, `count * 16` tokens of all heads, contiguous."""
        if staging is None:
            torch.index_select(self.pages, 0, pages, out=out.view(len(pages), -1))
            return
        kept = staging[: len(pages) * BLOCK_TOKENS]
        torch.index_select(self.pages, 0, pages, out=kept.view(len(pages), -1))
        by_head = kept.view(-1, self.num_kv_heads, self.head_dim + ROUNDED_EXTRA_BYTES)
        scales = by_head[..., self.head_dim :].view(torch.float32)
        torch.mul(by_head[..., : self.head_dim], scales, out=out.view(-1, self.num_kv_heads, self.head_dim))

    def store(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write keys or values `[count, heads, dim]` at slots `[count]`."""
        if self.rounded:
            kv = round_heads(kv)
        self.slots.index_copy_(0, slots, kv.flatten(1))

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


def round_heads(kv: torch.Tensor) -> torch.Tensor:
    """Keys or values `[..., dim]` as a rounded cache has them: int8 `[..., dim + ROUNDED_EXTRA_BYTES]`."""
    exact = kv.float()
    largest = exact.abs().amax(-1, keepdim=True)
    # Divided as the native kernels do: a number over a tensor is a reciprocal and a product in torch.
    inverse = torch.where(largest > _LEAST, torch.full_like(largest, _STEPS) / largest, 0.0)
    return torch.cat(((exact * inverse).round().to(torch.int8), (largest / _STEPS).view(torch.int8)), -1)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the system hands out page by page when they are first touched.

    Zeroing gigabytes at the start would cost seconds and hold memory that few requests ever use. Starts on a
    huge page.
    """
    num_bytes = prod(shape) * dtype.itemsize
    memory = as_tensor(np.zeros(num_bytes + HUGE_PAGE_BYTES, np.uint8))
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)
