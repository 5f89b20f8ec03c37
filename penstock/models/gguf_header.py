"""GGUF, llama.cpp's file format: its header, checked against the file before anything is read.

    magic, version, number of tensors, number of keys
    keys       name, type, value: configuration, tokenizer, chat template
    tensors    name, dimensions (the fastest first), type, offset into the data
    data       aligned, as many bytes per tensor as its type and shape say

A header is data of strangers: every count, length and offset is compared with what the file has before it is
followed. Arrays stay bytes until they are asked for, so that a vocabulary of 300,000 tokens costs its length
in time, not in objects. The meaning of keys for a model is in `gguf_config.py` and `files.py`, and
that of a tensor's bytes in `engine/gguf.py`. Why no library: docs/design/022-gguf.md.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES_MAX = 256 * 1024 * 1024
"""Published ones have up to 20 MB, nearly all of it vocabulary."""
KEYS_MAX = 65_536
TENSORS_MAX = 1_048_576
KEY_BYTES_MAX = 65_535
NAME_BYTES_MAX = 255
STRING_BYTES_MAX = 16 * 1024 * 1024
ITEMS_MAX = 8_388_608
DIMENSIONS_MAX = 4
DIMENSION_MAX = 1 << 40
ALIGNMENT = 32
"""Unless `general.alignment` says otherwise."""
ALIGNMENT_MAX = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_SIZES = {kind: struct.calcsize(form) for kind, form in _SCALARS.items()}
_LENGTH = struct.Struct("<Q")
_FLOAT32 = struct.Struct("<f").pack
_FLOAT32_MAX = 3e38


class TensorType(NamedTuple):
    """How numbers are stored: blocks of so many, each in so many bytes."""

    name: str
    block: int
    num_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""Those that are read, by their number in the file."""
_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class GgufTensor:
    """Where a tensor is, and what it is made of."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """As everybody else writes it: the fastest dimension last."""
    type: TensorType
    start: int
    """In the file, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) // self.type.block * self.type.num_bytes


@dataclass(slots=True, frozen=True)
class _Items:
    """An array that was not read yet."""

    kind: int
    count: int
    start: int


_Value = int | float | bool | str | _Items


