"""Weights from safetensors, straight into the decoder's fused tensors.

Every tensor's name, type and shape is checked against the spec before anything is read. Each is read when the
decoder that is being built takes it: copied once into its place in a fused weight of the dtype that is
wanted, or, where it is packed next, handed out as it lies in the mapped file, quantized layers as integers
if the kernels compute with those. So at no time is more than one weight in memory twice, but for a bounded
few that wait to be packed (`native/packing.py`). Also makes weights
up, for benchmarks that have only a `config.json`.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.config.checkpoints import WEIGHTS, weight_files
from penstock.engine.gguf import load_gguf_weights
from penstock.engine.quantized import IGNORED, StoredMatrix, find_stored
from penstock.engine.weights import CPU, OnProgress, Part, Weights, fused
from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE
from penstock.models.files import is_gguf
from penstock.models.names import (
    HEAD_BIAS,
    HEAD_JOIN,
    CheckpointNames,
    TensorPart,
    Weight,
    decoder_weights,
    head_weights,
)
from penstock.models.quantization import Quantization
from penstock.models.spec import DecoderSpec

SINGLE_FILE, INDEX_FILE = WEIGHTS
_SIZE_FACTOR_MAX = 2
_PACKED_MAX = 8
_LFS = b"version https://git-lfs"
_OF_EAGLE_3 = ("midlayer.", "d2t", "t2d")
_DTYPES = ("F32", "F16", "BF16", "F64")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _File(Protocol):
    """The methods of an open safetensors file that we use (the library ships no types for it)."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class _Stored:
    """Where a tensor of the checkpoint is."""

    path: Path
    file: _File

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type."""
        header = self.file.get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def num_weights(self, name: str) -> int:
        """Numbers that it holds at most: a word of a packed layer has eight."""
        shape, dtype = self.header(name)
        return prod(shape) * (_PACKED_MAX if dtype == "I32" else 1)


def load_weights(
    directory: Path,
    spec: DecoderSpec,
    names: CheckpointNames,
    dtype: torch.dtype,
    on_progress: OnProgress,
    device: torch.device = CPU,
    *,
    quantization: Quantization | None = None,
    kept_bits: frozenset[int] = frozenset(),
    keeps_float8: bool = False,
) -> Weights:
    """The weights of the model in `directory`: checked now, read into the device's memory when they are
    taken.

    Args:
        directory: of the checkpoint, or its GGUF file.
        spec: the decoder that its config describes.
        names: of its tensors.
        dtype: of dense weights, and of quantized ones that are made dense.
        on_progress: called as bytes are read.
        device: where weights go.
        quantization: how linear layers are stored, if its config says so.
        kept_bits: widths of integers that the kernels compute with; `take_parts` hands those out as they are.
        keeps_float8: they compute with FP8 too.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt; a tensor is missing, unknown, or has
            a shape or type that the config does not call for.
    """
    if is_gguf(directory):
        return load_gguf_weights(directory, spec, names, dtype, on_progress, device, kept_bits=kept_bits)
    files = _open_all(directory)
    if spec.embeds and names.embedding not in files and names.bare().embedding in files:
        names = names.bare()
    _check_size(directory, files, spec)
    wanted = decoder_weights(spec, names)
    stored = _quantized_layers(directory, wanted, files, quantization)
    _check(directory, wanted, files, stored, (spec, names))

    def read(part: TensorPart) -> Part:
        """As it is in the file, which is mapped: the pages are read when they are looked at."""
        matrix = stored.get(part.name)
        if matrix is None:
            return _read_tensor(part.name, files)
        try:
            return _read_stored(matrix, files, dtype, kept_bits, keeps_float8=keeps_float8)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error

    def whole(weight: Weight) -> Tensor:
        return fused(weight, read, dtype, device)

    def parts(weight: Weight) -> tuple[Part, ...]:
        found = map(read, weight.parts)
        return tuple(part.to(device, dtype) if isinstance(part, Tensor) else part for part in found)

    def num_bytes(weight: Weight) -> int:
        return sum(
            stored[part.name].num_bytes(kept_bits, dtype.itemsize)
            if part.name in stored
            else prod(part.shape) * dtype.itemsize
            for part in weight.parts
        )

    keeps = keeps_float8 or bool(kept_bits)
    return Weights(wanted, whole, parts, num_bytes, on_progress, keeps=keeps)


def holds_head(directory: Path) -> bool:
    """Whether it is a head on another model's states, and no model.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt.
    """
    return not is_gguf(directory) and HEAD_JOIN in _open_all(directory)


def load_head(directory: Path, spec: DecoderSpec, names: CheckpointNames, dtype: torch.dtype) -> Weights:
    """The weights of the head in `directory` (`head_weights`): checked now, read when they are taken.

    Raises:
        CheckpointError: as `load_weights`.
    """
    files, names = _open_all(directory), names.bare()
    strange = min((name for name in files if name.startswith(_OF_EAGLE_3)), default=None)
    if strange is not None:
        raise CheckpointError(
            f"{files[strange].path}: tensor {strange} is of a head of EAGLE-3, which reads states of several "
            f"layers; expected EAGLE's own layout: {HEAD_JOIN} and layers.0"
        )
    wanted = head_weights(spec, names, table=names.embedding in files, bias=HEAD_BIAS in files)
    _check(directory, wanted, files, {}, (replace(spec, tied_head=True), names))

    def read(part: TensorPart) -> Tensor:
        return _read_tensor(part.name, files)

    return Weights(
        wanted,
        lambda weight: fused(weight, read, dtype, CPU),
        lambda weight: tuple(map(read, weight.parts)),
        lambda weight: prod(weight.shape) * dtype.itemsize,
        lambda _done, _total: None,
    )


def _read_stored(
    matrix: StoredMatrix,
    files: dict[str, _Stored],
    dtype: torch.dtype,
    kept_bits: frozenset[int],
    *,
    keeps_float8: bool,
) -> Part:
    """A quantized layer, as it is if kernels compute with that, else dense."""

    def read(name: str) -> Tensor:
        return _read_tensor(name, files)

    if keeps_float8 and (kept := matrix.float8(read)) is not None:
        return kept
    found, group = matrix.read(read), matrix.kept_group(kept_bits)
    if isinstance(found, Tensor):
        return found
    return found.dense(dtype) if group is None else found.with_group(group)


def load_named(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], prefix: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of these names and shapes, whose names in the files may begin with `prefix`; others are not
    read.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt; a tensor is missing, or has another shape.
    """
    files = _open_all(directory)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        stored = next((each for each in (name, prefix + name) if each in files), None)
        if stored is None:
            raise CheckpointError(
                f"{directory}: tensor {name} is missing; expected one of shape {list(shape)}"
            )
        _check_tensor(files[stored], stored, (shape,), _DTYPES)
        found[name] = _read_tensor(stored, files).to(dtype).clone()
    return found


