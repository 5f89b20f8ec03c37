"""FlashInfer as an option: its kernels in place of our own for attention, behind the same contract.

Worth trying for long prompts, where attention is a large part of the work (13 % at 8K tokens of an 8B model, 71 % at
128K). **Neither run on a GPU nor measured here**: the indices that it is given are tested with a stand-in; that its
kernels take our cache's strided layer views (one block stride, keys and values alike) is read from its source, for 0.6.6.

It plans every step on the host, so steps that use it are not captured in graphs, and its splits depend on the batch:
the promise that a row's bits are its own does not hold.
"""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention.base import AttentionBatch
from penstock.engine.gpu.attention import DeviceAttention
from penstock.engine.kv_cache import KVCache
from penstock.engine.models.spec import AttentionSpec
from penstock.errors import ConfigError
from penstock.types import BLOCK_TOKENS

_WORKSPACE_BYTES = 128 * 1024 * 1024


class FlashInferAttention:
    """See `Attention`. Rotation and the write into the cache stay ours: `ours` does them."""

    def __init__(self, ours: DeviceAttention, cache: KVCache, spec: AttentionSpec, *, num_heads: int) -> None:
        """`ours` is made for the same cache and layers.

        Raises:
            ConfigError: FlashInfer is not installed, or cannot be imported.
        """
        library = _library()
        self._ours, self._cache, self._spec, self._num_heads = ours, cache, spec, num_heads
        device = cache.tensor.device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        windows = {spec.window(layer) for layer in range(cache.num_layers)}
        # A plan holds one window: one wrapper for each that the model's layers have. They run one after another.
        self._wrappers: dict[int, Any] = {
            window: library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            for window in sorted(windows)
        }

    def begin(self, batch: AttentionBatch) -> None:
        """See `Attention`."""
        self._ours.begin(batch)
        lengths = batch.num_computed + batch.num_tokens
        num_blocks = -(-lengths // BLOCK_TOKENS)
        held: list[int] = num_blocks.tolist()
        blocks = np.concatenate([table[:n] for table, n in zip(batch.block_tables, held, strict=True)])
        starts, block_starts = (
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
            for counts in (batch.num_tokens, num_blocks)
        )
        last = (lengths - 1) % BLOCK_TOKENS + 1
        arrays = (starts, block_starts, blocks, last.astype(np.int32))
        indices = [torch.as_tensor(array).to(self._cache.tensor.device) for array in arrays]
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                *indices,
                self._num_heads,
                self._cache.num_kv_heads,
                self._cache.head_dim,
                BLOCK_TOKENS,
                causal=True,
                sm_scale=self._cache.head_dim**-0.5 if self._spec.scale is None else self._spec.scale,
                logits_soft_cap=self._spec.softcap or None,
                window_left=window - 1 if window else -1,
                q_data_type=self._cache.tensor.dtype,
                kv_data_type=self._cache.tensor.dtype,
            )

    def store(self, layer: int, qkv: Tensor, q: Tensor) -> None:
        """See `Attention`."""
        self._ours.store(layer, qkv, q)

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """See `Attention`."""
        keys, values = self._cache.tensor[:, layer, 0], self._cache.tensor[:, layer, 1]
        self._wrappers[self._spec.window(layer)].run(q, (keys, values), out=out)


def _library() -> Any:  # noqa: ANN401  (it has no stubs)
    """The module.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(f"attention by FlashInfer needs the package flashinfer-python: {error}") from error
