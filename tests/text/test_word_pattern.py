"""Ids by words are the library's, or the library is asked; patterns split as the library's do."""

import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Split

from penstock.text import tokenizer, word_pattern
from penstock.text.tokenizer import AddedToken, Tokenizer, WordCache
from penstock.text.word_pattern import alternatives, ascii_pattern

DEMO = Path(__file__).parents[2] / "models" / "penstock-demo-mini"
GPT2 = word_pattern._GPT2
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BITS = (
    " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", "a", "Z", "the", "The", " lake", "HTTPServer", "'s", "'LL",
    "don't", "7", "123", "4,567.89", "!", "...", "://", "<|", "|>", "im_start", "<|im_start|>", "<|im_end|>",
    "<tool_call>", "{", '"', "\\", "/", "_", "-", "(x)",
)  # fmt: skip
texts = st.lists(st.sampled_from(BITS) | st.text(st.characters(max_codepoint=126), max_size=4)).map("".join)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


def library_ids(demo: Tokenizer, text: str) -> tuple[int, ...]:
    (encoding,) = demo.library.encode_batch_fast([text], add_special_tokens=False)
    return tuple(encoding.ids)


@settings(max_examples=300)
@given(text=texts)
def test_ids_are_the_librarys_however_often_words_came(demo: Tokenizer, text: str) -> None:
    expected = library_ids(demo, text)
    for _ in range(3):
        assert demo.encode(text) == expected


@pytest.mark.parametrize("pattern", [GPT2, QWEN, LLAMA, O200K])
@settings(max_examples=150)
@given(text=texts)
def test_python_splits_as_the_library_does(pattern: str, text: str) -> None:
    words = ascii_pattern(pattern)
    assert words is not None
    if tokenizer._PLAIN.fullmatch(text) is None:
        return
    theirs = Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    found = words.findall(text)
    if "".join(found) == text:  # Else the library is asked.
        assert found == [piece for piece, _ in theirs]


def test_bytelevel_that_splits_by_itself_splits_by_this_pattern() -> None:
    text = "It's 12 o'clock:   the lake's\n\n level   is 3.5 m  "
    words = ascii_pattern(GPT2)
    assert words is not None
    theirs = ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str(text)
    assert words.findall(text) == [text[start:end] for _, (start, end) in theirs]


pieces = st.lists(st.sampled_from(("a", "b", "<", "|", ".", " ", "é")), max_size=5).map("".join)


@given(tokens=st.lists(pieces, max_size=12), text=st.lists(pieces, max_size=8).map("".join))
def test_a_tree_of_alternatives_finds_what_a_list_finds_longest_first(tokens: list[str], text: str) -> None:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert re.findall(alternatives(tokens), text) == plain.findall(text)


def test_a_chain_of_tokens_is_no_deep_tree() -> None:
    chain = ["a" * n for n in range(1, 600)]
    assert re.findall(alternatives(chain), "a" * 5000) == ["a" * 599] * 8 + ["a" * 208]


def made(demo: Tokenizer, **other: Any) -> WordCache | None:
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    known = dict[str, Any](
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]},
        model_type="BPE",
        dropout=None,
        added=[
            AddedToken(i, token.content, lstrip=False, rstrip=False, single_word=False, normalized=False)
            for i, token in demo.library.get_added_tokens_decoder().items()
        ],
    )
    return WordCache.of(demo.library, **(known | other))


def test_tokenizers_of_other_kinds_have_none(demo: Tokenizer) -> None:
    assert made(demo) is not None
    assert made(demo, normalizer={"type": "NFC"}) is not None
    assert made(demo, normalizer={"type": "Lowercase"}) is None
    assert made(demo, model_type="Unigram") is None
    assert made(demo, dropout=0.1) is None
    assert made(demo, pre_tokenizer={"type": "Metaspace"}) is None
    assert made(demo, pre_tokenizer=None) is None
    assert made(demo, added=[AddedToken(1, "<|im_start|>")]) is None, "it strips what stands beside it"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+)", r"^a", r"a$", r"\bword", r"[[:alpha:]]+", r"(?<=a)b", r"\p{Han}+", r"[\p{L}&&[a-z]]+",
        r"[\p{L}&&\p{Lu}]+", r"[]a]+", r"[^]a]+", r"[\p{Lt}]|a]", r"[^\p{M}\p{Lm}]|a]", r"[ -\p{L}]+",
    ],
)  # fmt: skip
def test_a_pattern_that_may_mean_something_else_is_not_taken(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def test_a_wrong_pattern_shows_before_it_is_used(demo: Tokenizer) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\S+|\s+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    assert made(demo, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]}) is None


def test_what_it_does_not_know_is_the_librarys(demo: Tokenizer) -> None:
    cache = made(demo)
    assert cache is not None
    for text in (
        "Rücklauf",
        "\x00",
        "a" * (tokenizer.TEXT_CHARS_MAX + 1),
        "x" * (tokenizer.WORD_CHARS_MAX + 1),
    ):
        assert cache.ids_of(text) is None


def test_one_text_brings_few_words_and_all_of_them_have_a_bound(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = made(demo)
    assert cache is not None
    cache._known.clear()
    text = " ".join(f"w{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10]}" for i in range(100))
    assert cache.ids_of(text) is None
    assert len(cache._known) == tokenizer.LEARN_MAX
    monkeypatch.setattr(tokenizer, "WORDS_MAX", 20)
    for _ in range(30):
        cache.ids_of(text)
        assert len(cache._known) <= 20


def test_the_demo_models_tokenizer_has_one(demo: Tokenizer) -> None:
    assert isinstance(demo.library, tokenizers.Tokenizer)
    assert demo._words is not None
