"""An adapter's files, checked against the decoder that it is for before a tensor is read.

Only safetensors are read: a pickle could run code. A message names file, tensor and what was expected.
"""

import hashlib
import math
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.adapters import (
    CONFIG_BYTES_MAX,
    CONFIG_FILE,
    FILE_BYTES_MAX,
    FUSED,
    RANK_MAX,
    WEIGHTS_FILE,
    AdapterConfig,
    AdapterTarget,
    TensorName,
    adapter_targets,
    parse_tensor_name,
    read_adapter_config,
)
from penstock.models.names import CheckpointNames
from penstock.models.spec import DecoderSpec

HEADER_BYTES_MAX = 4 << 20
_READ_BYTES = 1 << 20
_PICKLE = "adapter_model.bin"
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(slots=True, frozen=True)
class LoraPart:
    """The low-rank matrices that are added to some outputs of one linear: `scale * (x a^T) b^T`."""

    a: Tensor
    """`[rank, in]`"""
    b: Tensor
    """`[out, rank]`"""
    scale: float
    first: int
    """Of the fused linear's outputs, the first that it is added to."""


Layer = Mapping[str, tuple[LoraPart, ...]]
"""By the keys of `FUSED`."""


@dataclass(slots=True, frozen=True)
class AdapterWeights:
    """An adapter as it was read: in each layer the parts of each linear, in the order of their outputs."""

    digest: str
    """Of both files: whatever the adapter is called, equal digests are equal adapters."""
    layers: tuple[Layer, ...]
    config: AdapterConfig

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        parts = (part for layer in self.layers for parts in layer.values() for part in parts)
        return sum(part.a.nbytes + part.b.nbytes for part in parts)


class Packed(Protocol):
    """An adapter in the form in which its decoder computes with it."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...


class Packer(Protocol):
    """Makes adapters ready. May be called on any thread while steps run."""

    def pack(self, weights: AdapterWeights, pause: Callable[[], None]) -> Packed:
        """Ready to be computed with. `pause` is called between pieces of the work."""
        ...


def never() -> None:
    """No pause."""


@dataclass(slots=True, frozen=True)
class Base:
    """The decoder that adapters are for."""

    spec: DecoderSpec
    names: CheckpointNames
    dtype: torch.dtype
    """Of the tensors that are read."""


class AdapterReader:
    """Reads adapters for one decoder. May be used on any thread while steps run."""

    def __init__(
        self, spec: DecoderSpec, names: CheckpointNames, dtype: torch.dtype, packer: Packer, *, bytes_max: int
    ) -> None:
        self._base, self._packer = Base(spec, names, dtype), packer
        self.bytes_max = bytes_max
        """Memory that all adapters may take together."""

    def read(
        self, directory: Path, digest: str = "", pause: Callable[[], None] = never
    ) -> tuple[str, Packed]:
        """The digest of the adapter in a PEFT directory, and the adapter, ready. `pause` is called between
        pieces of the work.

        Raises:
            CheckpointError: see `read_adapter`.
        """
        with torch.inference_mode():
            weights = read_adapter(directory, self._base, digest, pause)
            return weights.digest, self._packer.pack(weights, pause)


class _Entry(msgspec.Struct):
    """A tensor in a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_adapter(directory: Path, base: Base, digest: str, pause: Callable[[], None]) -> AdapterWeights:
    """The adapter in a PEFT directory. With a `digest` its files must have that one.

    Raises:
        CheckpointError: it is no adapter for this model, or one that is not supported.
    """
    path = directory / WEIGHTS_FILE
    config_bytes = _small_file(directory / CONFIG_FILE)
    config = read_adapter_config(config_bytes, str(directory / CONFIG_FILE))
    if not path.is_file():
        if (directory / _PICKLE).exists():
            raise CheckpointError(
                f"{directory}: has only {_PICKLE}, a pickle, which is never read: save it as {WEIGHTS_FILE}"
            )
        raise CheckpointError(f"{directory}: has no {WEIGHTS_FILE}")
    stamp = _stamp(path)
    header = _header(path)
    found_digest = _digest(config_bytes, path, pause)
    if digest and found_digest != digest:
        raise CheckpointError(f"{directory}: its digest is {found_digest}, expected {digest}")
    spec = base.spec
    targets = adapter_targets(spec, base.names)
    pairs = _pairs(path, header, targets, spec.num_layers)
    layers: list[dict[str, list[LoraPart]]] = [{} for _ in range(spec.num_layers)]
    try:
        with cast(Any, safe_open)(str(path), framework="pt") as file:
            for at, (a_name, b_name) in pairs.items():
                target = targets[at.module]
                rank = _check_shapes(path, header, (a_name, b_name), target, config)
                a, b = (_tensor(path, file, name, base.dtype) for name in (a_name, b_name))
                scale = config.scale(f"layers.{at.layer}.{at.module}", rank)
                part = LoraPart(a, b, scale, target.first)
                layers[at.layer].setdefault(target.fused, []).extend(_split(part, target, spec))
                pause()
        if _stamp(path) != stamp:  # Else the digest could be of other bytes than the answers.
            raise CheckpointError(f"{path}: was changed while it was read")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    ordered = tuple(
        {fused: tuple(sorted(layer[fused], key=lambda part: part.first)) for fused in FUSED if fused in layer}
        for layer in layers
    )
    return AdapterWeights(found_digest, ordered, config)


