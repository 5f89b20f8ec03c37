"""Quantized layers of published checkpoints, read into one canonical form.

    W[n, k] = (values - centre) * scale[n, k / group] + offset[n, k / group]

GPTQ, AWQ and compressed-tensors pack the same numbers in other orders; with act-order (GPTQ's `g_idx`)
the columns are sorted by group once, here, and the kernels read their inputs in that order. FP8 has no
integers to keep: a device that multiplies it has the values and their scales (`Float8Matrix`); elsewhere
their product is rounded to the model's dtype, which has more digits.

A layer's own tensors say how it is stored, so that a checkpoint may quantize each layer otherwise, or not at
all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.names import TensorPart
from penstock.models.quantization import Quantization

WEIGHT = ".weight"
KEPT_GROUPS = (128, 64, 32)
"""Groups that the kernels compute four bits with; a larger one is cut into the largest that divides it."""
IGNORED = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".activation_scale",
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".activation_scale_ub",
)  # fmt: skip
"""Scales of activations and of a quantized KV cache: our kernels round inputs as they come, and keep the
cache in the model's dtype."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the i-th of eight outputs lies in a word, counted in nibbles from the low end."""
_FLOATS = ("F16", "BF16", "F32")

Headers = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type of every tensor of the checkpoint, by name."""
Read = Callable[[str], Tensor]


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """W [n, k] as integers with scales."""

    values: Tensor
    """[n, k]: uint8 from 0 to 15 (four bits, centre 8) or int8 (centre 0)."""
    scale: Tensor
    """[n, groups] float32."""
    offset: Tensor | None = None
    """[n, groups] float32; None: symmetric."""
    order: Tensor | None = None
    """[k] int64: column i multiplies input `order[i]`; None: input i."""

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scale.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[n, k], computed in float32 and rounded once."""
        centre = 8 if self.bits == 4 else 0
        n, k = self.shape
        grouped = (self.values.float() - centre).view(n, -1, self.group)
        grouped *= self.scale[:, :, None]
        if self.offset is not None:
            grouped += self.offset[:, :, None]
        flat = grouped.view(n, k)
        if self.order is not None:
            flat = torch.empty_like(flat).index_copy_(1, self.order, flat)
        return flat.to(dtype)

    def rows(self, first: int, last: int) -> "QuantizedMatrix":
        """Outputs from `first` up to `last`."""
        offset = None if self.offset is None else self.offset[first:last]
        return replace(self, values=self.values[first:last], scale=self.scale[first:last], offset=offset)

    def with_group(self, group: int) -> "QuantizedMatrix":
        """The same numbers with a scale for every `group` inputs; it must divide the group that there is."""
        times = self.group // group
        if times == 1:
            return self
        offset = None if self.offset is None else self.offset.repeat_interleave(times, 1)
        return replace(self, scale=self.scale.repeat_interleave(times, 1), offset=offset)

    def is_like(self, other: "QuantizedMatrix") -> bool:
        """Whether both can be one matrix, or the two sides of one gate."""
        orders = (self.order, other.order)
        same = all(order is None for order in orders) or (
            orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
        )
        return (
            same
            and self.values.dtype == other.values.dtype
            and self.scale.shape[1] == other.scale.shape[1]
            and self.shape[1] == other.shape[1]
            and (self.offset is None) == (other.offset is None)
        )


FLOAT8_BLOCK = 128
"""Outputs, and inputs, that share a scale where FP8 has one for each block."""


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class Float8Matrix:
    """W [n, k] as FP8 (e4m3) with scales."""

    values: Tensor
    """[n, k] float8_e4m3fn."""
    scale: Tensor
    """float32 [n, 1], or [n / 128, k / 128] rounded up: one for each block."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def in_blocks(self) -> bool:
        """Whether a scale is a block's."""
        return self.scale.shape != (self.values.shape[0], 1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[n, k], computed in float32 and rounded once."""
        scale = self.scale
        if self.in_blocks:
            n, k = self.shape
            scale = scale.repeat_interleave(FLOAT8_BLOCK, 0)[:n].repeat_interleave(FLOAT8_BLOCK, 1)[:, :k]
        return (self.values.float() * scale).to(dtype)


Kept = QuantizedMatrix | Float8Matrix
"""A weight that is computed with as the checkpoint has it."""


def dense(part: Tensor | Kept, dtype: torch.dtype) -> Tensor:
    """A part of a weight as it multiplies."""
    return part if isinstance(part, Tensor) else part.dense(dtype)


def joined(parts: Sequence[Tensor | Kept]) -> Kept | None:
    """One weight of its parts, in order; None if they cannot be computed with as one."""
    integers = [part for part in parts if isinstance(part, QuantizedMatrix)]
    floats = [part for part in parts if isinstance(part, Float8Matrix)]
    if len(integers) == len(parts):
        if any(part.offset is not None for part in integers):
            integers = [
                replace(part, offset=torch.zeros_like(part.scale)) if part.offset is None else part
                for part in integers
            ]
        return stacked(integers) if all(part.is_like(integers[0]) for part in integers) else None
    if len(floats) == len(parts):
        in_blocks = floats[0].in_blocks
        whole = not in_blocks or all(part.shape[0] % FLOAT8_BLOCK == 0 for part in floats[:-1])
        if whole and all(part.in_blocks == in_blocks for part in floats):
            # Catenated as bytes: not every device's library moves FP8.
            values = torch.cat([part.values.view(torch.uint8) for part in floats])
            return Float8Matrix(
                values=values.view(torch.float8_e4m3fn), scale=torch.cat([part.scale for part in floats])
            )
    return None


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix of parts that are alike, in order."""
    offsets = [part.offset for part in parts if part.offset is not None]
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        offset=torch.cat(offsets) if offsets else None,
    )


