"""The content of a checkpoint, as two digests that are made in milliseconds, however large it is.

    checkpoint   config.json, the header of every safetensors file (names, types, shapes, offsets), and a page
                 of bytes from the middle of each tensor, or, where there are more than 1,024, of that many
                 spread evenly and one of every file
    tokenizer    its files, whole

Of a GGUF file: the keys that are no labels and the list of tensors, in place of config.json and headers; and
the keys of the tokenizer.

Only contents count: a directory that was renamed, moved or copied, or that is a hub snapshot of links into
`blobs/`, has the same digests. Reading all of a checkpoint would take minutes, so two checkpoints that differ
only where no page was taken have one digest; training, merging or rounding changes nearly all bytes of the
tensors that it touches. Why not the hub's own blob ids: see docs/design/009-model-identity.md.
"""

import hashlib
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from penstock import __version__
from penstock.config.tree import EngineConfig
from penstock.engine.loader import checkpoint_files
from penstock.errors import CheckpointError
from penstock.kv.hashing import Computation
from penstock.models.config import CONFIG_FILE
from penstock.models.files import is_gguf
from penstock.models.gguf_config import read_gguf
from penstock.models.gguf_header import GgufFile
from penstock.text.tokenizer import decode_json, read_bytes

SAMPLES_MAX = 1024
"""Pages that are read of a checkpoint, beside one for each file."""
SAMPLE_BYTES = 4096
"""As many as storage reads at least, and enough that rounding to bfloat16 cannot hide that a tensor was
trained."""
HEADER_BYTES_MAX = 100_000_000
"""The bound of the format itself."""
_LABELS = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Of config.json: where a checkpoint came from and what wrote it, which no computation depends on."""
_GGUF_META, _GGUF_TOKENIZER = "general.", "tokenizer."
_GGUF_COMPUTED = frozenset({"general.architecture", "general.alignment"})
"""Of the keys about the file those that are no labels."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_THREADS = 8
"""That open and read files."""


T = TypeVar("T")
R = TypeVar("R")


class Fingerprint(NamedTuple):
    """Of one directory."""

    checkpoint: str
    tokenizer: str


RANDOM_SEED = 0
"""Of the weights of `load_format: random`."""


class _Entry(msgspec.Struct, gc=False):
    """One tensor in a header. The header's metadata is read as one without bytes."""

    data_offsets: tuple[int, int] = (0, 0)


_headers = msgspec.json.Decoder(dict[str, _Entry])


def identify(directory: Path, config: EngineConfig, *, dtype: str, kernels: str) -> str:
    """The identity of what a worker computes that serves `directory` with this configuration.

    Raises:
        CheckpointError: a file is missing, or cannot be read.
    """
    random_seed = RANDOM_SEED if config.load_format == "random" else None
    files = fingerprint(directory, random_seed=random_seed)
    return Computation(
        checkpoint=files.checkpoint,
        tokenizer=files.tokenizer,
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        quantization=config.quantization,
        kernels=f"penstock {__version__} {kernels}",
    ).identity


def name_of(dtype: torch.dtype) -> str:
    """As in `ModelInfo.dtype`."""
    return str(dtype).removeprefix("torch.")


def torch_kernels() -> str:
    """Names torch's products on this processor: which bits they give depends on its version and on the
    instructions it uses.
    """
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"


def fingerprint(directory: Path, *, random_seed: int | None = None) -> Fingerprint:
    """The digests of a directory, or of a GGUF file.

    With `random_seed` its weights are made up, and its files of them do not count.

    Raises:
        CheckpointError: a file is missing, or cannot be read.
    """
    if is_gguf(directory):
        return _gguf_fingerprint(directory, random_seed)
    checkpoint = hashlib.sha256(_config(directory))  # Many processors have instructions for it.
    with ExitStack() as opened, ThreadPoolExecutor(_THREADS, thread_name_prefix="fingerprint") as threads:
        tokenizer = threads.submit(_tokenizer, directory)
        if random_seed is None:
            files = _by_parts(threads, partial(_open, opened), checkpoint_files(directory))
            for part in _samples(files, threads):
                checkpoint.update(part)
        else:
            checkpoint.update(f"random {random_seed}".encode())
        return Fingerprint(checkpoint.hexdigest(), tokenizer.result())


