"""Are the weights in memory still those that were loaded? Sums of all of them, in small slices, in idle time.

The first pass notes a sum for each slice, every later one compares. A slice is read in a fraction of a
millisecond, and only while no request is there: a step never waits for more. A pass takes one core for a few
per cent of its time, and passes are far apart. Bits that probes do not touch (a rare token's embedding, an
expert that is seldom chosen) are found here.
"""

import logging
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.clock import NS_PER_MS, NS_PER_S, Clock
from penstock.engine.attention.base import Attention
from penstock.engine.kernels import Activation, Kernels, Norm
from penstock.engine.kv_cache import KVCache
from penstock.engine.layers.linear import Linear
from penstock.engine.layers.rowwise import RotaryWeights
from penstock.engine.quantized import Kept
from penstock.errors import WeightsDamaged

FIRST_NS = 10 * NS_PER_S
"""After loading."""
SLICE_BYTES, PAUSE_NS = 256 * 1024, 5 * NS_PER_MS
"""So 50 MB/s on a processor;"""
DEVICE_SLICE_BYTES = 16 * 1024 * 1024
"""a device reads 3 GB/s meanwhile."""
REST_NS = 600 * NS_PER_S
"""Between two passes."""
_log = logging.getLogger(__name__)
_Slice = tuple[str, Callable[[], int]]


class ListedKernels:
    """Kernels that list the tensors which their layers compute with: a copy in another order, where one was
    made, and not what it was made from.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.tensors: list[Tensor] = []

    def linear(self, weight: Tensor | Kept, bias: Tensor | None, *, rows_max: int) -> Linear:
        """See `Kernels`."""
        made = self._kernels.linear(weight, bias, rows_max=rows_max)
        self.tensors += made.tensors
        return made

    def linears(self, weight: Tensor, *, count: int, rows_max: int) -> Sequence[Linear]:
        """See `Kernels`."""
        made = self._kernels.linears(weight, count=count, rows_max=rows_max)
        self.tensors += [tensor for each in made for tensor in each.tensors]
        return made

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """See `Kernels`."""
        self.tensors.append(weight)
        return self._kernels.norm(weight, eps)

    def activation(self) -> Activation:
        """See `Kernels`."""
        return self._kernels.activation()

    def attention(self, cache: KVCache, rotary: RotaryWeights) -> Attention:
        """See `Kernels`."""
        return self._kernels.attention(cache, rotary)


class WeightCheck:
    """Call `step` whenever there is nothing else to do, and again at `due_ns`."""

    def __init__(self, weights: Sequence[Tensor], clock: Clock) -> None:
        self._clock = clock
        # A tied head is the embedding's memory: once is enough.
        once = {(each.data_ptr(), each.numel()): each for each in weights}.values()
        self._slices: list[_Slice] = [each for i, weight in enumerate(once) for each in _slices(i, weight)]
        self._sums: list[int] = []
        self._next = 0
        self.num_passes = 0
        """Whole ones so far."""
        self.due_ns: int | None = clock.now_ns() + FIRST_NS if self._slices else None
        """When there is something to do; None: never."""

    def step(self) -> None:
        """Read one slice, if it is time.

        Raises:
            WeightsDamaged: it is not what it was.
        """
        if self.due_ns is None or (now_ns := self._clock.now_ns()) < self.due_ns:
            return
        where, read = self._slices[self._next]
        found = read()
        if not self.num_passes:
            self._sums.append(found)
        elif found != self._sums[self._next]:
            raise WeightsDamaged(f"the weights in memory have changed ({where}): they must be loaded again")
        self._next += 1
        self.due_ns = now_ns + PAUSE_NS
        if self._next == len(self._slices):
            self._next, self.due_ns = 0, now_ns + REST_NS
            self.num_passes += 1
            _log.debug("the weights were read %d times", self.num_passes)


def _slices(number: int, weight: Tensor) -> list[_Slice]:
    """Of one tensor; what cannot be looked at as bytes is left out."""
    flat = _as_bytes(weight)
    if flat is None:
        return []
    size = DEVICE_SLICE_BYTES if flat.is_cuda else SLICE_BYTES
    read = _device_sum if flat.is_cuda else _checksum
    return [
        (f"tensor {number}, byte {start}", partial(read, flat[start : start + size]))
        for start in range(0, flat.numel(), size)
    ]


def _as_bytes(weight: Tensor) -> Tensor | None:
    """The same memory; None if it has gaps."""
    if weight.dim() == 2 and not weight.is_contiguous():
        weight = weight.t()  # A view of a weight that lies the other way round.
    if not weight.is_contiguous() or not weight.numel():
        return None
    return weight.detach().view(-1).view(torch.uint8)


def _checksum(part: Tensor) -> int:
    return zlib.crc32(part.numpy().data)


def _device_sum(part: Tensor) -> int:
    return int(part.sum(dtype=torch.int64).item())
