"""Tokenizers and templates from GGUF files give the ids and texts of those that the files were made from."""

import json
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import add_bytes_tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, trainers
from transformers import AutoTokenizer

from penstock.config.checkpoints import resolve
from penstock.errors import CheckpointError
from penstock.models.files import SPLITS
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer

DEMO = resolve("penstock-demo-mini")
TEXTS = (
    "Hello world, it's 12345 o'clock and we'll DON'T 3.14",
    "  two  spaces\tand tabs\r\n\n\nlines  ",
    "Ünïcödé, 日本語 and ½ ② emoji \U0001f600 e\u0301",
    '<|im_start|>user\nHi<|im_end|>\n<tool_call>{"a": 1}</tool_call>',
    "",
    " ",
)
WORDS = "the cat sat on the mat and the dog ran to the river where water turns wheels all day long "


def write(path: Path, add: Any, **keys: Any) -> Path:
    """A file with a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    for name, value in keys.items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        kind(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_demo_models_tokenizer_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: add_bytes_tokenizer(writer, DEMO, 4096))
    found, right = Tokenizer.load(path), Tokenizer.load(DEMO)
    assert found.eos_ids == right.eos_ids
    assert found.special_ids == right.special_ids
    for text in TEXTS:
        ids = found.encode(text)
        if "\u0301" not in text:  # Qwen's composes what was written apart.
            assert ids == right.encode(text)
            assert found.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hi"}]
    templates = [ChatTemplate.load(each, wall_ns=time.time_ns) for each in (path, DEMO)]
    assert templates[0].render(messages) == templates[1].render(messages)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "smollm"])
def test_words_are_cut_as_transformers_cuts_them(pre: str, tmp_path: Path) -> None:
    """A second reader of the same file, with rules of its own."""
    write(tmp_path / "m.gguf", lambda writer: add_bytes_tokenizer(writer, DEMO, 4096, pre))
    found = Tokenizer.load(tmp_path / "m.gguf")
    if pre == "smollm":  # That reader does not know it: digits alone, else as GPT-2.
        assert [len(found.decode([i])) for i in found.encode("1234")] == [1, 1, 1, 1]
        return
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS[:3]:
        text = text.replace("e\u0301", "")
        assert list(found.encode(text)) == other.encode(text, add_special_tokens=False), text


def sentencepiece() -> tuple[Library, list[str]]:
    """A vocabulary such as SentencePiece makes, and its tokens in the order of their ids."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    library.train_from_iterator([WORDS * 3, "Wheels, rivers; cats? 0123456789"], trainer)
    vocab = library.get_vocab()
    return library, sorted(vocab, key=vocab.__getitem__)


def add_sentencepiece(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_merges_follow_from_scores(tmp_path: Path) -> None:
    library, tokens = sentencepiece()
    path = write(tmp_path / "m.gguf", lambda writer: add_sentencepiece(writer, tokens))
    found, other = Tokenizer.load(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("the cat ran", "where the Wheels turn; 42", "日本 and cats", WORDS, "a  b"):
        ids = list(found.encode(text))
        assert ids == library.encode(text, add_special_tokens=False).ids, text
        assert ids == other.encode(text, add_special_tokens=False), text
        assert found.decode(ids) == text
        assert list(found.encode(text, add_special_tokens=True)) == [1, *ids]
    assert found.eos_ids == (2,)
    assert list(found.encode("</s>")) == [2]


@pytest.mark.parametrize(
    ("keys", "begins", "ends"),
    [({}, True, False), ({"add_bos_token": False}, False, False), ({"add_eos_token": True}, True, True)],
)
def test_flags_say_what_comes_around(keys: dict[str, bool], begins: bool, ends: bool, tmp_path: Path) -> None:
    _, tokens = sentencepiece()
    path = write(tmp_path / "m.gguf", lambda writer: add_sentencepiece(writer, tokens), **keys)
    ids = Tokenizer.load(path).encode("cat", add_special_tokens=True)
    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)


def test_without_a_prefix_nothing_is_put_before(tmp_path: Path) -> None:
    _, tokens = sentencepiece()
    path = write(
        tmp_path / "m.gguf", lambda writer: add_sentencepiece(writer, tokens), add_space_prefix=False
    )
    found = Tokenizer.load(path)
    assert found.decode(found.encode(" cat")) == " cat"
    assert found.encode("cat") != found.encode(" cat")


@pytest.mark.parametrize(
    ("add", "keys", "words"),
    [
        (lambda writer: None, {}, "model is 'none', which is not read; expected 'gpt2' or 'llama'"),
        (lambda writer: None, {"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        (lambda writer: None, {"model": "llama"}, "tokenizer.ggml.tokens has 0 entries"),
        (
            lambda writer: add_bytes_tokenizer(writer, DEMO, 4096, "unheard-of"),
            {},
            "tokenizer.ggml.pre is 'unheard-of'; expected one of a.x-4.0",
        ),
        (
            lambda writer: add_bytes_tokenizer(writer, DEMO, 4096),
            {"bos_token_id": 4096},
            "tokenizer.ggml.bos_token_id is 4096; expected one of the 4096 tokens",
        ),
        (
            lambda writer: (
                writer.add_tokenizer_model("gpt2"),
                writer.add_tokenizer_pre("qwen2"),
                writer.add_token_list(["a", "b"]),
                writer.add_token_merges(["a c"]),
            ),
            {},
            "tokenizer.ggml.merges has 'a c'; expected two tokens that make one",
        ),
        (
            lambda writer: (
                writer.add_tokenizer_model("llama"),
                writer.add_token_list(["a", "b"]),
                writer.add_token_scores([0.0] * 3),
            ),
            {},
            "tokenizer.ggml.scores has 3 entries; expected one for each of 2 tokens",
        ),
        (
            lambda writer: (
                writer.add_tokenizer_model("llama"),
                writer.add_token_list(["a", "x" * 40_000]),
                writer.add_token_scores([0.0] * 2),
            ),
            {},
            "tokenizer.ggml.tokens are too long for a SentencePiece vocabulary",
        ),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(add: Any, keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", add, **keys)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_every_rule_is_one_that_the_library_takes() -> None:
    for rules in set(SPLITS.values()):
        steps = [
            {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
            for rule in rules
        ]
        model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
        Library.from_str(
            json.dumps({"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})
        )
