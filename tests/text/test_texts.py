"""Pairs of texts have the tokens that the tokenizer itself gives them, and a small body asks for no more work
than it may.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from vector_models import write_words

from penstock.text.texts import pair_tokens

WORDS = [f"w{i}" for i in range(40)]
STYLES = ("bert", "roberta", "eos")
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tokenizers.Tokenizer]:
    place: Path = tmp_path_factory.mktemp("tokenizers")
    for style in STYLES:
        (place / style).mkdir()
    return {style: write_words(place / style, WORDS, style=style) for style in STYLES}


@given(
    st.sampled_from(STYLES),
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3),
    st.sampled_from((0, 6, 9)),
)
def test_as_the_library_joins_and_cuts_them(libraries, style, pairs, limit) -> None:
    """Its rule is "longest_first"; a mark that stands in a text is the text's."""
    pairs = [*pairs, ("w1 [SEP] w2", "w3")] if style == "bert" else pairs
    library = libraries[style]
    library.no_truncation()
    found = list(pair_tokens(SimpleNamespace(library=library), pairs, limit=limit))
    if limit:
        library.enable_truncation(limit, strategy="longest_first")
    right = [library.encode(one, other) for one, other in pairs]
    assert [each.ids for each in found] == [tuple(each.ids) for each in right]
    firsts = [each.type_ids.count(0) if any(each.type_ids) else 0 for each in right]
    assert [each.num_first for each in found] == firsts


def test_texts_without_tokens(libraries) -> None:
    tokenizer = SimpleNamespace(library=libraries["bert"])
    libraries["bert"].no_truncation()
    (marks,) = pair_tokens(tokenizer, [(" ", "  ")])
    both = libraries["bert"].encode(" ", "  ")
    assert marks.ids == tuple(both.ids)
    half, whole = pair_tokens(tokenizer, [(" ", "w1"), ("w2", "w1")])
    assert half.ids == tuple(libraries["bert"].encode(" ", "w1").ids)
    assert whole.num_first == 3


def test_each_text_is_tokenized_once_and_pairs_are_made_as_they_are_asked_for(libraries) -> None:
    counted: list[int] = []

    class Counting:
        def __init__(self, library: tokenizers.Tokenizer) -> None:
            self.post_process = library.post_process
            self._library = library

        def encode_batch_fast(self, texts, **options):
            counted.append(sum(len(text) for text in texts))
            return self._library.encode_batch_fast(texts, **options)

    library = libraries["bert"]
    library.no_truncation()
    query = " ".join(WORDS * 5)
    pairs = pair_tokens(
        SimpleNamespace(library=Counting(library)), [(query, f"w{i % 40}") for i in range(2000)], limit=8
    )
    assert len(next(pairs).ids) == 8
    assert sum(counted) < 4 * len(query)
