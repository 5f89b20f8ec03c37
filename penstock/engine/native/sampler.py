"""Drawing tokens with the native kernels: the same draws as `engine/sampler.py`, without sorting a
vocabulary.

A histogram of how far logits lie below the largest finds the interval in which top-k or top-p cuts, and only
the tokens in that one are ranked. Scores differ from the torch twin's by rounding of the logarithm, so a draw
differs only where two tokens' scores are equal to the last bits.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.engine.native.library import NativeLibrary, PsSample
from penstock.engine.sampler import GREEDY_BELOW, SampleRows, key_pairs, min_p_bounds


class NativeSampler:
    """See `TokenSampler`. Rows are drawn on the kernels' threads, each by itself."""

    def __init__(self, kernels: NativeLibrary) -> None:
        self._kernels = kernels

    def draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """See `TokenSampler`; rows of logits have unit inner stride."""
        num_rows, vocab_size = logits.shape
        assert logits.dtype is torch.float32
        assert logits.stride(1) == 1
        keys = bounds = None
        if (rows.temperature >= GREEDY_BELOW).any():  # Else neither is looked at.
            keys, bounds = key_pairs(rows.seed, rows.position), min_p_bounds(rows)
        token_ids, masks = np.empty(num_rows, np.int64), rows.masks
        self._kernels.sample(
            PsSample(
                logits=logits.data_ptr(), temperature=rows.temperature.ctypes.data,
                top_k=rows.top_k.ctypes.data, top_p=rows.top_p.ctypes.data,
                min_p_bound=None if bounds is None else bounds.ctypes.data,
                keys=None if keys is None else keys.ctypes.data,
                masks=None if masks is None else masks.bits.ctypes.data,
                mask_rows=None if masks is None else masks.of_row.ctypes.data,
                token_ids=token_ids.ctypes.data, rows=num_rows, vocab=vocab_size,
                ld_logits=logits.stride(0), ld_masks=0 if masks is None else masks.bits.shape[1],
                greedy_below=GREEDY_BELOW,
            )
        )  # fmt: skip
        return as_tensor(token_ids)