@dataclass(slots=True, frozen=True)
class Needed:
    """A tensor that a stored layer has."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Any of these."""
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(slots=True, frozen=True)
class StoredMatrix:
    """Where and how a quantized layer lies in the checkpoint. Made from headers alone."""

    part: TensorPart
    layout: Literal["gptq", "awq", "packed", "int8", "float8"]
    quantization: Quantization
    bits: int
    group: int
    """Inputs that share a scale."""
    has_zeros: bool
    num_groups: int
    scale_name: str = ""
    """Of the tensor with the scales, where layouts have two names for it."""

    @property
    def base(self) -> str:
        """The layer's name."""
        return self.part.name.removesuffix(WEIGHT)

    def kept_group(self, kept_bits: frozenset[int]) -> int | None:
        """Inputs per scale in memory if kernels compute with these integers, else None: it is made dense."""
        if self.layout == "float8" or self.bits not in kept_bits:
            return None
        if self.bits == 8:
            return self.group if self.num_groups == 1 and not self.has_zeros else None
        return next((group for group in KEPT_GROUPS if self.group % group == 0), None)

    def float8(self, read: Read) -> Float8Matrix | None:
        """The layer as FP8; None if it is something else, or has scales for other parts of it."""
        if self.layout != "float8":
            return None
        n, k = self.part.shape
        scale, block = read(self.scale_name).float(), self.quantization.block
        if block is not None:
            if block != (FLOAT8_BLOCK, FLOAT8_BLOCK) or k % FLOAT8_BLOCK:
                return None
        elif scale.dim() == 2 and scale.shape[1] > 1:
            return None
        else:
            scale = scale.reshape(-1, 1).expand(n, 1)
        return Float8Matrix(values=read(self.part.name), scale=scale.contiguous())

    def num_bytes(self, kept_bits: frozenset[int], itemsize: int) -> int:
        """Memory that the layer takes once it is loaded."""
        n, k = self.part.shape
        group = self.kept_group(kept_bits)
        if group is None:
            return n * k * itemsize
        # Beside the scales: zero points, or the sums that rounded inputs are corrected by.
        return n * k * self.bits // 8 + n * (k // group) * 4 * (1 + (self.has_zeros or self.bits == 8))

    def needed(self) -> Iterator[Needed]:
        """Every tensor of it, with the shapes and types that it may have."""
        yield from _NEEDED[self.layout](self)

    def read(self, read: Read) -> QuantizedMatrix | Tensor:
        """The layer in its canonical form; FP8 as dense float32.

        Raises:
            CheckpointError: the numbers do not fit together.
        """
        return _READERS[self.layout](self, read)