def _split(part: LoraPart, target: AdapterTarget, spec: DecoderSpec) -> Iterator[LoraPart]:
    """A part that changes gates and ups as two: kernels lay those out apart."""
    inner = spec.intermediate_size
    if target.fused != "gate_up" or target.num_outputs == inner:
        yield part
        return
    yield LoraPart(part.a, part.b[:inner], part.scale, 0)
    yield LoraPart(part.a, part.b[inner:], part.scale, inner)


def _small_file(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # A pipe would be waited for, and all others with it.
            raise CheckpointError(f"{path}: is no plain file")
        with path.open("rb") as file:
            found = file.read(CONFIG_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"{path}: cannot be read: {why or error}") from error
    if len(found) > CONFIG_BYTES_MAX:
        raise CheckpointError(f"{path}: is larger than {CONFIG_BYTES_MAX} bytes")
    return found


def _header(path: Path) -> dict[str, _Entry]:
    """The tensors of a safetensors file, all of whose bytes are there."""
    size = path.stat().st_size
    if size > FILE_BYTES_MAX:
        raise CheckpointError(f"{path}: has {size} bytes, expected at most {FILE_BYTES_MAX}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise CheckpointError(
                f"{path}: its header says that it has {length} bytes, of a file of {size}; expected at most "
                f"{HEADER_BYTES_MAX}: it is truncated or no safetensors file"
            )
        raw = file.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(each, type=_Entry) for name, each in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not one of safetensors: {error}") from error
    for name, entry in entries.items():
        first, last = entry.data_offsets
        wanted = math.prod(entry.shape) * _DTYPES.get(entry.dtype, 0)
        if entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name[:128]} has type {entry.dtype[:16]}, expected one of "
                f"{', '.join(_DTYPES)}"
            )
        if (
            min(entry.shape, default=0) <= 0
            or last - first != wanted
            or not 0 <= first <= last <= size - 8 - length
        ):
            raise CheckpointError(
                f"{path}: tensor {name[:128]} of shape {entry.shape[:4]} has bytes {first} to {last}, which "
                f"the file does not hold or which are not {wanted}"
            )
    return entries


def _stamp(path: Path) -> tuple[int, int, int]:
    """The stamp that differs when a file is written or replaced."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(config: bytes, path: Path, pause: Callable[[], None]) -> str:
    hasher = hashlib.blake2b(digest_size=32, person=b"penstock adapter")
    hasher.update(len(config).to_bytes(8, "little") + config)
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            hasher.update(chunk)
            pause()
    return hasher.hexdigest()


def _pairs(
    path: Path, header: Mapping[str, _Entry], targets: Mapping[str, AdapterTarget], num_layers: int
) -> dict[TensorName, tuple[str, str]]:
    """The names of A and B of each module, in order."""
    found: dict[TensorName, dict[str, str]] = {}
    for name in header:
        at = parse_tensor_name(name)
        if at is None or at.module not in targets:
            known = ", ".join(targets)
            raise CheckpointError(
                f"{path}: tensor {name[:128]} changes what adapters cannot change here; expected lora_A and "
                f"lora_B of {known}"
            )
        if at.layer >= num_layers:
            raise CheckpointError(
                f"{path}: tensor {name[:128]} is of layer {at.layer}, but the model has {num_layers}"
            )
        sides = found.setdefault(TensorName(at.layer, at.module, "A"), {})
        if at.side in sides:
            raise CheckpointError(f"{path}: tensor {name[:128]} is there twice, under {sides[at.side][:128]}")
        sides[at.side] = name
    for sides in found.values():
        if len(sides) < 2:
            [(side, name)] = sides.items()
            raise CheckpointError(
                f"{path}: tensor {name[:128]} stands alone: lora_{'BA'[side == 'B']} is missing"
            )
    if not found:
        raise CheckpointError(f"{path}: holds no tensors")
    return {
        at: (sides["A"], sides["B"])
        for at, sides in sorted(found.items(), key=lambda e: (e[0].layer, e[0].module))
    }


def _check_shapes(
    path: Path,
    header: Mapping[str, _Entry],
    pair: tuple[str, str],
    target: AdapterTarget,
    config: AdapterConfig,
) -> int:
    """The rank of a module whose tensors are as they must be."""
    a_name, b_name = pair
    a, b = header[a_name].shape, header[b_name].shape
    rank = a[0] if len(a) == 2 and config.has_ranks else config.rank
    if rank > RANK_MAX:
        raise CheckpointError(f"{path}: tensor {a_name[:128]} has rank {rank}, expected at most {RANK_MAX}")
    for name, shape, wanted in (
        (a_name, a, [rank, target.num_inputs]),
        (b_name, b, [target.num_outputs, rank]),
    ):
        if shape != wanted:
            raise CheckpointError(
                f"{path}: tensor {name[:128]} has shape {shape[:4]}, expected {wanted}: is the adapter for "
                f"another model{f' ({config.base})' if config.base else ''}?"
            )
    return rank


def _tensor(path: Path, file: Any, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
    tensor: Tensor = file.get_tensor(name).to(dtype)
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: tensor {name[:128]} has values that are no finite numbers")
    # A copy of its own: what the file maps may change.
    return tensor.clone()
