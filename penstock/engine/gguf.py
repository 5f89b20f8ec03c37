"""Weights from GGUF files, mapped into memory and turned into what the decoder takes, tensor by tensor.

    F32, F16, BF16    as they are
    Q8_0              blocks of 32: float16 d, int8 q                       W = d q
    Q4_0, Q5_0        blocks of 32: float16 d, 4 or 5 bits q                W = d (q - 8), d (q - 16)
    Q4_1, Q5_1        blocks of 32: float16 d and m, 4 or 5 bits q          W = d q + m
    Q4_K, Q5_K        256 = 8 groups of 32, each with 6 bits s and m        W = (d s) q - (dmin m)
    Q6_K              256 = 16 groups of 16, each with int8 s, 6 bits q     W = (d s) (q - 32)

The four-bit ones are the canonical form of `engine/quantized.py` in groups of 32 and stay integers where the
kernels compute with those; the others are worked out in float32, to the last bit as llama.cpp's own Python
library does, a few rows at a time, and rounded once to the model's dtype.

llama.cpp's `llama` rotates neighbouring rows of a head, others row i with i + size / 2: its converter
reorders queries and keys, and we order them back. Gemma's norms are stored with their 1 added, which we take
off again.
"""

import mmap
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.quantized import QuantizedMatrix
from penstock.engine.weights import CPU, OnProgress, Part, Weights, fused
from penstock.errors import CheckpointError
from penstock.models.gguf_config import REORDERED, Gguf, experts_of, read_gguf
from penstock.models.gguf_header import GgufTensor
from penstock.models.names import CheckpointNames, Weight, decoder_weights
from penstock.models.spec import DecoderSpec

_CHUNK_VALUES = 1 << 22
"""Worked out in float32 at a time."""
_SIZE_FACTOR_MAX = 2
_NEVER_KEPT = ("embedding", "router")
"""Keys, or their ends, of weights that are never computed as integers."""
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0)
"""Type stubs lack it."""
_ROTATED = (".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")


def load_gguf_weights(
    path: Path,
    spec: DecoderSpec,
    names: CheckpointNames,
    dtype: torch.dtype,
    on_progress: OnProgress,
    device: torch.device = CPU,
    *,
    kept_bits: frozenset[int] = frozenset(),
) -> Weights:
    """As `loader.load_weights`, of a GGUF file.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a shape that the keys do not call for; or a file
            cannot be read.
    """
    gguf = read_gguf(path)
    _check_size(gguf, spec)
    stored, wanted = _by_name(gguf, spec), decoder_weights(spec, names)
    _check(gguf, wanted, stored, (spec, names))
    source = _Source(gguf, spec)

    def kept(weight: Weight) -> bool:
        """All of its parts, or none: they become one matrix."""
        kinds = {stored[part.name].type.name for part in weight.parts}
        return 4 in kept_bits and kinds <= _INTEGERS.keys() and not weight.key.endswith(_NEVER_KEPT)

    def whole(weight: Weight) -> Tensor:
        return fused(weight, lambda part: source.dense(stored[part.name], dtype), dtype, device)

    def parts(weight: Weight) -> tuple[Part, ...]:
        tensors = [stored[part.name] for part in weight.parts]
        if kept(weight):
            return tuple(map(source.integers, tensors))
        return tuple(source.dense(tensor, dtype).to(device) for tensor in tensors)

    def num_bytes(weight: Weight) -> int:
        values = sum(prod(part.shape) for part in weight.parts)
        if not kept(weight):
            return values * dtype.itemsize
        has_offset = any(stored[part.name].type.name != "Q4_0" for part in weight.parts)
        return values // 2 + values // _GROUP * 4 * (1 + has_offset)

    return Weights(wanted, whole, parts, num_bytes, on_progress, keeps=bool(kept_bits))


def _check_size(gguf: Gguf, spec: DecoderSpec) -> None:
    """Refuse, before anything is listed or built, keys that describe another size of model than there is."""
    num_stored = sum(prod(tensor.shape) for tensor in gguf.tensors.values())
    if spec.num_layers > len(gguf.tensors) or spec.num_parameters > _SIZE_FACTOR_MAX * num_stored:
        raise CheckpointError(
            f"{gguf.path}: its keys describe a {spec.architecture} of {spec.num_layers} layers and "
            f"{spec.num_parameters} parameters, but it holds {len(gguf.tensors)} tensors of {num_stored} in "
            f"all"
        )


