"""What is wrong with a key or a value, in an operator's words.

Works on any struct of the tree through msgspec's view of its types, so `tree.py` stays the only place that
says what settings there are.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

import msgspec
import yaml
from msgspec import inspect

from penstock.config import fleet, flow, ledger, routing, tenancy, tree
from penstock.errors import ConfigError

NUMBER_MAX = 2**53
"""Beyond this a float is not exact any more, and no setting means anything."""
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false",
    "object": "a mapping", "array": "a list", "null": "nothing",
}  # fmt: skip


def checked(value: object, root: type[msgspec.Struct]) -> object:
    """`value` with empty sections filled in, if all of its keys are known to `root` and its numbers sane.

    Raises:
        ConfigError: keys that are no longer settings, with what became of each; an unknown key, with the
            nearest known one; NaN, infinity or an absurd number.
    """
    kind = _type_of(root)
    checker = _Checker(kind)
    clean = checker.value(value, kind, "")
    if checker.retired:
        raise ConfigError("\n".join(checker.retired))
    return clean


def explained(message: str, value: object, root: type[msgspec.Struct]) -> str:
    """Rewrite msgspec's "Expected `int`, got `str` - at `$.server.port`" with the dotted key and the
    value.
    """
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    steps = [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path)]
    if text.startswith("Object missing required field"):
        return f"{_join(path, text.split('`')[1])}: missing"
    kind, found = _at(_type_of(root), value, steps)
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if choices := next((each.values for each in kinds if isinstance(each, inspect.LiteralType)), None):
        text = "expected one of " + ", ".join(str(choice) for choice in choices)
    text = re.sub(r"`([\w |]+)`", _plain_words, text.partition(", got")[0])
    # An API key must not come out in an error message.
    got = "" if path.startswith("auth") else f", got {_shown(found)}"
    return f"{path or 'config'}: {text[0].lower()}{text[1:]}{got}"


@cache
def _type_of(root: type[msgspec.Struct]) -> inspect.Type:
    """A tree as msgspec sees it, which looks at every annotation again each time it is asked."""
    return inspect.type_info(root)


def _plain_words(types: re.Match[str]) -> str:
    """`int | null` as a person says it."""
    return " or ".join(_WORDS.get(name, name) for name in types[1].split(" | "))


class _Checker:
    """Walks a value and its type together. `root` is kept for finding keys that are in the wrong section."""

    def __init__(self, root: inspect.Type) -> None:
        self._root = root
        self.retired: list[str] = []
        """A line for each key that is no longer a setting: all of them at once, since an old file has
        several."""

    def value(self, value: object, kind: inspect.Type, path: str) -> object:
        kind = _bare(kind)
        if isinstance(kind, inspect.UnionType) and isinstance(value, dict):  # A section that may be absent.
            kind = next((each for each in kind.types if isinstance(each, inspect.StructType)), kind)
        if isinstance(value, (int, float)) and not (math.isfinite(value) and abs(value) <= NUMBER_MAX):
            raise ConfigError(f"{path}: {_shown(value)} is not a usable number")
        if isinstance(kind, inspect.StructType) and value is None:
            return {}  # `server:` with all its keys commented out.
        if isinstance(kind, inspect.StructType) and isinstance(value, dict):
            return self._section(cast(dict[object, object], value), kind, path)
        if isinstance(kind, inspect.VarTupleType) and isinstance(value, list):
            items = cast(list[object], value)
            return [self.value(item, kind.item_type, f"{path}[{i}]") for i, item in enumerate(items)]
        if isinstance(value, dict):  # It may have been a section once.
            self.retired += retired(path, cast(object, value))
            return cast(object, value)
        return value

    def _section(self, section: dict[object, object], kind: inspect.StructType, path: str) -> object:
        fields = {field.encode_name: field.type for field in kind.fields}
        clean: dict[str, object] = {}
        for key, value in section.items():
            if not isinstance(key, str) or key not in fields:
                if sentences := list(retired(_join(path, str(key)), value)):
                    self.retired += sentences
                    continue
                raise ConfigError(self._unknown(str(key), value, kind, path))
            clean[key] = self.value(value, fields[key], _join(path, key))
        return clean

    def _unknown(self, key: str, value: object, kind: inspect.StructType, path: str) -> str:
        """Say which key is unknown, and which one was meant: one beside it, or one of another section."""
        here = list(_paths(kind, "", depth=1))
        if near := difflib.get_close_matches(key, here, n=1):
            below = next(iter(cast(dict[object, object], value)), None) if isinstance(value, dict) else None
            tail = f".{below}" if f"{near[0]}.{below}" in _paths(kind, "") else ""
            return f"unknown key `{_join(path, key)}{tail}`; did you mean `{_join(path, near[0])}{tail}`?"
        # Sorted by depth backwards, so that of equal names the one nearest the root is left.
        paths = sorted(_paths(self._root, ""), key=lambda path: -path.count("."))
        elsewhere = {path.rpartition(".")[2]: path for path in paths}
        if near := difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.8):
            return f"unknown key `{_join(path, key)}`; did you mean `{elsewhere[near[0]]}`?"
        return f"unknown key `{_join(path, key)}`; known here: {', '.join(here)}"


def _bare(kind: inspect.Type) -> inspect.Type:
    """The type without the bounds that are attached to it."""
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _paths(kind: inspect.Type, path: str, depth: int = 10) -> Iterator[str]:
    """The dotted names of the keys below a type; an entry of a list is `[]`."""
    kind = _bare(kind)
    if isinstance(kind, inspect.VarTupleType):
        yield from _paths(kind.item_type, f"{path}[]", depth)
    elif isinstance(kind, inspect.StructType) and depth > 0:
        for field in kind.fields:
            yield _join(path, field.encode_name)
            yield from _paths(field.type, _join(path, field.encode_name), depth - 1)


def _at(kind: inspect.Type, value: object, steps: Sequence[str | int]) -> tuple[inspect.Type, object]:
    """The type and the value at a place in the tree."""
    for step in steps:
        kind = _bare(kind)
        if isinstance(kind, inspect.StructType):
            kind = next(field.type for field in kind.fields if field.encode_name == step)
        elif isinstance(kind, inspect.VarTupleType):
            kind = kind.item_type
        value = cast(Any, value)[step]
    return _bare(kind), value


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else yaml.safe_dump(value).split("\n")[0]
    return text if len(text) <= 80 else text[:77] + "..."


# Keys that the configuration no longer has, and what became of each.

SECTIONS = (tree, fleet, flow, routing, tenancy, ledger)
"""The files that declare sections of the configuration, each with its retired keys."""
RETIRED: Mapping[str, str] = {path: why for module in SECTIONS for path, why in module.RETIRED.items()}
"""Dotted path -> sentence, which names settings in backticks. `[]` stands for an entry of a list, `section.*`
for a section that is gone: for the section itself, and for its keys without a sentence of their own."""


def retired(path: str, value: object, known: Mapping[str, str] = RETIRED) -> Iterator[str]:
    """One line for the key at `path`, or for each key below it, that was a setting once."""
    if sentence := _sentence(path, known):
        yield f"`{path}` is no longer a setting: {sentence}"
        return
    below = cast(dict[object, object], value) if isinstance(value, dict) else {}
    found = [line for key, item in below.items() for line in retired(f"{path}.{key}", item, known)]
    if not found and (sentence := _sentence(f"{path}.*", known)):
        found = [f"`{path}` is no longer a section: {sentence}"]
    yield from found


def _sentence(path: str, known: Mapping[str, str]) -> str | None:
    """What became of a key: its own sentence, else its section's."""
    plain = re.sub(r"\[\d+\]", "[]", path)
    return known.get(plain) or known.get(f"{plain.rpartition('.')[0]}.*")