def random_weights(
    spec: DecoderSpec, dtype: torch.dtype, seed: int, on_progress: OnProgress, device: torch.device = CPU
) -> Weights:
    """Made-up weights of the right shapes, the same for the same seed on the same kind of device.

    Activations stay in a sane range.
    """

    def whole(weight: Weight) -> Tensor:
        return _random(weight, dtype, seed, device)

    def num_bytes(weight: Weight) -> int:
        return prod(weight.shape) * dtype.itemsize

    wanted = decoder_weights(spec, CheckpointNames())
    return Weights(wanted, whole, lambda weight: (whole(weight),), num_bytes, on_progress)


def _random(weight: Weight, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    if weight.key.endswith("norm"):
        return torch.ones(weight.shape, dtype=dtype, device=device)
    digest = hashlib.blake2b(f"{seed}/{weight.key}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))
    # Uniform with the variance of the usual initialisation: several times faster to make than normal.
    bound = (3.0 / weight.shape[-1]) ** 0.5
    return torch.empty(weight.shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)


def _read_tensor(name: str, files: dict[str, _Stored]) -> Tensor:
    source = files[name]
    try:
        return source.file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{source.path}: {name} cannot be read: {error}") from error


def _open_all(directory: Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for path in checkpoint_files(directory):
        if path.exists() and not path.is_file():  # Opening a pipe would wait for ever.
            raise CheckpointError(f"{path}: expected a file, it is something else")
        try:
            file = cast(_File, cast(Any, safe_open)(str(path), framework="pt"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing; {INDEX_FILE} names it") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({_why(path)}): {error}") from error
        stored |= {name: _Stored(path, file) for name in file.keys()}  # noqa: SIM118  (not a dict)
    return stored


def _why(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return "a pointer of git-lfs: `git lfs pull` fetches the file"
    return "truncated or corrupt?"


class _Index(msgspec.Struct):
    """The parts of an index that are read."""

    weight_map: dict[str, str]


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, in the order of their names.

    Raises:
        CheckpointError: there are none, or the index of them is broken.
    """
    index, found = directory / INDEX_FILE, weight_files(directory)
    if not found:
        raise CheckpointError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    if found != [INDEX_FILE]:
        return [directory / name for name in found]
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
    num_stored = sum(each.num_weights(name) for name, each in stored.items())
    if spec.num_layers > len(stored) or spec.num_parameters > _SIZE_FACTOR_MAX * num_stored:
        raise CheckpointError(
            f"{directory}: {CONFIG_FILE} describes a {spec.architecture} of {spec.num_layers} layers and "
            f"{spec.num_parameters} parameters, but the files hold {len(stored)} tensors of {num_stored} in "
            f"all"
        )


def _quantized_layers(
    directory: Path, wanted: Sequence[Weight], files: dict[str, _Stored], quantization: Quantization | None
) -> dict[str, StoredMatrix]:
    """How each layer that is not dense is stored, by the name that its dense weight would have."""
    if quantization is None:
        return {}
    headers = {name: each.header(name) for name, each in files.items()}
    found: dict[str, StoredMatrix] = {}
    try:
        for part in (part for weight in wanted for part in weight.parts):
            matrix = find_stored(part, quantization, headers)
            if matrix is not None:
                found[part.name] = matrix
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    return found


def _check(
    directory: Path,
    wanted: Sequence[Weight],
    files: dict[str, _Stored],
    stored: dict[str, StoredMatrix],
    expected: tuple[DecoderSpec, CheckpointNames],
) -> None:
    """Refuse the checkpoint before reading if any tensor is not as the config says."""
    spec, names = expected
    # Some checkpoints repeat the embedding as the head although the config ties the two.
    known = {names.head} if spec.tied_head or spec.embeds else set[str]()
    for part in (part for weight in wanted for part in weight.parts):
        if part.name in stored:
            known |= _check_quantized(directory, stored[part.name], files)
            continue
        known.add(part.name)
        if part.name not in files:
            raise CheckpointError(
                f"{directory}: tensor {part.name} is missing; expected one of shape {list(part.shape)}"
            )
        _check_tensor(files[part.name], part.name, (part.shape,), _DTYPES)
    ignored_suffixes = names.ignored_suffixes + (IGNORED if stored else ())
    for name, found in files.items():
        ignored = name.endswith(ignored_suffixes) or name.startswith(names.ignored_prefixes)
        if name not in known and not ignored and not _is_spare_bias(name, found, stored):
            raise CheckpointError(
                f"{found.path}: tensor {name} is not part of a {spec.architecture} of this config"
            )


def _is_spare_bias(name: str, found: _Stored, stored: dict[str, StoredMatrix]) -> bool:
    """Whether it is the bias of zeros that GPTQ's tools give every layer that they round (Qwen's own
    checkpoints have it).
    """
    base = name.removesuffix(".bias")
    if base == name or f"{base}.weight" not in stored:
        return False
    if found.header(name)[1] not in _DTYPES or bool(_read_tensor(name, {name: found}).any()):
        raise CheckpointError(
            f"{found.path}: tensor {name} is not all zeros, and this config calls for no bias there"
        )
    return True


def _check_quantized(directory: Path, stored: StoredMatrix, files: dict[str, _Stored]) -> set[str]:
    """The names of the layer's tensors, all of which are as they must be."""
    known: set[str] = set()
    for needed in stored.needed():
        known.add(needed.name)
        if needed.name in files:
            _check_tensor(files[needed.name], needed.name, needed.shapes, needed.dtypes)
        elif not needed.optional:
            raise CheckpointError(
                f"{directory}: tensor {needed.name} is missing; expected one of shape "
                f"{list(needed.shapes[0])}"
            )
    return known


def _check_tensor(
    stored: _Stored, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> None:
    shape, dtype = stored.header(name)
    if shape not in shapes:
        calls_for = " or ".join(str(list(each)) for each in shapes)
        raise CheckpointError(
            f"{stored.path}: tensor {name} has shape {list(shape)}, the config calls for {calls_for}"
        )
    if dtype not in dtypes:
        raise CheckpointError(
            f"{stored.path}: tensor {name} has type {dtype}, expected one of {', '.join(dtypes)}"
        )
