"""Texts, and pairs of them, as a model that makes vectors wants them: with what the tokenizer puts around,
cut to what the model takes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.text.tokenizer import Tokenizer, check_unicode


class TextTokens(NamedTuple):
    """One text, or one pair."""

    ids: tuple[int, ...]
    num_first: int = 0
    """Of a pair whose model tells the two apart: leading tokens that belong to the first; else 0."""


def text_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], *, most: int = 0, add_special_tokens: bool = True
) -> list[TextTokens]:
    """Token ids of each text; beyond `most` tokens its end is left out, but nothing of what is put around it.
    0: nothing is left out.

    Raises:
        InvalidRequest: a text is not Unicode.
    """
    for text in texts:
        check_unicode(text)
    found = tokenizer.library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [TextTokens(_kept(each.ids, each.sequence_ids, most)) for each in found]


def pair_tokens(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, most: int = 0) -> list[TextTokens]:
    """The same of pairs. Of those that are too long the ends are left out of the longer text first.

    Raises:
        InvalidRequest: a text is not Unicode.
    """
    for text in {text for pair in pairs for text in pair}:
        check_unicode(text)
    tokens: list[TextTokens] = []
    for each in tokenizer.library.encode_batch_fast(list(pairs)):
        ids = _kept(each.ids, each.sequence_ids, most)
        types = _kept(each.type_ids, each.sequence_ids, most)
        tokens.append(TextTokens(ids, types.count(0) if any(types) else 0))
    return tokens


def _kept(values: Sequence[int], sequences: Sequence[int | None], most: int) -> tuple[int, ...]:
    """What is left of tokens' `values` if at most so many may stay. `sequences`: which text each is of; None:
    it was put around them.
    """
    surplus = len(values) - most
    if not most or surplus <= 0:
        return tuple(values)
    lengths = [sequences.count(0), sequences.count(1)]
    room = max(0, sum(lengths) - surplus)
    shorter, longer = sorted((0, 1), key=lambda i: lengths[i])
    kept = [0, 0]
    kept[shorter] = min(lengths[shorter], room // 2)
    kept[longer] = min(lengths[longer], room - kept[shorter])
    seen, found = [0, 0], list[int]()
    for value, sequence in zip(values, sequences, strict=True):
        if sequence is None:
            found.append(value)
            continue
        seen[sequence] += 1
        if seen[sequence] <= kept[sequence]:
            found.append(value)
    return tuple(found)