def find_stored(part: TensorPart, quantization: Quantization, headers: Headers) -> StoredMatrix | None:
    """How the layer whose dense weight would be `part` is stored, or None: dense, or not at all.

    Raises:
        CheckpointError: a width or group that is not read, by the tensor's name.
    """
    if len(part.shape) != 2 or not part.name.endswith(WEIGHT):
        return None
    base, (n, k) = part.name.removesuffix(WEIGHT), part.shape
    if f"{base}.qweight" in headers:
        method = quantization.method
        if method not in ("gptq", "awq"):
            raise CheckpointError(f"tensor {base}.qweight is not part of a {method} checkpoint")
        group, bits = quantization.group or k, quantization.bits
        if quantization.mixed:
            group, bits = _own_group(base, k, headers)
        if group < 1 or k % group:
            raise CheckpointError(f"{base}: its {k} inputs cannot be cut into groups of {group}")
        return StoredMatrix(part, method, quantization, bits, group, not quantization.symmetric, k // group)
    packed = headers.get(f"{base}.weight_packed")
    dtype = headers.get(part.name, ((), ""))[1]
    if packed is not None:
        per_row = packed[0][1] if len(packed[0]) == 2 else 0
        bits = next((bits for bits in (4, 8) if per_row == -(-k * bits // 32)), 0)
        if not bits:
            raise CheckpointError(
                f"tensor {base}.weight_packed has shape {list(packed[0])}; expected {[n, -(-k // 8)]} or "
                f"{[n, -(-k // 4)]}"
            )
        return _with_scales(part, "packed", quantization, bits, headers)
    if dtype in ("I8", "F8_E4M3"):
        return _with_scales(part, "int8" if dtype == "I8" else "float8", quantization, 8, headers)
    return None


def _own_group(base: str, k: int, headers: Headers) -> tuple[int, int]:
    """Inputs that share a scale, and the width, of a GPTQ layer whose config says that layers differ."""
    shapes = [headers.get(f"{base}.{name}", ((), ""))[0] for name in ("qweight", "qzeros")]
    if any(len(shape) != 2 or shape[0] < 1 for shape in shapes):
        raise CheckpointError(f"{base}: expected qweight and qzeros of two dimensions, got {shapes}")
    (rows, _), (groups, _) = shapes
    bits = next((bits for bits in (4, 8) if rows == k * bits // 32), 0)
    if not bits:
        raise CheckpointError(
            f"tensor {base}.qweight has {rows} rows; expected {k // 8} of 4 bits or {k // 4} of 8"
        )
    return k // groups, bits


def _with_scales(
    part: TensorPart,
    layout: Literal["packed", "int8", "float8"],
    quantization: Quantization,
    bits: int,
    headers: Headers,
) -> StoredMatrix:
    base, k = part.name.removesuffix(WEIGHT), part.shape[1]
    # DeepSeek's name for the scales is another.
    name = f"{base}.weight_scale_inv" if f"{base}.weight_scale_inv" in headers else f"{base}.weight_scale"
    shape, _ = headers.get(name, ((), ""))
    has_zeros = f"{base}.weight_zero_point" in headers
    groups = shape[1] if len(shape) == 2 and quantization.block is None else 1
    if groups < 1 or k % groups:
        raise CheckpointError(
            f"tensor {name} has shape {list(shape)}: the {k} inputs of {base} cannot be cut into {groups} "
            f"groups"
        )
    return StoredMatrix(part, layout, quantization, bits, k // groups, has_zeros, groups, name)


# The tensors of each layout. n outputs, k inputs, g groups; b is a weight's width in bits.


def _gptq_needed(stored: StoredMatrix) -> Iterator[Needed]:
    n, k = stored.part.shape
    base, b, g = stored.base, stored.bits, stored.num_groups
    yield Needed(f"{base}.qweight", ((k * b // 32, n),), ("I32",))
    yield Needed(f"{base}.qzeros", ((g, n * b // 32),), ("I32",))
    yield Needed(f"{base}.scales", ((g, n),), _FLOATS)
    yield Needed(f"{base}.g_idx", ((k,),), ("I32", "I64"), optional=True)


def _awq_needed(stored: StoredMatrix) -> Iterator[Needed]:
    n, k = stored.part.shape
    base, g = stored.base, stored.num_groups
    yield Needed(f"{base}.qweight", ((k, n // 8),), ("I32",))
    yield Needed(f"{base}.qzeros", ((g, n // 8),), ("I32",))
    yield Needed(f"{base}.scales", ((g, n),), _FLOATS)


def _packed_needed(stored: StoredMatrix) -> Iterator[Needed]:
    n, k = stored.part.shape
    base, b, g = stored.base, stored.bits, stored.num_groups
    yield Needed(f"{base}.weight_packed", ((n, -(-k * b // 32)),), ("I32",))
    yield Needed(stored.scale_name, ((n, g),), _FLOATS)
    yield Needed(f"{base}.weight_shape", ((2,),), ("I32", "I64"), optional=True)
    yield Needed(f"{base}.weight_zero_point", ((-(-n * b // 32), g),), ("I32",), optional=True)
    yield Needed(f"{base}.weight_g_idx", ((k,),), ("I32", "I64"), optional=True)


def _int8_needed(stored: StoredMatrix) -> Iterator[Needed]:
    n, g = stored.part.shape[0], stored.num_groups
    shapes = ((n, g), (1,), ()) if g == 1 else ((n, g),)
    yield Needed(stored.part.name, (stored.part.shape,), ("I8",))
    yield Needed(stored.scale_name, shapes, _FLOATS)
    yield Needed(f"{stored.base}.weight_zero_point", shapes, ("I8",), optional=True)


def _float8_needed(stored: StoredMatrix) -> Iterator[Needed]:
    n, k = stored.part.shape
    block = stored.quantization.block
    shapes = ((), (1,), (n,), (n, stored.num_groups))
    if block is not None:
        shapes = ((-(-n // block[0]), -(-k // block[1])),)
    yield Needed(stored.part.name, (stored.part.shape,), ("F8_E4M3",))
    yield Needed(stored.scale_name, shapes, _FLOATS)


_NEEDED: dict[str, Callable[[StoredMatrix], Iterator[Needed]]] = {
    "gptq": _gptq_needed,
    "awq": _awq_needed,
    "packed": _packed_needed,
    "int8": _int8_needed,
    "float8": _float8_needed,
}


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned values of `bits` from int32 words, the low ones first, along a new last dimension: uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def _matrix(
    stored: StoredMatrix, values: Tensor, scale: Tensor, zeros: Tensor | None, group_of: Tensor | None
) -> QuantizedMatrix:
    """From unsigned values [n, k], scales and zero points [n, g], and the group of each input."""
    centre = 1 << (stored.bits - 1)
    scale = scale.float().contiguous()
    if zeros is not None and bool((zeros == centre).all()):
        zeros = None
    offset = None if zeros is None else (centre - zeros.float()) * scale
    order = None if group_of is None else _order(stored, group_of)
    if order is not None:
        values = values[:, order]
    if stored.bits == 8:
        # The centre of the canonical form is zero here.
        values = (values.to(torch.int16) - centre).to(torch.int8)
    return QuantizedMatrix(values=values.contiguous(), scale=scale, offset=offset, order=order)


def _order(stored: StoredMatrix, group_of: Tensor) -> Tensor | None:
    """Inputs sorted by group; None if they lie so."""
    k, groups = stored.part.shape[1], stored.num_groups
    group_of = group_of.long()
    if torch.equal(group_of, torch.arange(k) // stored.group):
        return None
    if (
        int(group_of.min()) < 0
        or int(group_of.max()) >= groups
        or bool((group_of.bincount(minlength=groups) != stored.group).any())
    ):
        raise CheckpointError(
            f"{stored.base}: g_idx must name each of its {groups} groups {stored.group} times"
        )
    return torch.argsort(group_of, stable=True)


def _read_gptq(stored: StoredMatrix, read: Read) -> QuantizedMatrix:
    base, bits = stored.base, stored.bits
    n, k = stored.part.shape
    values = _unpacked(read(f"{base}.qweight").t().contiguous(), bits).view(n, k)
    zeros = _unpacked(read(f"{base}.qzeros"), bits).view(stored.num_groups, n).t().to(torch.int16)
    if stored.quantization.zeros_less_one:
        zeros = zeros + 1
    return _matrix(stored, values, read(f"{base}.scales").t(), zeros, _optional(read, f"{base}.g_idx"))


def _read_awq(stored: StoredMatrix, read: Read) -> QuantizedMatrix:
    base, places = stored.base, torch.tensor(_AWQ_ORDER)

    def columns(name: str) -> Tensor:
        return _unpacked(read(f"{base}.{name}"), 4)[..., places].flatten(-2).t()

    return _matrix(stored, columns("qweight"), read(f"{base}.scales").t(), columns("qzeros"), None)


def _read_packed(stored: StoredMatrix, read: Read) -> QuantizedMatrix:
    base, bits = stored.base, stored.bits
    n, k = stored.part.shape
    values = _unpacked(read(f"{base}.weight_packed"), bits).flatten(1)[:, :k]
    zeros = _optional(read, f"{base}.weight_zero_point")
    if zeros is not None:  # Packed along the outputs.
        zeros = _unpacked(zeros.t().contiguous(), bits).flatten(1)[:, :n].t()
    return _matrix(stored, values, read(stored.scale_name), zeros, _optional(read, f"{base}.weight_g_idx"))


def _read_int8(stored: StoredMatrix, read: Read) -> QuantizedMatrix:
    n, groups = stored.part.shape[0], stored.num_groups
    scale = read(stored.scale_name).float().reshape(-1, groups).expand(n, groups).contiguous()
    zeros = _optional(read, f"{stored.base}.weight_zero_point")
    offset = None
    if zeros is not None and bool(zeros.any()):
        offset = -zeros.float().reshape(-1, groups) * scale
    return QuantizedMatrix(values=read(stored.part.name).contiguous(), scale=scale, offset=offset)


def _read_float8(stored: StoredMatrix, read: Read) -> Tensor:
    n, k = stored.part.shape
    scale = read(stored.scale_name).float()
    if stored.quantization.block is not None:
        rows, columns = stored.quantization.block
        scale = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    elif scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(stored.group, 1)
    elif prod(scale.shape) > 1:
        scale = scale.reshape(n, 1)
    return read(stored.part.name).float() * scale


def _optional(read: Read, name: str) -> Tensor | None:
    try:
        return read(name)
    except KeyError:
        return None


_READERS: dict[str, Callable[[StoredMatrix, Read], QuantizedMatrix | Tensor]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "packed": _read_packed,
    "int8": _read_int8,
    "float8": _read_float8,
}