def _by_name(gguf: Gguf, spec: DecoderSpec) -> dict[str, GgufTensor]:
    """Every tensor, those of experts one by one."""
    found: dict[str, GgufTensor] = {}
    for name, tensor in gguf.tensors.items():
        if not name.endswith("_exps.weight"):
            found[name] = tensor
            continue
        num_experts = 0 if spec.moe is None else spec.moe.num_experts
        if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; expected {num_experts} "
                f"matrices (expert_count)"
            )
        found |= {expert.name: expert for expert in experts_of(tensor)}
    return found


def _check(
    gguf: Gguf,
    wanted: Sequence[Weight],
    stored: dict[str, GgufTensor],
    expected: tuple[DecoderSpec, CheckpointNames],
) -> None:
    """Refuse the file before reading if any tensor is not as the keys say."""
    spec, names = expected
    known = set[str]()
    for part in (part for weight in wanted for part in weight.parts):
        known.add(part.name)
        tensor = stored.get(part.name)
        if tensor is None:
            raise CheckpointError(
                f"{gguf.path}: tensor {part.name} is missing; expected one of shape {list(part.shape)}"
            )
        if tensor.shape != part.shape:
            raise CheckpointError(
                f"{tensor.path}: tensor {part.name} has shape {list(tensor.shape)}, the keys call for "
                f"{list(part.shape)}"
            )
    for name, tensor in stored.items():
        if name not in known and not name.endswith(names.ignored_suffixes):
            raise CheckpointError(
                f"{tensor.path}: tensor {name} is not part of a {spec.architecture} of these keys"
            )


