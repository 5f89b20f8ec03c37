"""Token ids of plain text by its words, most of which came before.

A byte-level BPE tokenizer splits text at its added tokens, then into words by a pattern, and makes tokens of
each word by itself: the ids of a text are those of its words. The library does all of it again for each text,
in twice the time and more. Here words are looked up, for texts and patterns that Python's `re` splits as the
library does: ASCII, and a pattern of classes that are known for it. All else is the library's, and so are a
word's ids.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec
import tokenizers

TEXT_CHARS_MAX = 16 * 1024
"""Longer texts are encoded in a thread, where the library lets others run."""
WORDS_MAX, WORD_CHARS_MAX = 16_384, 128
LEARN_MAX = 8
"""New words that one text may bring: each is a call of the library, and nobody's text may make many."""
LEVELS_MAX = 40
"""Of a tree of alternatives: Python's compiler of patterns recurses, and a file may have any tokens."""
_SPACE = " \\t\\n\\r\\f\\v"
_CLASSES = {
    r"\s": _SPACE, r"\r": r"\r", r"\n": r"\n", r"\p{L}": "a-zA-Z", r"\p{N}": "0-9", r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z", r"\p{Lt}": "", r"\p{Lm}": "", r"\p{Lo}": "", r"\p{M}": "",
}  # fmt: skip
"""The characters of a class in ASCII."""
_PART = re.compile(r"\\p\{\w+\}|\\.|\[\^?|\(\?[:!]|\(\?i:|&&|\}\+|.", re.DOTALL)
_REFUSED = frozenset(("(", "$", "^", ".", "}+"))
"""Outside a set."""
_PLAIN = re.compile(r"[\t\n\r -~]*")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Of a `ByteLevel` that splits by itself."""
_TRIAL = """The 17 quick brown foxes' tails   jumped; it's WE'LL\r

\tdef f(x):
        return x**2  # --> 1,000.5
  """


class AddedToken(msgspec.Struct):
    """As in tokenizer.json; the default of a flag that is not there is that it is set."""

    id: int
    content: str
    lstrip: bool = True
    rstrip: bool = True
    single_word: bool = True
    normalized: bool = True


class WordCache:
    """The words of one tokenizer that came before. One object serves every request and thread."""

    def __init__(
        self, library: tokenizers.Tokenizer, words: re.Pattern[str], added: Sequence[AddedToken]
    ) -> None:
        self._library, self._split_words = library, words.findall
        self._known: dict[str, tuple[int, ...]] = {}
        self._added = {token.content: (token.id,) for token in added}
        self._split_added = re.compile(f"({alternatives(self._added)})").split

    @classmethod
    def of(
        cls,
        library: tokenizers.Tokenizer,
        *,
        normalizer: Mapping[str, Any] | None,
        pre_tokenizer: Mapping[str, Any] | None,
        model_type: str,
        dropout: float | None,
        added: Sequence[AddedToken],
    ) -> "WordCache | None":
        """For the tokenizer that tokenizer.json describes so; None: it is not one of this kind."""
        pattern = _pattern_of(pre_tokenizer)
        if pattern is None or model_type != "BPE" or dropout:
            return None
        if normalizer is not None and normalizer.get("type") != "NFC":
            return None
        if any(each.lstrip or each.rstrip or each.single_word or each.normalized for each in added):
            return None
        made = cls(library, pattern, added)
        trial = _TRIAL + "".join(each.content for each in added[:2] if each.content.isascii()) + _TRIAL
        for _ in range(len(trial)):  # Some words more each time.
            if (ids := made.ids_of(trial)) is not None:
                return made if ids == tuple(_encode(library, trial)) else None
        return None

    def ids_of(self, text: str) -> tuple[int, ...] | None:
        """Its token ids; None: ask the library."""
        if len(text) > TEXT_CHARS_MAX or _PLAIN.fullmatch(text) is None:
            return None
        known, added, found = self._known, self._added, list[tuple[int, ...] | None]()
        words = list[str]()
        for part in self._split_added(text):
            if (ids := added.get(part)) is not None:
                found.append(ids)
                words.append(part)
            elif part:
                some = self._split_words(part)
                words += some
                found += map(known.get, some)
        if None in found:
            if not self._learn([word for word, ids in zip(words, found, strict=True) if ids is None]):
                return None
            found = [known.get(word) or added.get(word) for word in words]
        if None in found or sum(map(len, words)) != len(text):
            return None  # Another thread has emptied it; or the pattern passes over something.
        return tuple(chain.from_iterable(found))  # pyright: ignore[reportArgumentType]

    def _learn(self, words: Sequence[str]) -> bool:
        """Learn a few of a text's new words; whether these were all."""
        new = list(dict.fromkeys(words))
        if len(self._known) + LEARN_MAX > WORDS_MAX:
            self._known.clear()
        for word in new[:LEARN_MAX]:
            # A word by itself must be one word: what follows may decide where a run of spaces ends.
            if len(word) > WORD_CHARS_MAX or self._split_words(word) != [word]:
                return False
            self._known[word] = tuple(_encode(self._library, word))
        return len(new) <= LEARN_MAX


def _encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


def alternatives(texts: Iterable[str]) -> str:
    """A pattern that finds the first of the texts, and the longest of those that begin there, as the library
    does. It is a tree of their beginnings: a plain list of hundreds would be tried one by one at each `<`.
    """
    return _tree(sorted(set(filter(None, texts))), LEVELS_MAX) or "(?!)"


def _tree(texts: Sequence[str], num_levels: int) -> str:
    """`texts` are sorted, each once, and none is empty."""
    if not num_levels:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    branches = list[str]()
    for _, group in groupby(texts, key=lambda text: text[0]):
        some = list(group)
        first, last = some[0], some[-1]  # In their order, all between begin as these two do.
        num = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
        prefix = first[:num]
        longer = [text[len(prefix) :] for text in some if text != prefix]
        branch = re.escape(prefix)
        if longer:
            # Where one text ends, the longer ones are tried first.
            branch += f"(?:{_tree(longer, num_levels - 1)}){'?' * (first == prefix)}"
        branches.append(branch)
    return "|".join(branches)


def _pattern_of(pre_tokenizer: Mapping[str, Any] | None) -> re.Pattern[str] | None:
    """The pattern of its words for texts of ASCII; None: there is none, or it is not understood."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return ascii_pattern(_GPT2)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return ascii_pattern(pattern)
        case _:
            return None


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """A pattern of the library's for Python, as far as it speaks of ASCII; None: it has what may mean
    something else there.
    """
    written, in_set = list[str](), False
    for part in _PART.findall(pattern):
        if part.startswith("\\"):
            if part == r"\S" and not in_set:
                written.append(f"[^{_SPACE}]")
                continue
            if (members := _CLASSES.get(part)) is None or not (members or in_set):
                return None
            if in_set and written[-1] == "-":
                return None
            if members:
                written.append(members if in_set else f"[{members}]")
            continue
        if in_set and part.startswith("["):
            return None
        if part == "&&" or (not in_set and part in _REFUSED):
            return None
        if in_set and part == "]" and written[-1].startswith("["):
            return None  # It has nothing in ASCII, and an empty one goes on behind its end in Python.
        in_set = part.startswith("[") or (in_set and part != "]")
        written.append(part)
    try:
        return re.compile("".join(written))
    except re.error:
        return None
