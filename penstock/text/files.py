"""Reading a checkpoint's small JSON files. Knows no model: it only turns trouble into `CheckpointError`."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.errors import CheckpointError

FILE_BYTES_MAX = 256 * 1024 * 1024
"""The largest tokenizer files in use are about 35 MB; more than this is some other file."""

T = TypeVar("T")


def read_bytes(path: Path) -> bytes:
    """The file's content.

    Raises:
        CheckpointError: it is missing, unreadable or absurdly large.
    """
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise CheckpointError(f"{path}: {size} bytes is over the bound of {FILE_BYTES_MAX}")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The file's content as UTF-8.

    Raises:
        CheckpointError: as `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from error


def decode_json(path: Path, data: bytes, kind: type[T]) -> T:
    """Decode `data`, which came from `path`, as JSON of this kind.

    Raises:
        CheckpointError: it is not.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not the JSON that was expected: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path}: nests too deeply") from None


def read_optional_object(path: Path) -> dict[str, Any]:
    """The JSON object in this file; an empty one if there is no such file.

    Raises:
        CheckpointError: the file is there but is not a JSON object.
    """
    return decode_json(path, read_bytes(path), dict[str, Any]) if path.exists() else {}
