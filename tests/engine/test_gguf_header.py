"""Headers of GGUF files by strangers: one message that names the file and what was expected, or a model."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointError
from penstock.models.gguf_config import read_gguf

F32, Q8_0, Q3_K = 0, 8, 11
HUGE = (1 << 63) + 5


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sides: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)


def content(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    data: int = 64,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file with these entries, whatever it says of their number."""
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys + tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


NAME = key("general.name", 8, text("a model"))
WHOLE = content((NAME, key("a.list", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yy"))), (tensor("t"),))


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    found = read_gguf(tmp_path / "m.gguf")
    assert found.first.text("general.name") == "a model"
    assert found.first.strings("a.list") == ["x", "yy"]
    assert found.tensors["t"].shape == (8,)
    assert found.tensors["t"].num_bytes == 32


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are no GGUF file (truncated?)"),
        (b"PK\3\4" + bytes(60), "does not begin as a GGUF file does"),
        (content(version=1), "has version 1 of the format; expected version 2 or 3, little-endian"),
        (content(version=3 << 24), "is big-endian; expected version 2 or 3"),
        (content(counts=(HUGE, 0)), f"says that it has {HUGE} tensors; expected at most 1048576"),
        (content(counts=(0, HUGE)), f"says that it has {HUGE} keys; expected at most 65536"),
        (content(counts=(0, 9), data=0), "ends within its header (truncated?)"),
        (content((struct.pack("<Q", HUGE),)), f"'a key' would have {HUGE} bytes; expected at most 65535"),
        (content((key("k", 8, struct.pack("<Q", HUGE)),)), f"'k' would have {HUGE} bytes"),
        (content((key("k", 8, struct.pack("<Q", 5000)),)), "ends within its header (truncated?)"),
        (content((key("k", 8, text(b"\xff")),)), "'k' is not UTF-8"),
        (content((key("k", 9, struct.pack("<IQ", 4, HUGE)),)), f"'k' has {HUGE} entries; expected at most"),
        (content((key("k", 9, struct.pack("<IQ", 4, 1 << 20)),)), "ends within its header (truncated?)"),
        (content((key("k", 9, struct.pack("<IQ", 9, 1)),)), "'k' is an array of type 9; expected numbers or"),
        (content((key("k", 9, struct.pack("<IQQ", 8, 1, HUGE)),)), f"a string of {HUGE} bytes, more than"),
        (content((key("k", 13, b""),)), "'k' has the unknown type 13"),
        (content((NAME, NAME)), "has the key 'general.name' twice"),
        (content((key("general.alignment", 4, bytes(4)),)), "general.alignment is 0; expected a multiple"),
        (content((key("general.alignment", 4, b"\7\0\0\0"),)), "general.alignment is 7; expected a multiple"),
        (content((key("general.alignment", 8, text("8")),)), "general.alignment is '8'; expected a multiple"),
        (content((), (tensor("t", ()),)), "tensor t has 0 dimensions; expected 1 to 4"),
        (content((), (tensor("t", (1,) * 5),)), "tensor t has 5 dimensions; expected 1 to 4"),
        (content((), (tensor("t", (0, 4)),)), "tensor t has shape [4, 0], which no tensor has"),
        (content((), (tensor("t", (1 << 62, 1 << 62)),)), "which no tensor has"),
        (content((), (tensor("t", (256,), Q3_K),)), "tensor t is Q3_K, which is not read; expected one of"),
        (content((), (tensor("t", (256,), 99),)), "tensor t is the unknown type 99, which is not read"),
        (content((), (tensor("t", (33,), Q8_0),)), "rows of 33 numbers; expected a multiple of 32 for Q8_0"),
        (content((), (tensor("t", (8,), F32, 4),)), "tensor t is at offset 4; expected a multiple of 32"),
        (content((), (tensor("t", (8,), F32, 64),)), "tensor t needs 32 bytes from byte"),
        (content((), (tensor("t", (8,), F32, HUGE // 32 * 32),)), "tensor t needs 32 bytes from byte"),
        (content((), (tensor("t", (16,)), tensor("u", (8,), F32, 32))), "tensor u begins within tensor t"),
        (content((), (tensor("t"), tensor("t", (8,), F32, 32))), "has the tensor t twice"),
        (content((key("split.count", 2, b"\3\0"),)), "is one of 3 files (split.count); expected a name that"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_what_was_expected(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for length in range(len(WHOLE) - 32):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


@given(st.data())
def test_any_other_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is changed, nothing but a typed error comes out, and what is read lies within the file."""
    path = tmp_path_factory.getbasetemp() / "mutant.gguf"
    changed = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(4, len(WHOLE) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        found = read_gguf(path)
    except CheckpointError:
        return
    for each in found.tensors.values():
        assert 0 <= each.start <= each.start + each.num_bytes <= len(changed)