def _tokenizer(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = directory / name
        if path.exists():
            content = read_bytes(path)
            digest.update(f"{name} {len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _config(directory: Path) -> bytes:
    """config.json without labels, in one spelling."""
    path = directory / CONFIG_FILE
    fields = decode_json(path, read_bytes(path), dict[str, Any])
    kept = {name: value for name, value in fields.items() if name not in _LABELS}
    return msgspec.json.encode(kept, order="deterministic")


def _gguf_fingerprint(path: Path, random_seed: int | None) -> Fingerprint:
    gguf = read_gguf(path)
    checkpoint, tokenizer = hashlib.sha256(), hashlib.sha256()
    for key, (start, end) in gguf.first.spans.items():
        if key.startswith(_GGUF_TOKENIZER):
            tokenizer.update(gguf.first.data[start:end])
        elif not key.startswith(_GGUF_META) or key in _GGUF_COMPUTED:
            checkpoint.update(gguf.first.data[start:end])
    if random_seed is not None:
        checkpoint.update(f"random {random_seed}".encode())
    else:
        with ExitStack() as opened, ThreadPoolExecutor(_THREADS, thread_name_prefix="fingerprint") as threads:
            files = (_keep(_GgufWeights(file), opened) for file in gguf.files)
            for part in _samples(files, threads):
                checkpoint.update(part)
    return Fingerprint(checkpoint.hexdigest(), tokenizer.hexdigest())


def _by_parts(
    threads: ThreadPoolExecutor, do: Callable[[Sequence[T]], list[R]], items: Sequence[T]
) -> Iterator[R]:
    """Each thread does a part of the items, so that storage answers several requests at once. In order."""
    size = -(-len(items) // _THREADS) or 1
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    for done in threads.map(do, parts):
        yield from done


def _open(opened: ExitStack, paths: Sequence[Path]) -> "list[_File]":
    return [_keep(_SafetensorsFile(path), opened) for path in paths]


def _keep(file: "_File", opened: ExitStack) -> "_File":
    """Close the file when all is done."""
    opened.callback(file.close)
    return file


def _samples(opened: "Iterable[_File]", threads: ThreadPoolExecutor) -> Iterator[bytes]:
    """The parts of the files of weights that count: their headers, then the samples."""
    files: list[_File] = []
    for file in opened:
        files.append(file)
        yield len(file.header).to_bytes(8, "little") + file.header
    chosen = [(file, *place) for file, indices in _chosen(files) for place in map(file.middle, indices)]
    yield from _by_parts(threads, _read_pages, chosen)


def _read_pages(pages: "Sequence[tuple[_File, int, int]]") -> list[bytes]:
    """All are asked for before the first one is read."""
    for file, start, size in pages:
        os.posix_fadvise(file.descriptor, start, size, os.POSIX_FADV_WILLNEED)
    return [file.read(start, size) for file, start, size in pages]


def _chosen(files: Sequence["_File"]) -> Iterator[tuple["_File", Sequence[int]]]:
    """Of each file some of its tensors: one of every so many, and at least one."""
    step = -(-sum(file.num_tensors for file in files) // SAMPLES_MAX) or 1
    for number, file in enumerate(files):
        # Which one of so many changes: files repeat the same few kinds in the same order, and no kind may be
        # passed over for good.
        found = (first + _scattered(number, first) % step for first in range(0, file.num_tensors, step))
        yield file, [min(index, file.num_tensors - 1) for index in found]


def _scattered(*numbers: int) -> int:
    """The same for the same numbers, and with no pattern (Fibonacci hashing)."""
    return sum((number + 1) * 0x9E3779B97F4A7C15 for number in numbers) % (1 << 64) >> 40


class _File(ABC):
    """An open file of weights."""

    kind: str
    header: bytes
    """The description of its tensors."""
    num_tensors: int

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        os.close(self.descriptor)

    @abstractmethod
    def middle(self, index: int) -> tuple[int, int]:
        """Where the page of this tensor is, and how large."""

    def read(self, start: int, size: int) -> bytes:
        try:
            found = os.pread(self.descriptor, size, start)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error.strerror}") from error
        if len(found) < size:
            raise CheckpointError(f"{self._path}: not a whole {self.kind} file (truncated?)")
        return found


class _GgufWeights(_File):
    """A GGUF file; its header was checked against its size when it was read."""

    kind = "GGUF"

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.path)
        self.header = file.data[file.tensors_start :]
        self._tensors = list(file.tensors.values())
        self.num_tensors = len(self._tensors)

    def middle(self, index: int) -> tuple[int, int]:
        tensor = self._tensors[index]
        size = min(tensor.num_bytes, SAMPLE_BYTES)
        return tensor.start + (tensor.num_bytes - size) // 2, size


class _SafetensorsFile(_File):
    """A safetensors file."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.header = self._read_header()
            self._tensors = list(_headers.decode(self.header).values())
            """The metadata, if there is any, counts as one without bytes."""
            self.num_tensors = len(self._tensors)
        except CheckpointError:
            self.close()
            raise
        except msgspec.DecodeError as error:
            self.close()
            raise CheckpointError(f"{path}: its header is not one of safetensors: {error}") from error
        self._num_bytes = os.fstat(self.descriptor).st_size

    def middle(self, index: int) -> tuple[int, int]:
        (start, end), begin = self._tensors[index].data_offsets, 8 + len(self.header)
        if not 0 <= start <= end <= self._num_bytes - begin:
            raise CheckpointError(f"{self._path}: its header names bytes that the file does not have")
        size = min(end - start, SAMPLE_BYTES)
        return begin + start + (end - start - size) // 2, size

    def _read_header(self) -> bytes:
        size = int.from_bytes(self.read(0, 8), "little")
        if size > HEADER_BYTES_MAX:
            raise CheckpointError(
                f"{self._path}: its header would have {size} bytes, which no safetensors file has"
            )
        return self.read(8, size)