class _Source:
    """The mapped files, and how their bytes become numbers."""

    def __init__(self, gguf: Gguf, spec: DecoderSpec) -> None:
        self._maps = {file.path: _mapped(file.path) for file in gguf.files}
        reordered = gguf.first.text("general.architecture") in REORDERED
        self._heads = {"q": spec.num_heads, "k": spec.num_kv_heads} if reordered else {}
        self._norm_offset = spec.norm_offset

    def dense(self, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
        """The numbers; as they lie in the mapped file where nothing has to be done to them."""
        raw, order = self._raw(tensor), self._order(tensor)
        kind = _DENSE.get(tensor.type.name)
        if kind is not None:
            found = raw.view(kind).view(tensor.shape)
            if order is not None:
                found = found[order]
            if self._norm_offset and tensor.name.endswith("norm.weight"):
                found = found.float() - self._norm_offset
            return found.to(dtype)
        rows, step = tensor.shape[0], max(1, _CHUNK_VALUES // prod(tensor.shape[1:]))
        if len(tensor.shape) == 1:
            return _DEQUANTIZE[tensor.type.name](raw[None])[0].to(dtype)
        matrix = raw.view(rows, -1)
        target = torch.empty(tensor.shape, dtype=dtype)
        for first in range(0, rows, step):
            some = slice(first, first + step)
            chosen = matrix[some] if order is None else matrix[order[some]]
            target[some] = _DEQUANTIZE[tensor.type.name](chosen).view(-1, *tensor.shape[1:])
        return target

    def integers(self, tensor: GgufTensor) -> QuantizedMatrix:
        """A matrix of four bits in its canonical form."""
        matrix, order = self._raw(tensor).view(tensor.shape[0], -1), self._order(tensor)
        return _INTEGERS[tensor.type.name](matrix if order is None else matrix[order])

    def _raw(self, tensor: GgufTensor) -> Tensor:
        mapped = self._maps[tensor.path]
        if tensor.start + tensor.num_bytes > len(mapped):
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: the file became shorter")
        return mapped[tensor.start : tensor.start + tensor.num_bytes]

    def _order(self, tensor: GgufTensor) -> Tensor | None:
        """Which stored row is which of ours; None: they lie as ours do."""
        if not self._heads or not tensor.name.endswith(_ROTATED):
            return None
        heads = self._heads[tensor.name.rpartition(".attn_")[2][0]]
        return torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _mapped(path: Path) -> Tensor:
    """The file's bytes. Private, so that torch may take them for writable; nothing is reserved for that."""
    try:
        with path.open("rb") as file:
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            data = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return torch.frombuffer(data, dtype=torch.uint8)


# From rows of blocks, uint8 [n, bytes], to float32 [n, k]; the order of operations is llama.cpp's.


def _half(blocks: Tensor) -> Tensor:
    """Two bytes at the end of each block as float32 [..., 1]."""
    return blocks.contiguous().view(torch.float16).float()


def _cut(flat: Tensor, *sides: int) -> Tensor:
    """The last dimension as several."""
    return flat.reshape(*flat.shape[:-1], *sides)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., j] to [..., 2, j]: the low halves, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _q8_0(rows: Tensor) -> Tensor:
    blocks = rows.view(rows.shape[0], -1, 34)
    values = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (values * _half(blocks[..., :2])).flatten(1)


def _q4_0_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values [n, k / 32, 32] and scales [n, k / 32, 1]."""
    blocks = rows.view(rows.shape[0], -1, 18)
    return _nibbles(blocks[..., 2:]).flatten(-2), _half(blocks[..., :2])


def _q4_0(rows: Tensor) -> Tensor:
    values, scale = _q4_0_parts(rows)
    return (scale * (values.to(torch.int8) - 8).float()).flatten(1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [..., 4], a bit for each value of a block, to [..., 32]: 16 where it is set."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q5_0(rows: Tensor) -> Tensor:
    blocks = rows.view(rows.shape[0], -1, 22)
    values = _nibbles(blocks[..., 6:]).flatten(-2) | _fifth_bits(blocks[..., 2:6])
    return (_half(blocks[..., :2]) * (values.to(torch.int8) - 16).float()).flatten(1)


def _q4_1_parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, k / 32, 32], scales and what is added [n, k / 32, 1]."""
    blocks = rows.view(rows.shape[0], -1, 20)
    return _nibbles(blocks[..., 4:]).flatten(-2), _half(blocks[..., :2]), _half(blocks[..., 2:4])


def _q4_1(rows: Tensor) -> Tensor:
    values, scale, more = _q4_1_parts(rows)
    return (scale * values.float() + more).flatten(1)


def _q5_1(rows: Tensor) -> Tensor:
    blocks = rows.view(rows.shape[0], -1, 24)
    values = _nibbles(blocks[..., 8:]).flatten(-2) | _fifth_bits(blocks[..., 4:8])
    return (_half(blocks[..., :2]) * values.float() + _half(blocks[..., 2:4])).flatten(1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k / 256, 8, 1] of the first 16 bytes of each block: scales, and what is taken off."""
    d, dmin = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    # 12 bytes: 6 bits of 4 scales, of 4 minima; the low 4 bits of the other 4 of each, whose high 2 bits are
    # the high bits of the first 8 bytes.
    first, second, third = _cut(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=-1)
    return (d * scales.float())[..., None], (dmin * minima.float())[..., None]


def _q4_k_parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [n, k / 256, 8, 32], and [n, k / 256, 8, 1]: their scales, and what is taken off."""
    blocks = rows.view(rows.shape[0], -1, 144)
    values = _nibbles(_cut(blocks[..., 16:], 4, 32)).flatten(-3, -2)
    return values, *_k_scales(blocks)


def _q4_k(rows: Tensor) -> Tensor:
    values, scale, less = _q4_k_parts(rows)
    return (scale * values.float() - less).flatten(1)


def _q5_k(rows: Tensor) -> Tensor:
    blocks = rows.view(rows.shape[0], -1, 176)
    # Bit i of byte j is the fifth of value j of group i.
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    values = _nibbles(_cut(blocks[..., 48:], 4, 32)).flatten(-3, -2) | high << 4
    scale, less = _k_scales(blocks)
    return (scale * values.float() - less).flatten(1)


def _q6_k(rows: Tensor) -> Tensor:
    blocks = rows.view(rows.shape[0], -1, 210)
    low = _cut(_nibbles(_cut(blocks[..., :128], 2, 64)).flatten(-3), 8, 32)
    packed = _cut(blocks[..., 128:192], 2, 1, 32)
    high = (packed >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(-3, -2)
    values = _cut(((low | high << 4).to(torch.int8) - 32).flatten(-2), 16, 16).float()
    scale = _half(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return (scale[..., None] * values).flatten(1)


def _q4_0_integers(rows: Tensor) -> QuantizedMatrix:
    values, scale = _q4_0_parts(rows)
    return QuantizedMatrix(values=values.flatten(1), scale=scale.flatten(1))


def _q4_1_integers(rows: Tensor) -> QuantizedMatrix:
    values, scale, more = _q4_1_parts(rows)
    return QuantizedMatrix(
        values=values.flatten(1), scale=scale.flatten(1), offset=(8 * scale + more).flatten(1)
    )


def _q4_k_integers(rows: Tensor) -> QuantizedMatrix:
    values, scale, less = _q4_k_parts(rows)
    # The canonical form counts values from 8.
    return QuantizedMatrix(
        values=values.flatten(1), scale=scale.flatten(1), offset=(8 * scale - less).flatten(1)
    )


_DEQUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_INTEGERS: dict[str, Callable[[Tensor], QuantizedMatrix]] = {
    "Q4_0": _q4_0_integers,
    "Q4_1": _q4_1_integers,
    "Q4_K": _q4_k_integers,
}
