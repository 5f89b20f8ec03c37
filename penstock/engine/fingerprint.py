"""What is in a checkpoint directory, as two digests that are made in milliseconds, however large it is.

    checkpoint   config.json, the header of every safetensors file (names, types, shapes, offsets), and a page of bytes from the
                 middle of up to 1,024 tensors: of every tensor where there are no more, else evenly spread, and of every file
    tokenizer    its files, whole

Only contents count: a directory that was renamed, moved or copied, or that is a hub snapshot of links into `blobs/`, has the
same digests. Reading all of a checkpoint would take minutes, so two checkpoints that differ only where no page was taken have
one digest; training, merging or rounding changes nearly all bytes of the tensors that it touches. Why not the hub's
own blob ids: see docs/design/009-model-identity.md.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from penstock import __version__
from penstock.config.tree import EngineConfig
from penstock.engine.loader import checkpoint_files
from penstock.engine.models.config import CONFIG_FILE
from penstock.errors import CheckpointError
from penstock.kv.identity import Computation
from penstock.text.files import decode_json, read_bytes

SAMPLES_MAX = 1024
"""Pages that are read of a checkpoint, beside one for each file."""
SAMPLE_BYTES = 4096
"""As many as storage reads at least, and enough that rounding to bfloat16 cannot hide that a tensor was trained."""
HEADER_BYTES_MAX = 100_000_000
"""The bound of the format itself."""
_LABELS = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Of config.json: where a checkpoint came from and what wrote it, which no computation depends on."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class Fingerprint(NamedTuple):
    """Of one directory."""

    checkpoint: str
    tokenizer: str


class _Entry(msgspec.Struct):
    """One tensor in a header. The header's metadata is read as one without bytes."""

    data_offsets: tuple[int, int] = (0, 0)


class _Sample(NamedTuple):
    file: int
    start: int
    size: int


_headers = msgspec.json.Decoder(dict[str, _Entry])


def identify(directory: Path, config: EngineConfig, *, dtype: str, kernels: str) -> str:
    """The identity of what a worker computes that serves `directory` with this configuration.

    Raises:
        CheckpointError: a file is missing, or cannot be read.
    """
    random_seed = config.seed if config.load_format == "random" else None
    files = fingerprint(directory, random_seed=random_seed)
    return Computation(
        checkpoint=files.checkpoint,
        tokenizer=files.tokenizer,
        dtype=dtype,
        kv_dtype=dtype,
        quantization=config.quantization,
        kernels=f"penstock {__version__} {kernels}",
    ).identity


def name_of(dtype: torch.dtype) -> str:
    """As in `ModelInfo.dtype`."""
    return str(dtype).removeprefix("torch.")


def torch_kernels() -> str:
    """Names torch's products on this processor: which bits they give depends on its version and on the instructions it uses."""
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"


def fingerprint(directory: Path, *, random_seed: int | None = None) -> Fingerprint:
    """The digests of a directory. With `random_seed` its weights are made up, and its files of them do not count.

    Raises:
        CheckpointError: a file is missing, or cannot be read.
    """
    checkpoint = hashlib.blake2b(_config(directory), digest_size=32, person=b"penstock weights")
    if random_seed is None:
        for part in _weights(checkpoint_files(directory)):
            checkpoint.update(part)
    else:
        checkpoint.update(f"random {random_seed}".encode())
    tokenizer = hashlib.blake2b(digest_size=32, person=b"penstock tokens")
    for name in _TOKENIZER_FILES:
        path = directory / name
        if path.exists():
            content = read_bytes(path)
            tokenizer.update(f"{name} {len(content)}\0".encode() + content)
    return Fingerprint(checkpoint.hexdigest(), tokenizer.hexdigest())


def _config(directory: Path) -> bytes:
    """config.json without labels, in one spelling."""
    path = directory / CONFIG_FILE
    fields = decode_json(path, read_bytes(path), dict[str, Any])
    kept = {name: value for name, value in fields.items() if name not in _LABELS}
    return msgspec.json.encode(kept, order="deterministic")


def _weights(paths: Sequence[Path]) -> Iterator[bytes]:
    """What counts of the files of weights: their headers, then the samples.

    All pages are asked for before the first one is read, so that storage fetches them side by side.
    """
    with ExitStack() as stack:
        opened: list[int] = []
        tensors: list[_Sample] = []
        first: list[int] = []
        for number, path in enumerate(paths):
            descriptor = _open(path)
            stack.callback(os.close, descriptor)
            opened.append(descriptor)
            header = _header(path, descriptor)
            first.append(len(tensors))
            tensors += _middles(path, number, descriptor, header)
            yield len(header).to_bytes(8, "little") + header
        chosen = _chosen(tensors, first)
        for each in chosen:
            os.posix_fadvise(opened[each.file], each.start, each.size, os.POSIX_FADV_WILLNEED)
        for each in chosen:
            yield _read(paths[each.file], opened[each.file], each.start, each.size)


def _chosen(tensors: Sequence[_Sample], first: Iterable[int]) -> list[_Sample]:
    """Evenly spread over all tensors, and the first one of every file."""
    count = min(len(tensors), SAMPLES_MAX)
    spread = (i * len(tensors) // count for i in range(count))
    chosen = {*spread, *(index for index in first if index < len(tensors))}
    return [tensors[index] for index in sorted(chosen)]


def _header(path: Path, descriptor: int) -> bytes:
    length = int.from_bytes(_read(path, descriptor, 0, 8), "little")
    if length > HEADER_BYTES_MAX:
        raise CheckpointError(f"{path}: its header would have {length} bytes, which no safetensors file has")
    return _read(path, descriptor, 8, length)


def _middles(path: Path, number: int, descriptor: int, header: bytes) -> list[_Sample]:
    """The middle page of every tensor of a file that has bytes."""
    try:
        entries = _headers.decode(header)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: its header is not one of safetensors: {error}") from error
    begin, size = 8 + len(header), os.fstat(descriptor).st_size
    found: list[_Sample] = []
    for entry in entries.values():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= size - begin:
            raise CheckpointError(f"{path}: its header names bytes that the file does not have")
        if (length := end - start) > SAMPLE_BYTES:
            start, length = start + (length - SAMPLE_BYTES) // 2, SAMPLE_BYTES
        if length:
            found.append(_Sample(number, begin + start, length))
    return found


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read(path: Path, descriptor: int, start: int, size: int) -> bytes:
    try:
        found = os.pread(descriptor, size, start)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(found) < size:
        raise CheckpointError(f"{path}: not a whole safetensors file (truncated?)")
    return found
