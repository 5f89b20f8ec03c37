"""Tokens of texts and of pairs of them for models that make vectors, cut to what the model takes."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import tokenizers

from penstock.text.tokenizer import Tokenizer, check_unicode


class TextTokens(NamedTuple):
    """One text, or one pair."""

    ids: tuple[int, ...]
    num_first: int = 0
    """Of a pair whose model tells the two apart: leading tokens that belong to the first; else 0."""


def text_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], *, limit: int = 0, add_special_tokens: bool = True
) -> list[TextTokens]:
    """Token ids of each text; its end is left out beyond `limit` tokens, but nothing put around it.
    0: nothing is left out.

    Raises:
        InvalidRequest: a text is not Unicode.
    """
    for text in texts:
        check_unicode(text)
    found = tokenizer.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [TextTokens(_kept(each.ids, each.sequence_ids, limit)) for each in found]


def pair_tokens(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, limit: int = 0
) -> Iterator[TextTokens]:
    """The same of pairs, one after the other as they are asked for: a query that stands in each of them may
    be long, and together they may be thousands of times what was sent. Each text is tokenized once. Of pairs
    that are too long the ends are left out of the longer text first.

    Raises:
        InvalidRequest: a text is not Unicode.
    """
    if not pairs:
        return
    texts = list(dict.fromkeys(chain.from_iterable(pairs)))
    for text in texts:
        check_unicode(text)
    library = tokenizer.library
    encodings = library.encode_batch_fast(texts, add_special_tokens=False)
    found = {text: each.ids for text, each in zip(texts, encodings, strict=True)}
    sample = max(texts, key=lambda text: bool(found[text]))
    marks = _Marks(library, sample)
    for one, other in pairs:
        yield marks.around(found[one], found[other], limit)


class _Marks:
    """The tokens that a tokenizer puts before, between and behind two texts, the first one first."""

    def __init__(self, library: tokenizers.Tokenizer, text: str) -> None:
        """`text` is any that has tokens: its pair with itself shows them."""
        both = library.encode_batch_fast([text, text], add_special_tokens=False)
        pair, num = library.post_process(both[0], both[1]), len(both[0])
        places = [i for i, is_mark in enumerate(pair.special_tokens_mask) if not is_mark]
        ends = (places[0], places[num - 1] + 1, places[num], places[-1] + 1) if num else (0, 0, 0, 0)
        cuts = [slice(0, ends[0]), slice(ends[1], ends[2]), slice(ends[3], None)]
        self._before, self._between, self._behind = (tuple(pair.ids[cut]) for cut in cuts)
        self._num = sum(len(pair.ids[cut]) for cut in cuts)
        types = pair.type_ids
        self._tells_apart = any(types)
        self._first_marks = sum(types[cut].count(0) for cut in cuts)
        self._first_texts = [types[end] == 0 for end in (ends[0], ends[2])] if num else [True, True]

    def around(self, one: Sequence[int], other: Sequence[int], limit: int) -> TextTokens:
        """A pair, of at most so many tokens; 0: of any number."""
        surplus = len(one) + len(other) + self._num - limit
        if limit and surplus > 0:
            room = max(0, len(one) + len(other) - surplus)
            short = min(len(one), len(other), room // 2)
            is_longer = len(one) > len(other)
            kept = (room - short, short) if is_longer else (short, room - short)
            one, other = one[: kept[0]], other[: kept[1]]
        num_first = 0
        if self._tells_apart:
            lengths = zip((len(one), len(other)), self._first_texts, strict=True)
            num_first = self._first_marks + sum(length for length, is_first in lengths if is_first)
        return TextTokens((*self._before, *one, *self._between, *other, *self._behind), num_first)


def _kept(values: Sequence[int], sequences: Sequence[int | None], limit: int) -> tuple[int, ...]:
    """The rest of a text's tokens if at most so many may stay. `sequences`: None of a token that was put
    around the text.
    """
    surplus = len(values) - limit
    if not limit or surplus <= 0:
        return tuple(values)
    left = max(0, sequences.count(0) - surplus)
    found = list[int]()
    for value, sequence in zip(values, sequences, strict=True):
        if sequence is None:
            found.append(value)
        elif left:
            left -= 1
            found.append(value)
    return tuple(found)
