from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from penstock.text.detokenizer import ByteDetokenizer, PrefixDetokenizer, detokenizer
from penstock.text.tokenizer import Tokenizer

TRICKY = "你好 👩‍👩‍👧‍👦 e\u0301 🇨🇭 ünï ▁ \ufffd x\n\n  end"
texts = st.text(max_size=30) | st.text(alphabet=TRICKY, max_size=30)


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], *, skip: bool = True) -> list[str]:
    """Push `ids` in deltas of the given sizes, then the rest one by one."""
    stream = detokenizer(tokenizer, skip_special_tokens=skip)
    deltas, start = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        deltas.append(stream.push(ids[start : start + size]))
        start += size
    return [*deltas, stream.finish()]


sizes = st.lists(st.integers(0, 5), max_size=10)


@given(ids=st.lists(st.integers(0, 500), max_size=40), sizes=sizes, skip=st.booleans())
def test_any_byte_level_tokens_give_the_decoded_text(
    byte_level: Tokenizer, byte_level_dir: Path, ids: list[int], sizes: list[int], skip: bool
) -> None:
    library = Library.from_file(str(byte_level_dir / "tokenizer.json"))
    deltas = streamed(byte_level, ids, sizes, skip=skip)
    assert "".join(deltas) == library.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 255), max_size=40), sizes=sizes)
def test_any_bytes_give_the_decoded_text(spiece: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    ids = [3 + byte for byte in ids]
    assert "".join(streamed(spiece, ids, sizes)) == spiece.decode(ids)


@pytest.mark.parametrize("family", ["byte_level", "spiece", "metaspace"])
@given(text=texts, sizes=sizes)
def test_a_text_comes_back_whole(
    family: str, byte_level: Tokenizer, spiece: Tokenizer, metaspace: Tokenizer, text: str, sizes: list[int]
) -> None:
    tokenizer = {"byte_level": byte_level, "spiece": spiece, "metaspace": metaspace}[family]
    ids = list(tokenizer.encode(text))
    deltas = streamed(tokenizer, ids, sizes)
    assert "".join(deltas) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(deltas)


def test_half_a_character_is_held_back(byte_level: Tokenizer, spiece: Tokenizer) -> None:
    for tokenizer in (byte_level, spiece):
        ids = tokenizer.encode("🎈")
        assert len(ids) >= 3
        stream = detokenizer(tokenizer)
        assert "".join(stream.push((token,)) for token in ids[:-1]).strip() == ""
        assert stream.push(ids[-1:]) == "🎈"
        assert stream.finish() == ""


def test_a_character_that_never_ends_is_flushed(byte_level: Tokenizer) -> None:
    stream = ByteDetokenizer(byte_level)
    ids = byte_level.encode("🎈")
    assert stream.push(ids[:2]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_inside_a_character_do_not_break_it(byte_level: Tokenizer) -> None:
    ids = list(byte_level.encode("🎈"))
    ids[1:1] = [0, 2]
    assert "".join(streamed(byte_level, ids, [])) == "🎈"


def test_the_space_before_a_spiece_text_is_dropped_once(spiece: Tokenizer) -> None:
    space = spiece.token_id("▁")
    assert space is not None
    deltas = streamed(spiece, [1, space, space, space, *spiece.encode("a")], [1, 1, 1, 1])
    assert "".join(deltas) == "   a"


def test_the_choice_of_detokenizer(byte_level: Tokenizer, metaspace: Tokenizer) -> None:
    assert isinstance(detokenizer(byte_level), ByteDetokenizer)
    assert isinstance(detokenizer(metaspace), PrefixDetokenizer)


def test_prefix_detokenizer_holds_a_bounded_tail(metaspace: Tokenizer) -> None:
    """U+FFFD that is really in the text is shown in the end, and the window stays short."""
    library = Library.from_str(metaspace._library.to_str())
    library.add_tokens(["\ufffd"])
    tokenizer = Tokenizer(library, decoding=None)
    stream = PrefixDetokenizer(tokenizer)
    replacement = tokenizer.token_id("\ufffd")
    shown = "".join(stream.push((replacement,)) for _ in range(1000))
    assert len(shown) >= 990
    assert len(stream._ids) <= 12
    assert shown + stream.finish() == "\ufffd" * 1000
