"""A model's small files: those in its directory, or, of a GGUF file, what they would be.

A model is a path, a directory or a GGUF file, everywhere behind `config/checkpoints.py`. So `read_file` of
`model.gguf/tokenizer.json` is made of the file's keys.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, HfConfig, read_config_file
from penstock.models.gguf_config import gguf_config, read_gguf
from penstock.models.gguf_tokenizer import GgufVocabulary

_MADE: dict[str, Callable[[GgufVocabulary], dict[str, Any]]] = {
    "tokenizer.json": GgufVocabulary.tokenizer,
    "tokenizer_config.json": GgufVocabulary.config,
    "generation_config.json": GgufVocabulary.generation,
}


def is_gguf(model: Path) -> bool:
    """Whether a model is a GGUF file: the only kind that is no directory."""
    return model.is_file()


def has_file(path: Path) -> bool:
    """Whether the model `path.parent` has a file `path.name`."""
    return path.name in _MADE if is_gguf(path.parent) else path.exists()


def read_file(path: Path, bytes_max: int) -> bytes:
    """The file `path.name` of the model `path.parent`.

    Raises:
        CheckpointError: it is missing, unreadable or larger than `bytes_max`.
    """
    if is_gguf(path.parent):
        return _made(path.parent, path.name)
    try:
        size = path.stat().st_size
        if size > bytes_max:
            raise CheckpointError(f"{path}: {size} bytes is over the bound of {bytes_max}")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_config(model: Path) -> HfConfig:
    """The configuration of a model.

    Raises:
        CheckpointError: there is no such model or file, or a field has the wrong type or an absurd size.
    """
    return gguf_config(read_gguf(model)) if is_gguf(model) else read_config_file(model / CONFIG_FILE)


def changed_ns(model: Path) -> int:
    """When the model was last changed."""
    return (model if is_gguf(model) else model / CONFIG_FILE).stat().st_mtime_ns


def _made(model: Path, name: str) -> bytes:
    make = _MADE.get(name)
    if make is None:
        raise CheckpointError(f"{model}: a GGUF file has no {name}")
    found = model.stat()
    return msgspec.json.encode(make(_vocabulary(model, found.st_size, found.st_mtime_ns, found.st_ino)))


@lru_cache(maxsize=1)
def _vocabulary(model: Path, _size: int, _mtime_ns: int, _inode: int) -> GgufVocabulary:
    """Its files are read one after the other."""
    return GgufVocabulary(read_gguf(model))