@dataclass(slots=True, frozen=True, kw_only=True)
class GgufFile:
    """One file's header."""

    path: Path
    data: bytes
    """The header itself."""
    keys: dict[str, _Value]
    spans: dict[str, tuple[int, int]]
    """Where each key's name, type and value lie in `data`."""
    tensors: dict[str, GgufTensor]
    tensors_start: int
    """Where the list of tensors begins in `data`."""

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number; `default` where there is no such key.

        Raises:
            CheckpointError: something else stands there.
        """
        return self._typed(key, int, "a whole number", default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """As `integer`, of any number."""
        found = self._typed(key, (int, float), "a number", default)
        return None if found is None else meant(found)

    def text(self, key: str, default: str | None = None) -> str | None:
        """As `integer`, of a string."""
        return self._typed(key, str, "a string", default)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """As `integer`, of true or false."""
        return self._typed(key, bool, "true or false", default)

    def strings(self, key: str) -> list[str] | None:
        """An array of strings; None where there is no such key.

        Raises:
            CheckpointError: something else stands there, or one is not UTF-8.
        """
        items = self._items(key, (_STRING,), "an array of strings")
        if items is None:
            return None
        data, at, found = self.data, items.start, list[str]()
        unpack = _LENGTH.unpack_from
        try:
            for _ in range(items.count):
                (length,) = unpack(data, at)
                at += 8 + length
                found.append(data[at - length : at].decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: {key}: entry {len(found)} is not UTF-8; expected strings of UTF-8"
            ) from error
        return found

    def numbers(self, key: str) -> tuple[Any, ...] | None:
        """An array of numbers, as `strings`."""
        items = self._items(key, tuple(_SCALARS), "an array of numbers")
        if items is None:
            return None
        return struct.unpack_from(f"<{items.count}{_SCALARS[items.kind][1]}", self.data, items.start)

    def count(self, key: str) -> int | None:
        """How many entries an array has; None where there is none."""
        found = self.keys.get(key)
        return found.count if isinstance(found, _Items) else None

    def _items(self, key: str, kinds: tuple[int, ...], expected: str) -> _Items | None:
        found = self.keys.get(key)
        if found is None:
            return None
        if not isinstance(found, _Items) or found.kind not in kinds:
            raise CheckpointError(f"{self.path}: {key} is {_show(found)}; expected {expected}")
        return found

    def _typed(self, key: str, kind: Any, expected: str, default: Any) -> Any:  # noqa: ANN401
        found = self.keys.get(key)
        if found is None:
            return default
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: {key} is {_show(found)}; expected {expected}")
        return found


class HeaderReader:
    """Walks through one header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._size = min(len(data), HEADER_BYTES_MAX)

    def read(self) -> GgufFile:
        """All of it.

        Raises:
            CheckpointError: it says what cannot be; named is the first thing that does.
            struct.error: it ends too early.
        """
        if self._bytes(4) != MAGIC:
            raise self._error("does not begin as a GGUF file does")
        version = self._scalar("<I")
        if version not in VERSIONS:
            big_endian = version in [each << 24 for each in VERSIONS]
            said = "is big-endian" if big_endian else f"has version {version} of the format"
            raise self._error(f"{said}; expected version {' or '.join(map(str, VERSIONS))}, little-endian")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        for what, count, limit in (("tensors", num_tensors, TENSORS_MAX), ("keys", num_keys, KEYS_MAX)):
            if count > limit:
                raise self._error(f"says that it has {count} {what}; expected at most {limit}")
        keys: dict[str, _Value] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            begin = self._at
            key = self._text("a key", KEY_BYTES_MAX)
            if key in keys:
                raise self._error(f"has the key {key[:64]!r} twice")
            keys[key] = self._value(key)
            spans[key] = begin, self._at
        tensors_start = self._at
        infos = [self._tensor_info() for _ in range(num_tensors)]
        tensors = self._placed(infos, self._alignment(keys))
        return GgufFile(
            path=self._path,
            data=self._data[: self._at],
            keys=keys,
            spans=spans,
            tensors=tensors,
            tensors_start=tensors_start,
        )

    def _alignment(self, keys: dict[str, _Value]) -> int:
        alignment = keys.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= ALIGNMENT_MAX:
            raise self._error(
                f"general.alignment is {_show(alignment)}; expected a multiple of 8 up to {ALIGNMENT_MAX}"
            )
        return alignment

    def _value(self, key: str) -> _Value:
        kind = self._scalar("<I")
        if kind == _STRING:
            return self._text(key, STRING_BYTES_MAX)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"{key[:64]!r} has the unknown type {kind}")
        found = self._scalar(_SCALARS[kind])
        return bool(found) if kind == _BOOL else found

    def _array(self, key: str) -> _Items:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if count > ITEMS_MAX:
            raise self._error(f"{key[:64]!r} has {count} entries; expected at most {ITEMS_MAX}")
        start = self._at
        if kind == _STRING:
            self._skip_strings(key, count)
        elif kind in _SIZES:
            self._skip(count * _SIZES[kind])
        else:
            raise self._error(f"{key[:64]!r} is an array of type {kind}; expected numbers or strings")
        return _Items(kind, count, start)

    def _skip_strings(self, key: str, count: int) -> None:
        """The loop that a header's time goes to."""
        data, at, size, unpack = self._data, self._at, self._size, _LENGTH.unpack_from
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8 + length
            if at > size:
                raise self._error(f"{key[:64]!r} has a string of {length} bytes, more than the file has")
        self._at = at

    def _tensor_info(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._text("a tensor's name", NAME_BYTES_MAX)
        num_dimensions = self._scalar("<I")
        if not 1 <= num_dimensions <= DIMENSIONS_MAX:
            raise self._error(
                f"tensor {name} has {num_dimensions} dimensions; expected 1 to {DIMENSIONS_MAX}"
            )
        sides = tuple(self._scalar("<Q") for _ in range(num_dimensions))
        number, offset = self._scalar("<I"), self._scalar("<Q")
        if not all(sides) or prod(sides) > DIMENSION_MAX:
            raise self._error(f"tensor {name} has shape {list(sides[::-1])}, which no tensor has")
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            given = _OTHERS.get(number, f"the unknown type {number}")
            raise self._error(f"tensor {name} is {given}, which is not read; expected one of {known}")
        if sides[0] % kind.block:
            raise self._error(
                f"tensor {name} has rows of {sides[0]} numbers; expected a multiple of {kind.block} for "
                f"{kind.name}"
            )
        return name, sides[::-1], kind, offset

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], TensorType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors by name: in order, none outside the file and none on another."""
        begin, end = -(-self._at // alignment) * alignment, len(self._data)
        found: dict[str, GgufTensor] = {}
        taken, before = begin, "the header"
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            tensor = GgufTensor(self._path, name, shape, kind, begin + offset)
            if name in found:
                raise self._error(f"has the tensor {name} twice")
            if offset % alignment:
                raise self._error(
                    f"tensor {name} is at offset {offset}; expected a multiple of {alignment} "
                    f"(general.alignment)"
                )
            if tensor.start + tensor.num_bytes > end:
                raise self._error(
                    f"tensor {name} needs {tensor.num_bytes} bytes from byte {tensor.start} on, but the file "
                    f"has {end} (truncated?)"
                )
            if tensor.start < taken:
                raise self._error(f"tensor {name} begins within {before}")
            taken, before = tensor.start + tensor.num_bytes, f"tensor {name}"
            found[name] = tensor
        return {name: found[name] for name, *_ in infos}

    def _text(self, what: str, bytes_max: int) -> str:
        length = self._scalar("<Q")
        if length > bytes_max:
            raise self._error(f"{what[:64]!r} would have {length} bytes; expected at most {bytes_max}")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what[:64]!r} is not UTF-8") from error

    def _scalar(self, form: str) -> Any:  # noqa: ANN401
        (found,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _bytes(self, count: int) -> bytes:
        begin = self._at
        self._skip(count)
        return self._data[begin : self._at]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > self._size:
            raise self._error(
                f"ends within its header (truncated?), or that has more than {HEADER_BYTES_MAX} bytes"
            )

    def _error(self, said: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {said}")


def _show(value: object) -> str:
    return f"an array of {value.count}" if isinstance(value, _Items) else repr(value)[:64]


def meant(number: float) -> float:
    """The shortest decimal number that float32 rounds to this: 1e-6 was meant, and not 9.99999997e-7."""
    if not abs(number) < _FLOAT32_MAX:
        return number
    short = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((each for each in short if _FLOAT32(each) == _FLOAT32(number)), float(number))
