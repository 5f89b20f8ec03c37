"""Weights from safetensors, straight into the decoder's fused tensors.

Every tensor's name, type and shape is checked against the spec before anything is read. Each is read when the
decoder that is being built takes it: copied once into its place in a fused weight of the dtype that is
wanted, or, for who packs it anyway, handed out as it lies in the mapped file. So at no time is more than one
weight in memory twice. Also makes weights up, for benchmarks that have only a `config.json`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE
from penstock.models.names import CheckpointNames, TensorPart, Weight, decoder_weights
from penstock.models.spec import DecoderSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CPU = torch.device("cpu")
_SIZE_FACTOR_MAX = 2
_DTYPES = ("F32", "F16", "BF16", "F64")

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


class Weights:
    """The decoder's weights, each handed out once, when it is read."""

    def __init__(
        self,
        wanted: Sequence[Weight],
        whole: Callable[[Weight], Tensor],
        parts: Callable[[Weight], tuple[Tensor, ...]],
        itemsize: int,
        on_progress: OnProgress,
    ) -> None:
        self._wanted = {weight.key: weight for weight in wanted}
        self._whole, self._parts, self._itemsize, self._on_progress = whole, parts, itemsize, on_progress
        self._total = sum(prod(weight.shape) for weight in wanted) * itemsize
        self.num_bytes_left = self._total
        """Of those that were not taken yet, in memory."""

    def take(self, key: str) -> Tensor:
        """See `WeightSource`.

        Raises:
            CheckpointError: the file cannot be read.
        """
        weight = self._wanted.pop(key)
        tensor = self._whole(weight)
        self._taken(weight)
        return tensor

    def take_parts(self, key: str) -> tuple[Tensor, ...]:
        """See `WeightSource`.

        Raises:
            CheckpointError: the file cannot be read.
        """
        weight = self._wanted.pop(key)
        tensors = self._parts(weight)
        self._taken(weight)
        return tensors

    def _taken(self, weight: Weight) -> None:
        self.num_bytes_left -= prod(weight.shape) * self._itemsize
        self._on_progress(self._total - self.num_bytes_left, self._total)


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _File(Protocol):
    """What we use of an open safetensors file (the library ships no types for it)."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class _Stored:
    """Where a tensor of the checkpoint is."""

    path: Path
    file: _File


def load_weights(
    directory: Path,
    spec: DecoderSpec,
    names: CheckpointNames,
    dtype: torch.dtype,
    on_progress: OnProgress,
    device: torch.device = CPU,
) -> Weights:
    """The weights of the model in `directory`: checked now, read into the device's memory when they are
    taken.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt; a tensor is missing, unknown, or has
            a shape or type that the config does not call for.
    """
    stored = _open_all(directory)
    _check_size(directory, stored, spec)
    wanted = decoder_weights(spec, names)
    _check(directory, wanted, stored, spec, names)

    def whole(weight: Weight) -> Tensor:
        return _read(weight, stored, dtype, device)

    def parts(weight: Weight) -> tuple[Tensor, ...]:
        return tuple(_read_part(part, stored).to(device, dtype) for part in weight.parts)

    return Weights(wanted, whole, parts, dtype.itemsize, on_progress)


def random_weights(
    spec: DecoderSpec, dtype: torch.dtype, seed: int, on_progress: OnProgress, device: torch.device = CPU
) -> Weights:
    """Made-up weights of the right shapes, the same for the same seed on the same kind of device.

    Activations stay in a sane range.
    """

    def whole(weight: Weight) -> Tensor:
        return _random(weight, dtype, seed, device)

    wanted = decoder_weights(spec, CheckpointNames())
    return Weights(wanted, whole, lambda weight: (whole(weight),), dtype.itemsize, on_progress)


def _random(weight: Weight, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    if weight.key.endswith("norm"):
        return torch.ones(weight.shape, dtype=dtype, device=device)
    digest = hashlib.blake2b(f"{seed}/{weight.key}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))
    # Uniform with the variance of the usual initialisation: several times faster to make than normal.
    bound = (3.0 / weight.shape[-1]) ** 0.5
    return torch.empty(weight.shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)


def _read(weight: Weight, stored: dict[str, _Stored], dtype: torch.dtype, device: torch.device) -> Tensor:
    target = torch.empty(weight.shape, dtype=dtype, device=device)
    start = 0
    for part in weight.parts:
        target[start : start + part.shape[0]].copy_(_read_part(part, stored))
        start += part.shape[0]
    return target


def _read_part(part: TensorPart, stored: dict[str, _Stored]) -> Tensor:
    """As it is in the file, which is mapped: the pages are read when they are looked at."""
    source = stored[part.name]
    try:
        return source.file.get_tensor(part.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{source.path}: {part.name} cannot be read: {error}") from error


def _open_all(directory: Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for path in checkpoint_files(directory):
        try:
            file = cast(_File, cast(Any, safe_open)(str(path), framework="pt"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing; {INDEX_FILE} names it") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a whole safetensors file (truncated or corrupt?): {error}"
            ) from error
        stored |= {name: _Stored(path, file) for name in file.keys()}  # noqa: SIM118  (not a dict)
    return stored


class _Index(msgspec.Struct):
    """What is read of an index."""

    weight_map: dict[str, str]


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, in the order of their names.

    Raises:
        CheckpointError: there are none, or the index of them is broken.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [single]
    try:
        files = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(
            f"{index}: not an index: expected an object with a weight_map of tensors to files"
        ) from error
    if any(Path(name).name != name for name in files):
        raise CheckpointError(f"{index}: weight_map points outside the model directory")
    return [directory / name for name in files]


def _check_size(directory: Path, stored: dict[str, _Stored], spec: DecoderSpec) -> None:
    """Refuse, before anything is listed or built, a config that describes another size of model than the
    files hold.

    Smaller differences are reported tensor by tensor.
    """
    num_stored = sum(prod(each.file.get_slice(name).get_shape()) for name, each in stored.items())
    if spec.num_layers > len(stored) or spec.num_parameters > _SIZE_FACTOR_MAX * num_stored:
        raise CheckpointError(
            f"{directory}: {CONFIG_FILE} describes a {spec.architecture} of {spec.num_layers} layers and "
            f"{spec.num_parameters} parameters, but the files hold {len(stored)} tensors of {num_stored} in "
            f"all"
        )


def _check(
    directory: Path,
    wanted: Sequence[Weight],
    stored: dict[str, _Stored],
    spec: DecoderSpec,
    names: CheckpointNames,
) -> None:
    """Refuse the checkpoint before reading if any tensor is not as the config says."""
    parts = {part.name: part for weight in wanted for part in weight.parts}
    for name, part in parts.items():
        if name not in stored:
            raise CheckpointError(
                f"{directory}: tensor {name} is missing; expected one of shape {list(part.shape)}"
            )
        _check_tensor(stored[name], part)
    # Some checkpoints repeat the embedding as the head although the config ties the two.
    known = parts.keys() | ({names.head} if spec.tied_head else set[str]())
    for name, found in stored.items():
        ignored = name.endswith(names.ignored_suffixes) or name.startswith(names.ignored_prefixes)
        if name not in known and not ignored:
            raise CheckpointError(
                f"{found.path}: tensor {name} is not part of a {spec.architecture} of this config"
            )


def _check_tensor(stored: _Stored, part: TensorPart) -> None:
    header = stored.file.get_slice(part.name)
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if shape != part.shape:
        raise CheckpointError(
            f"{stored.path}: tensor {part.name} has shape {list(shape)}, the config calls for "
            f"{list(part.shape)}"
        )
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{stored.path}: tensor {part.name} has type {dtype}, expected one of {', '.join(_DTYPES)}"
        )
