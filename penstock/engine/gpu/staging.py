"""From the host's arrays to the device without stopping the host: memory that copies run from, one area per
step.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.arrays import as_tensor
from penstock.engine.gpu.platform import Platform

STAGING_WORDS = 128 * 1024
"""int32 words of one area: block ids of 2M tokens of context, or a prompt of 128K tokens."""


class Staging:
    """An area that one step's small arrays are copied from. Filled again only when that step is done."""

    def __init__(self, platform: Platform, words: int = STAGING_WORDS) -> None:
        self._device = platform.device
        self._words = platform.staging((words,), torch.int32)
        self._array: npt.NDArray[np.int32] = self._words.numpy()
        self._used = 0

    def clear(self) -> None:
        """Start again: the step that used the area is done."""
        self._used = 0

    def put(self, values: npt.NDArray[Any]) -> Tensor:
        """The values `[n]` (a type of 4 or 8 bytes) in device memory.

        What does not fit is copied from ordinary memory, for which the host may have to wait.
        """
        start = self._used + self._used % 2  # Eight bytes may not begin at an odd word.
        end = start + values.size * values.itemsize // 4
        if end > len(self._array):
            return as_tensor(values).to(self._device)
        self._array[start:end] = np.ascontiguousarray(values).view(np.int32)
        self._used = end
        words = self._words[start:end].view(as_tensor(values).dtype)
        return words.to(self._device, non_blocking=True)
