"""Patterns of Python's `re` for what a tokenizer splits text at: its added tokens, and its words.

The library's own patterns are another dialect. Taken over are those of classes that are known for ASCII; of
all else this module says None, and the library splits.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

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
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Of a `ByteLevel` that splits by itself."""


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


def word_pattern(pre_tokenizer: Mapping[str, Any] | None) -> re.Pattern[str] | None:
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
