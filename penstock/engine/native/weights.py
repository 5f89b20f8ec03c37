"""Weights in the order in which the kernels read them: packed once when a model is loaded.

A `Matrix` is a weight in some precision; `pack` turns one, or a gate and an up, into a `NativeWeight`, which
keeps a copy of its own so that the checkpoint's tensor can be freed. The same packing serves every
instruction set and every number of rows; `kernels/pack.cpp` and `kernels/int4.h` tell the byte order. A
model's weights share a `Packing`: one piece of memory, and one call that fills it.
"""

from collections.abc import Sequence
from ctypes import c_void_p, pointer
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from torch import Tensor

from penstock.engine.native.library import Epilogue, NativeLibrary, PsLinear, PsWeight, Type
from penstock.engine.native.packing import Packing
from penstock.engine.quantized import QuantizedMatrix

PANEL = 32
INT4_GROUPS = (32, 64, 128)
_K_STEP = {Type.F32: 1, Type.BF16: 32, Type.I8: 64}
_TYPES = {
    torch.float32: Type.F32,
    torch.bfloat16: Type.BF16,
    torch.int8: Type.I8,
    torch.uint8: Type.I4,
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Matrix:
    """W [n, k] and what belongs to its rows.

    Raises:
        ValueError: shapes or types that do not belong together, named.
    """

    values: Tensor
    """[n, k]: bfloat16, float32, int8, or uint8 with four-bit values from 0 to 15."""
    bias: Tensor | None = None
    """[n]; kept in float32."""
    scale: Tensor | None = None
    """int8: [n], W = values * scale. Four bits: [n, groups], W = (values - 8) * scale + offset."""
    offset: Tensor | None = None
    """Four bits with zero points: [n, groups], (8 - zero) * scale. None: symmetric."""
    group: int = 0
    """Four bits: inputs that share a scale, one of `INT4_GROUPS`."""
    order: Tensor | None = None
    """Four bits: [k] int32, input `order[i]` meets column i (GPTQ's act-order). None: input i."""

    def __post_init__(self) -> None:
        values = self.values
        if values.dtype not in _TYPES or values.dim() != 2 or values.is_cuda or 0 in values.shape:
            raise ValueError(f"a weight must be [n, k] bfloat16, float32, int8 or uint8, not {show(values)}")
        if self.kind is Type.I4 and self.group not in INT4_GROUPS:
            raise ValueError(f"group must be one of {INT4_GROUPS}, not {self.group}")
        if self.kind in (Type.I8, Type.I4) and self.scale is None:
            raise ValueError(f"{self.kind.name} values need a scale")
        n, k = values.shape
        per_group = (n, -(-k // self.group)) if self.kind is Type.I4 else (n,)
        for name, tensor, shape in (
            ("bias", self.bias, (n,)),
            ("scale", self.scale, per_group),
            ("offset", self.offset, per_group),
            ("order", self.order, (k,)),
        ):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} of {show(values)} must be {list(shape)}, not {show(tensor)}")
        if self.order is not None and (
            self.kind is not Type.I4
            or self.order.dtype != torch.int32
            or not torch.equal(self.order.sort().values, torch.arange(k, dtype=torch.int32))
        ):
            raise ValueError(f"order must be an int32 permutation of {k} inputs of four-bit values")

    @property
    def kind(self) -> Type:
        """How the kernels call the type of the values."""
        return _TYPES[self.values.dtype]


class NativeWeight:
    """W [n, k] ready to compute `x @ W.T`; a fused gate and up gives `act(x @ gate.T) * (x @ up.T)`."""

    def __init__(self, struct: PsWeight, kind: Type, tensors: tuple[Tensor, ...]) -> None:
        self.struct = struct
        self.kind = kind
        self.n, self.k = int(struct.n), int(struct.k)
        self.tensors = tensors
        """The memory that the struct points into."""

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes, which is what a product with one row reads."""
        return sum(tensor.nbytes for tensor in self.tensors)


def multiply(kernels: NativeLibrary, weight: NativeWeight, x: Tensor, out: Tensor) -> None:
    """Write `x W^T + b`, rounded once, to `out`.

    Args:
        kernels: that packed the weight.
        weight: `[n, k]`.
        x: `[m, k]`, bfloat16 or float32 like the weight; either for rounded ones.
        out: `[m, n]`, bfloat16 or float32.
    """
    m = len(x)
    assert x.shape == (m, weight.k), (show(x), weight.k)
    assert out.shape == (m, weight.n), (show(out), weight.n)
    assert x.stride(1) == out.stride(1) == 1, "rows lie in one piece"
    x_type, y_type = _TYPES[x.dtype], _TYPES[out.dtype]
    assert x_type is weight.kind or weight.kind in (Type.I8, Type.I4), (show(x), weight.kind)
    kernels.linear(
        PsLinear(
            weight=pointer(weight.struct), x=x.data_ptr(), y=out.data_ptr(), residual=None, m=m,
            ldx=x.stride(0), ldy=out.stride(0), ldr=0, x_type=int(x_type), y_type=int(y_type),
        )
    )  # fmt: skip


def exact(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """The weight as it is."""
    return Matrix(values=weight, bias=bias)


def int8(kernels: NativeLibrary, weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """Symmetric int8, one scale per output: the row's largest magnitude becomes 127.

    Inputs are rounded to int8 too when they come, with one scale per row (W8A8); sums are exact integers.
    """
    values, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0])
    _round(kernels, Type.I8, weight, values, scale, 0)
    return Matrix(values=values, bias=bias, scale=scale)


def int4(
    kernels: NativeLibrary, weight: Tensor, bias: Tensor | None = None, *, group: int | None = None
) -> Matrix:
    """Symmetric four bits, one scale per output and `group` inputs.

    The value of largest magnitude becomes -8, the one end of the range that has no mirror (as in GGML's
    Q4_0). Without a `group` the largest that divides the inputs is taken. Inputs are rounded to int8 when
    they come, with one scale per row and group.
    """
    n, k = weight.shape
    group = group or max(gcd(k, max(INT4_GROUPS)), min(INT4_GROUPS))
    values, scale = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(n, -(-k // group))
    _round(kernels, Type.I4, weight, values, scale, group)
    return Matrix(values=values, bias=bias, scale=scale, group=group)


def quantized(matrix: QuantizedMatrix, bias: Tensor | None = None) -> Matrix:
    """Integers of a checkpoint as they are: 4 bits in groups of `INT4_GROUPS`, or 8 with a scale per output.

    Inputs are rounded as for `int4` and `int8`.
    """
    if matrix.bits == 8:
        return Matrix(values=matrix.values, bias=bias, scale=matrix.scale.flatten())
    order = None if matrix.order is None else matrix.order.to(torch.int32)
    return Matrix(
        values=matrix.values,
        bias=bias,
        scale=matrix.scale,
        offset=matrix.offset,
        group=matrix.group,
        order=order,
    )


def _round(
    kernels: NativeLibrary, kind: Type, weight: Tensor, values: Tensor, scale: Tensor, group: int
) -> None:
    """Fill in values and scale; Matrix has the same checks, but they must come before an address leaves
    Python.
    """
    source = {torch.float32: Type.F32, torch.bfloat16: Type.BF16}.get(weight.dtype)
    if source is None or weight.dim() != 2 or weight.is_cuda or weight.stride(1) != 1:
        raise ValueError(f"a weight to round must be [n, k] bfloat16 or float32, not {show(weight)}")
    shape = (weight.shape[0], weight.shape[1], weight.stride(0), group)
    kernels.round(kind, (source, weight.data_ptr()), shape, (values.data_ptr(), scale.data_ptr()))


def can_stack(parts: Sequence[Tensor]) -> bool:
    """Whether matrices that are stacked along n can be packed one by one: each but the last fills its
    panels.
    """
    return all(part.shape[0] % PANEL == 0 for part in parts[:-1])


def pack_stacked(packing: Packing, parts: Sequence[Matrix], bias: Tensor | None = None) -> NativeWeight:
    """Pack matrices of one kind that are stacked along n (`can_stack`), each from where it lies.

    Args:
        packing: the model's; the weight can be computed with once it is finished.
        parts: not quantized by the checkpoint, and without biases.
        bias: of all of them.

    Raises:
        ValueError: this machine cannot compute with the type.
    """
    first, scales = parts[0], [part.scale for part in parts if part.scale is not None]
    assert can_stack([part.values for part in parts]), "each begins with a panel"
    assert all((part.kind, part.group) == (first.kind, first.group) for part in parts), "of one kind"
    assert all(part.offset is None and part.order is None for part in parts), (
        "nothing that is not joined here"
    )
    n, k = sum(len(part.values) for part in parts), first.values.shape[1]
    data, k_padded, panels = _panels(packing, first, n)
    at, panel_bytes = data.data_ptr(), data.nbytes // panels
    for part in parts:
        rows = len(part.values)
        packing.copy(part.kind, (part.values, None), (rows, k, k_padded), at)
        at += -(-rows // PANEL) * panel_bytes
    columns = {
        "bias": _columns([bias], panels),
        "scale": _columns([torch.cat(scales) if scales else None], panels),
        "sums": _columns([torch.cat([_row_sums(each.values) for each in parts])], panels)
        if first.kind is Type.I8
        else None,
    }
    return _packed(first, data, (n, k_padded, panels), columns, Epilogue.PLAIN)


def pack(
    kernels: NativeLibrary, matrix: Matrix, up: Matrix | None = None, gate: Epilogue = Epilogue.SILU_MUL
) -> NativeWeight:
    """`pack_into` memory of its own, and done at once."""
    packing = Packing(kernels, chunk_bytes=0)
    packed = pack_into(packing, matrix, up, gate)
    packing.finish()
    return packed


def pack_into(
    packing: Packing, matrix: Matrix, up: Matrix | None = None, gate: Epilogue = Epilogue.SILU_MUL
) -> NativeWeight:
    """Pack a weight, or the gate and up of an MLP as one weight whose product is act(gate) * up, [m, n].

    Args:
        packing: the model's; the weight can be computed with once it is finished.
        matrix: the weight, or the gate.
        up: what passes the gate.
        gate: the gate's activation, where there is an `up`.

    Raises:
        ValueError: this machine cannot compute with the type, or gate and up are not alike.
    """
    kind, both = matrix.kind, (matrix,) if up is None else (matrix, up)
    if up is not None and _likeness(matrix) != _likeness(up):
        raise ValueError(f"gate {show(matrix.values)} and up {show(up.values)} must be alike")
    n, k = matrix.values.shape
    data, k_padded, panels = _panels(packing, matrix, n, width=PANEL // len(both))
    sources = matrix.values, None if up is None else up.values
    packing.copy(kind, sources, (n, k, k_padded), data.data_ptr())
    sums = [_row_sums(each.values) for each in both] if kind is Type.I8 else [None]
    columns = {
        "bias": _columns([each.bias for each in both], panels),
        "scale": _columns([each.scale for each in both], panels),
        "offset": _columns([each.offset for each in both], panels),
        "sums": _columns(sums, panels),
        "order": matrix.order,
    }
    return _packed(matrix, data, (n, k_padded, panels), columns, Epilogue.PLAIN if up is None else gate)


def _panels(packing: Packing, like: Matrix, n: int, *, width: int = PANEL) -> tuple[Tensor, int, int]:
    """Memory for `n` outputs in panels of `width` (of two matrices, half a panel each), the padded number of
    inputs, and how many panels.

    Raises:
        ValueError: this machine cannot compute with the type.
    """
    if not packing.kernels.supports(like.kind):
        raise ValueError(f"{like.kind.name} weights need instructions that {packing.kernels.isa} lacks")
    step, panels = like.group or _K_STEP[like.kind], -(-n // width)
    k_padded = -(-like.values.shape[1] // step) * step
    size = panels * PANEL * k_padded
    data = packing.memory(size // 2 if like.kind is Type.I4 else size, like.values.dtype)
    return data, k_padded, panels


def _packed(
    like: Matrix,
    data: Tensor,
    sizes: tuple[int, int, int],
    columns: dict[str, Tensor | None],
    epilogue: Epilogue,
) -> NativeWeight:
    n, k_padded, panels = sizes
    present = {name: column for name, column in columns.items() if column is not None}
    struct = PsWeight(
        data=data.data_ptr(), n=n, k=like.values.shape[1], k_padded=k_padded, panels=panels,
        type=int(like.kind), epilogue=int(epilogue), group=like.group,
        **{name: c_void_p(column.data_ptr()) for name, column in present.items()},
    )  # fmt: skip
    return NativeWeight(struct, like.kind, (data, *present.values()))


def _row_sums(values: Tensor) -> Tensor:
    """[n] int32. By NumPy, which adds as it reads: torch makes int32 of all values first."""
    return torch.from_numpy(np.add.reduce(values.numpy(), axis=1, dtype=np.int32))  # pyright: ignore[reportUnknownMemberType]


def show(tensor: Tensor) -> str:
    """Shape and type, for messages."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _likeness(matrix: Matrix) -> tuple[object, ...]:
    order = None if matrix.order is None else bytes(matrix.order.numpy())
    return matrix.values.shape, matrix.kind, matrix.group, matrix.bias is None, matrix.offset is None, order


def _columns(parts: Sequence[Tensor | None], panels: int) -> Tensor | None:
    """Per-output values [n] or [n, groups] in panel order, padded with zeros: [panels, groups or 1, 32]."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    dtype = torch.int32 if present[0].dtype == torch.int32 else torch.float32
    width = PANEL // len(present)
    halves: list[Tensor] = []
    for part in present:
        grouped = part.to(dtype).reshape(part.shape[0], -1)
        padded = torch.nn.functional.pad(grouped, (0, 0, 0, panels * width - part.shape[0]))
        halves.append(padded.view(panels, width, -1).transpose(1, 2))
    return torch.cat(halves, dim=2).contiguous()
