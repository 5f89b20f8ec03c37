"""Adapters as a step computes with them.

    Packed            what a decoder has made of an adapter's weights; rows of a step point to it
    native_layout     for the native kernels, which add them to a linear's sums before those are rounded
    TorchPacker       for torch: the decoder's linears become `AdaptedLinear`s

Rows of one step may have different adapters, or none. A row's bits depend on its own adapter alone: not on
those of other rows, nor on how many rows share one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.adapters.files import AdapterReader, AdapterWeights, LoraPart, Packed, Packer
from penstock.engine.adapters.native_layout import NativePacker
from penstock.engine.arrays import Int32Array
from penstock.engine.layers.linear import Calls, Linear, TorchLinear, torch_linear
from penstock.engine.native.library import NativeLibrary
from penstock.models.registry import FAMILIES
from penstock.models.spec import DecoderSpec


@dataclass(slots=True, frozen=True)
class _TorchPart:
    down: TorchLinear
    up: TorchLinear
    rank: int
    num_outputs: int
    first: int
    scale: float


@dataclass(slots=True, frozen=True)
class TorchPacked:
    """An adapter for torch, in float32."""

    layers: tuple[dict[str, tuple[_TorchPart, ...]], ...]
    num_bytes: int


@dataclass(slots=True)
class AdapterRows:
    """Which tokens of the step that runs have which adapter; the decoder's `AdaptedLinear`s look here."""

    segments: Sequence[tuple[TorchPacked, Tensor]] = ()
    """Each adapter with `[num_tokens]` int64 indices of its tokens."""

    def begin(self, adapters: Sequence[Packed | None] | None, num_tokens: Int32Array) -> None:
        """A step begins; `adapters` has one for each row, of `num_tokens` tokens."""
        if adapters is None:
            self.segments = ()
            return
        found: dict[int, tuple[TorchPacked, list[Tensor]]] = {}
        first = 0
        for adapter, count in zip(adapters, num_tokens.tolist(), strict=True):
            if adapter is not None:
                assert isinstance(adapter, TorchPacked)
                found.setdefault(id(adapter), (adapter, []))[1].append(torch.arange(first, first + count))
            first += count
        self.segments = [(adapter, torch.cat(tokens)) for adapter, tokens in found.values()]


class AdaptedLinear:
    """A linear of the torch decoder to which the adapters of a step's rows are added."""

    __slots__ = ("_base", "_fused", "_layer", "_rows")

    def __init__(self, base: Linear, rows: AdapterRows, layer: int, fused: str) -> None:
        self._base, self._rows, self._layer, self._fused = base, rows, layer, fused

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See `Linear`."""
        return self._base.tensors

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `Linear`."""
        self._base(x, out)
        for adapter, tokens in self._rows.segments:
            for part in adapter.layers[self._layer].get(self._fused, ()):
                _add(part, x[tokens].float(), tokens, out)


def _add(part: _TorchPart, x: Tensor, tokens: Tensor, out: Tensor) -> None:
    inner, delta = x.new_empty(len(x), part.rank), x.new_empty(len(x), part.num_outputs)
    part.down(x, inner)
    part.up(inner.mul_(part.scale), delta)
    own = out[:, part.first : part.first + part.num_outputs]
    own[tokens] = (own[tokens].float() + delta).to(out.dtype)


class TorchPacker:
    """Makes float32 layers of an adapter's matrices, whose rows do not depend on the batch either."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max, self._calls = rows_max, Calls(torch.float32)

    def pack(self, weights: AdapterWeights, pause: Callable[[], None]) -> TorchPacked:
        """See `Packer`."""
        num_bytes = 0

        def made(part: LoraPart) -> _TorchPart:
            nonlocal num_bytes
            a, b = part.a.float(), part.b.float().contiguous()
            num_bytes += a.nbytes + b.nbytes
            down, up = (
                torch_linear(each, None, rows_max=self._rows_max, calls=self._calls) for each in (a, b)
            )
            pause()
            return _TorchPart(down, up, a.shape[0], b.shape[0], part.first, part.scale)

        layers = tuple(
            {fused: tuple(made(part) for part in parts) for fused, parts in layer.items()}
            for layer in weights.layers
        )
        return TorchPacked(layers, num_bytes)


def adapter_reader(
    spec: DecoderSpec, dtype: torch.dtype, rows_max: int, native: NativeLibrary | None, *, bytes_max: int
) -> AdapterReader:
    """The reader of adapters, which lays them out for the decoder that computes, with torch if there is no
    `native`.

    Their tensors have transformers' names, whatever the checkpoint's are called.
    """
    packer: Packer = TorchPacker(rows_max) if native is None else NativePacker(spec, native)
    return AdapterReader(spec, FAMILIES[spec.architecture].names, dtype, packer, bytes_max=bytes_max)
