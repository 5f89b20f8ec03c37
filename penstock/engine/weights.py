"""The decoder's weights while they are loaded: handed out one by one, whatever file they come from."""

import logging
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from penstock.engine.quantized import Kept, QuantizedMatrix, dense, joined
from penstock.models.names import TensorPart, Weight

CPU = torch.device("cpu")
_log = logging.getLogger(__name__)
Part = Tensor | Kept

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


class Weights:
    """The decoder's weights, each handed out once, when it is read."""

    def __init__(
        self,
        wanted: Sequence[Weight],
        whole: Callable[[Weight], Tensor],
        parts: Callable[[Weight], tuple[Part, ...]],
        num_bytes: Callable[[Weight], int],
        on_progress: OnProgress,
        *,
        keeps: bool = False,
    ) -> None:
        """`keeps`: some are handed out as the checkpoint has them."""
        self._keeps = keeps
        self._wanted = {weight.key: weight for weight in wanted}
        self._whole, self._parts, self._num_bytes, self._on_progress = whole, parts, num_bytes, on_progress
        self._total = sum(map(num_bytes, wanted))
        self.reports_each = True
        """Whether a weight is reported when it is taken. Not for a caller who takes weights as they lie in a
        mapped file and reads them later: that one calls `report`."""
        self.num_bytes_left = self._total
        """Of those that were not taken yet, in memory."""

    def __contains__(self, key: str) -> bool:
        """Whether it can be taken still."""
        return key in self._wanted

    def report(self) -> None:
        """Report how much was taken."""
        self._on_progress(self._total - self.num_bytes_left, self._total)

    def take(self, key: str) -> Tensor:
        """See `WeightSource`.

        Raises:
            CheckpointError: the file cannot be read.
        """
        weight = self._wanted.pop(key)
        tensor = self._whole(weight)
        self._taken(weight)
        return tensor

    def take_parts(self, key: str) -> tuple[Tensor | QuantizedMatrix, ...]:
        """See `WeightSource`: for processors, which keep no FP8.

        Raises:
            CheckpointError: the file cannot be read.
        """
        weight = self._wanted.pop(key)
        tensors = self._parts(weight)
        self._taken(weight)
        return cast("tuple[Tensor | QuantizedMatrix, ...]", tensors)

    def take_linear(self, key: str) -> Part:
        """See `WeightSource`.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not self._keeps:
            return self.take(key)
        weight = self._wanted.pop(key)
        parts = self._parts(weight)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        found = torch.cat(tensors) if len(tensors) == len(parts) else joined(parts)
        if found is None:
            _log.info("%s: its parts are quantized in different ways, so it is made dense", key)
            found = self._whole(weight)
        self._taken(weight)
        return found

    def _taken(self, weight: Weight) -> None:
        self.num_bytes_left -= self._num_bytes(weight)
        if self.reports_each:
            self.report()


def fused(
    weight: Weight, read: Callable[[TensorPart], Part], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A weight's parts, each read into its place."""
    target = torch.empty(weight.shape, dtype=dtype, device=device)
    start = 0
    for part in weight.parts:
        target[start : start + part.shape[0]].copy_(dense(read(part), dtype))
        start += part.shape[0]
    return target
