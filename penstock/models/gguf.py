"""GGUF models: one file, or several that one was split into. The headers are `gguf_header.py`'s."""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.models.gguf_header import MAGIC, GgufFile, GgufTensor, HeaderReader, meant

SUFFIX = ".gguf"
SPLITS_MAX = 4096
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class Gguf:
    """A model of one file, or of several that it was split into."""

    first: GgufFile
    """The one with all keys."""
    files: tuple[GgufFile, ...]
    tensors: dict[str, GgufTensor]
    """Of all files."""

    @property
    def path(self) -> Path:
        """By which it is known."""
        return self.first.path


def starts_as_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> Gguf:
    """The headers of a model's file, and of those that were split from it. The last ones are remembered.

    Raises:
        CheckpointError: a file is missing, truncated, no GGUF file, or says what cannot be.
    """
    first = _read_file(path)
    count = first.integer("split.count", 1)
    assert count is not None
    if count <= 1:
        return Gguf(first, (first,), first.tensors)
    return _joined(first, count)


def split_names(name: str) -> list[str]:
    """The names of all files that belong to one; itself alone if it was not split."""
    found = _SPLIT_NAME.fullmatch(name)
    if found is None:
        return [name]
    stem, _, count = found.groups()
    return [
        f"{stem}-{i:05}-of-{count}{name[-len(SUFFIX) :]}" for i in range(1, min(int(count), SPLITS_MAX) + 1)
    ]


def read_floats(tensor: GgufTensor, count_max: int) -> tuple[float, ...]:
    """The numbers of a small tensor of float32.

    Raises:
        CheckpointError: it is larger, or of another type.
    """
    count = prod(tensor.shape)
    if tensor.type.name != "F32" or count > count_max:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} is {list(tensor.shape)} {tensor.type.name}; expected at "
            f"most {count_max} numbers of F32"
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        return tuple(map(meant, struct.unpack(f"<{count}f", file.read(4 * count))))


def _joined(first: GgufFile, count: int) -> Gguf:
    names = split_names(first.path.name)
    number = first.integer("split.no", 0)
    if count > SPLITS_MAX or len(names) != count:
        raise CheckpointError(
            f"{first.path}: is one of {count} files (split.count); expected a name that ends in "
            f"-00001-of-{min(count, 99_999):05}.gguf"
        )
    if number != 0 or names[0] != first.path.name:
        raise CheckpointError(f"{first.path}: is not the first of its {count} files; give {names[0]}")
    files = [first]
    for i, name in enumerate(names[1:], 1):
        part = _read_file(first.path.with_name(name))
        if part.integer("split.no") != i or part.integer("split.count") != count:
            raise CheckpointError(
                f"{part.path}: split.no and split.count are {part.integer('split.no')} and "
                f"{part.integer('split.count')}; expected {i} and {count}"
            )
        files.append(part)
    tensors: dict[str, GgufTensor] = {}
    for part in files:
        if double := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path}: tensor {min(double)} is in an earlier file too")
        tensors |= part.tensors
    total = first.integer("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{first.path}: the {count} files hold {len(tensors)} tensors; expected {total} "
            f"(split.tensors.count)"
        )
    return Gguf(first, tuple(files), tensors)


def _read_file(path: Path) -> GgufFile:
    try:
        found = path.stat()
        return _remembered(path, found.st_size, found.st_mtime_ns, found.st_ino)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


@lru_cache(maxsize=2)
def _remembered(path: Path, num_bytes: int, _mtime_ns: int, _inode: int) -> GgufFile:
    """Tokenizer, template and configuration are read one after the other: the header is not, each time."""
    if num_bytes < 24:
        raise CheckpointError(f"{path}: {num_bytes} bytes are no GGUF file (truncated?)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return HeaderReader(path, data).read()
        except struct.error as error:
            raise CheckpointError(f"{path}: ends within its header (truncated?)") from error


def experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The matrices of a tensor of experts, `[experts, n, k]`, each by its number within the name."""
    count, *shape = tensor.shape
    base, _, suffix = tensor.name.rpartition(".")
    size = tensor.num_bytes // count
    for e in range(count):
        yield GgufTensor(
            tensor.path, f"{base}.{e}.{suffix}", tuple(shape), tensor.type, tensor.start + e * size
        )
