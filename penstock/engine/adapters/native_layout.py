"""An adapter as the native kernels read it (`kernels/adapter_rows.h`).

The matrices of all linears lie in one buffer, for which huge pages are asked: hundreds of small ones would
cost a walk of the page tables for every few rows.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.adapters.files import AdapterWeights, LoraPart
from penstock.engine.native.library import AdapterLayer, AdapterLinear, AdapterPart, NativeLibrary
from penstock.models.adapters import FUSED
from penstock.models.spec import DecoderSpec

GROUP = 16
"""Outputs, and ranks, that the kernels take together."""
_ALIGNMENT = 64
_HUGE = 2 << 20


@dataclass(slots=True, frozen=True)
class NativePacked:
    """An adapter for the native kernels."""

    layers: "ctypes.Array[AdapterLayer]"
    num_bytes: int
    kept: tuple[object, ...] = field(repr=False)
    """The memory that the structs point into."""

    @property
    def address(self) -> int:
        """Of the layers, for `PsStep.adapters`."""
        return ctypes.addressof(self.layers)


class _Buffer:
    """Memory that is filled from its start, which is that of a huge page where there is one to fill."""

    def __init__(self, num_bytes: int, kernels: NativeLibrary) -> None:
        spare = _HUGE if num_bytes >= _HUGE else 0
        whole = torch.empty(num_bytes + spare, dtype=torch.uint8)  # Untouched pages take no memory.
        first = -whole.data_ptr() % _HUGE if spare else 0
        self.memory = whole[first : first + num_bytes]
        kernels.advise_huge(self.memory.data_ptr(), num_bytes)
        self._used = 0

    def take(self, values: Tensor) -> int:
        """The address of a copy."""
        at, self._used = self._used, self._used + _aligned(values.nbytes)
        self.memory[at : at + values.nbytes].view(values.dtype).copy_(values.reshape(-1))
        return self.memory.data_ptr() + at


class NativePacker:
    """Lays an adapter's matrices out."""

    def __init__(self, spec: DecoderSpec, kernels: NativeLibrary) -> None:
        self._inner, self._kernels = spec.intermediate_size, kernels

    def pack(self, weights: AdapterWeights, pause: Callable[[], None]) -> NativePacked:
        """See `Packer`."""
        linears = [layer.get(fused, ()) for layer in weights.layers for fused in FUSED]
        buffer = _Buffer(sum(map(_num_bytes, linears)), self._kernels)
        kept: list[object] = [buffer.memory]

        def linear(fused: str, parts: Sequence[LoraPart]) -> AdapterLinear:
            if not parts:
                return AdapterLinear()
            structs = (AdapterPart * len(parts))()
            kept.append(structs)
            a, scale = _in_panels(parts)
            panels, k = a.shape[0], parts[0].a.shape[1]
            places = buffer.take(a), buffer.take(scale)
            begin = 0
            for i, part in enumerate(parts):
                b = _in_groups(part.b)
                first, stride = self._place(fused, part)
                rank = _even(part)
                structs[i] = AdapterPart(buffer.take(b), begin, rank, b.shape[0], first, stride)
                begin += rank
            pause()
            return AdapterLinear(*places, structs, len(parts), panels, k)

        layers = (AdapterLayer * len(weights.layers))(
            *(
                AdapterLayer(*(linear(name, layer.get(name, ())) for name in FUSED))
                for layer in weights.layers
            )
        )
        return NativePacked(layers, buffer.memory.nbytes, tuple(kept))

    def _place(self, fused: str, part: LoraPart) -> tuple[int, int]:
        """The first of a part's groups among those of the linear's sums, and from one to the next: gates and
        ups take turns.
        """
        if fused == "gate_up":
            return (0 if part.first < self._inner else 1), 2
        assert part.first % GROUP == 0, f"heads are whole groups: {part.first}"
        return part.first // GROUP, 1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pairs(dtype: torch.dtype) -> int:
    """Terms of a sum that the kernels multiply together."""
    return 2 if dtype is torch.bfloat16 else 1


def _even(part: LoraPart) -> int:
    """The part's rank, filled up to whole pairs."""
    size = _pairs(part.a.dtype)
    return -(-part.a.shape[0] // size) * size


def _num_bytes(parts: Sequence[LoraPart]) -> int:
    """That a linear takes of the buffer."""
    if not parts:
        return 0
    size, element = _pairs(parts[0].a.dtype), parts[0].a.element_size()
    panels = -(-sum(map(_even, parts)) // GROUP)
    units = -(-parts[0].a.shape[1] // size)
    groups = (-(-part.b.shape[0] // GROUP) * GROUP * _even(part) * element for part in parts)
    a_bytes = panels * GROUP * units * size * element
    return _aligned(a_bytes) + _aligned(panels * GROUP * 4) + sum(map(_aligned, groups))


def _in_panels(parts: Sequence[LoraPart]) -> tuple[Tensor, Tensor]:
    """The ranks of all parts in panels of 16, `[panels, inputs / size, 16, size]`, and the scale of each."""
    size, inputs = _pairs(parts[0].a.dtype), parts[0].a.shape[1]
    panels, units = -(-sum(map(_even, parts)) // GROUP), -(-inputs // size)
    a = parts[0].a.new_zeros(panels * GROUP, units * size)
    scale = torch.zeros(panels * GROUP)
    begin = 0
    for part in parts:
        a[begin : begin + len(part.a), :inputs] = part.a
        scale[begin : begin + len(part.a)] = part.scale
        begin += _even(part)
    return a.view(panels, GROUP, units, size).transpose(1, 2).contiguous(), scale


def _in_groups(b: Tensor) -> Tensor:
    """`[out, rank]` as `[groups, rank / size, 16, size]`."""
    (out, rank), size = b.shape, _pairs(b.dtype)
    groups, units = -(-out // GROUP), -(-rank // size)
    padded = b.new_zeros(groups * GROUP, units * size)
    padded[:out, :rank] = b
    return padded.view(groups, GROUP, units, size).transpose(1, 2).contiguous()
