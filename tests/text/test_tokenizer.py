import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from penstock.errors import CheckpointError, InvalidRequest
from penstock.text.tokenizer import GenerationDefaults, Tokenizer, byte_level_bytes, decoding_of

TEXTS = [
    "",
    "hello world",
    "你好,世界 👩‍👩‍👧‍👦",
    "  leading",
    "e\u0301\n\n\tx",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_the_librarys(byte_level: Tokenizer, byte_level_dir: Path, text: str) -> None:
    library = Library.from_file(str(byte_level_dir / "tokenizer.json"))
    library.no_truncation()
    ids = byte_level.encode(text)
    assert list(ids) == library.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        assert byte_level.decode(ids, skip_special_tokens=skip) == library.decode(
            ids, skip_special_tokens=skip
        )


@given(ids=st.lists(st.integers(0, 500), max_size=40), skip=st.booleans())
def test_byte_level_decode_equals_the_library(
    byte_level: Tokenizer, byte_level_dir: Path, ids: list[int], skip: bool
) -> None:
    library = Library.from_file(str(byte_level_dir / "tokenizer.json"))
    assert byte_level.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_any_text_survives(byte_level: Tokenizer, spiece: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text
    if "▁" not in text:  # SentencePiece cannot tell it from a space.
        assert spiece.decode(spiece.encode(text), skip_special_tokens=False) == text


@given(text=st.text(max_size=60))
def test_spiece_decode_equals_the_library(spiece: Tokenizer, spiece_dir: Path, text: str) -> None:
    library = Library.from_file(str(spiece_dir / "tokenizer.json"))
    ids = spiece.encode(text, add_special_tokens=True)
    for skip in (True, False):
        assert spiece.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_bos_comes_from_the_post_processor(byte_level: Tokenizer, spiece: Tokenizer) -> None:
    assert spiece.encode("a", add_special_tokens=True)[0] == 1
    assert spiece.encode("a")[0] != 1
    assert byte_level.encode("a", add_special_tokens=True) == byte_level.encode("a")


def test_long_texts_are_not_truncated(byte_level: Tokenizer) -> None:
    assert len(byte_level.encode("the quick brown fox " * 1000)) > 1000


def test_a_lone_surrogate_is_the_callers_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        byte_level.encode("ab\ud800")


def test_eos_ids_come_from_all_files(byte_level: Tokenizer, spiece: Tokenizer, metaspace: Tokenizer) -> None:
    assert byte_level.eos_ids == (2, 0, 1)
    assert spiece.eos_ids == (2,)
    assert metaspace.eos_ids == ()


def test_special_ids_and_size(byte_level: Tokenizer, spiece: Tokenizer) -> None:
    assert byte_level.special_ids == {0, 1, 2}
    assert spiece.special_ids == {0, 1, 2}
    assert byte_level.vocab_size == byte_level.token_id("ein Wort") + 1
    assert byte_level.token_id("<tool_call>") == byte_level.vocab_size - 2
    assert byte_level.token_id("no such token") is None


def test_token_bytes(byte_level: Tokenizer, spiece: Tokenizer, metaspace: Tokenizer) -> None:
    for tokenizer in (byte_level, spiece):
        ids = tokenizer.encode("x 🎈")
        assert b"".join(map(tokenizer.token_bytes, ids)).lstrip() == "x 🎈".encode()
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert byte_level.token_bytes(10**6) == b""
    assert spiece.token_bytes(3 + 0xE4) == b"\xe4"
    assert spiece.token_text(3 + 0xE4) == "\ufffd"
    assert b"".join(map(metaspace.token_bytes, metaspace.encode("the fox"))) == b" the fox"
    assert metaspace.token_bytes(10**6) == b""


def test_byte_alphabet_is_the_librarys() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_level_bytes(char)[0] for char in ByteLevel.alphabet()) == list(range(256))
    assert byte_level_bytes("a b") == b"a b"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    ],
)
def test_unusual_decoders_have_no_table(decoder: dict | None) -> None:
    assert decoding_of(decoder) is None


def test_generation_defaults(byte_level: Tokenizer, spiece: Tokenizer, tmp_path: Path) -> None:
    assert byte_level.defaults == GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8)
    assert spiece.defaults == GenerationDefaults()


def edited(source: Path, target: Path, name: str, content: str | bytes) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return target


def test_do_sample_false_is_greedy(byte_level_dir: Path, tmp_path: Path) -> None:
    config = json.dumps({"do_sample": False, "temperature": 0.7, "eos_token_id": None})
    tokenizer = Tokenizer.load(edited(byte_level_dir, tmp_path, "generation_config.json", config))
    assert tokenizer.defaults == GenerationDefaults(temperature=0.0)
    assert tokenizer.eos_ids == (2, 1)


@pytest.mark.parametrize("do_sample", [True, False])
def test_repetition_penalty_has_a_default(byte_level_dir: Path, tmp_path: Path, do_sample: bool) -> None:
    config = json.dumps({"do_sample": do_sample, "temperature": 0.7, "repetition_penalty": 1.05})
    tokenizer = Tokenizer.load(edited(byte_level_dir, tmp_path, "generation_config.json", config))
    expected = GenerationDefaults(temperature=0.7 if do_sample else 0.0, repetition_penalty=1.05)
    assert tokenizer.defaults == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", "{}", "Model missing"),
        ("generation_config.json", "[]", "generation_config.json: not the JSON that was expected"),
        ("generation_config.json", '{"top_p": "much"}', r"generation_config.json: .*\$.top_p"),
        ("tokenizer_config.json", "{'a': 1}", "tokenizer_config.json: not the JSON"),
        ("config.json", b"\xff", "config.json: not the JSON"),
    ],
)
def test_broken_files_are_named(
    byte_level_dir: Path, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(edited(byte_level_dir, tmp_path, name, content))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.load(tmp_path)
