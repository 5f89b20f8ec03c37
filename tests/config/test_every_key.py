"""Every key of the configuration is described beside its declaration, in a page of docs/ and by a test.

A page names a key as `section.key` or `key` between backticks, or shows it in YAML.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from msgspec import inspect

from penstock.config.load import read_notes
from penstock.config.tree import Config

ROOT = Path(__file__).parents[2]
KEYS_MAX, LATER_MAX = 150, 30
"""Of the house as it was counted in docs/design/015, and of two features since, 15 each."""
_YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
_INDENTED = re.compile(r"^ {4,}(?:- )?([a-z0-9_]+):", re.MULTILINE)
_QUOTED = re.compile(r"`([^`\n]+)`")
_WORD = re.compile(r"[a-z0-9_]+")


def sections(kind: inspect.Type) -> list[inspect.StructType]:
    """The sections that a value of this type is or holds."""
    if isinstance(kind, inspect.Metadata):
        return sections(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [found for each in kind.types for found in sections(each)]
    if isinstance(kind, inspect.VarTupleType):
        return sections(kind.item_type)
    return [kind] if isinstance(kind, inspect.StructType) else []


@cache
def declared() -> dict[tuple[str, str], str]:
    """(section, key) of every key, where it is declared -> the section that it opens, if it is a heading."""
    found: dict[tuple[str, str], str] = {}
    todo = sections(inspect.type_info(Config))
    while todo:
        kind = todo.pop()
        for field in kind.fields:
            owner = next(each for each in kind.cls.__mro__ if field.name in each.__annotations__)
            below = sections(field.type)
            found[owner.__name__, field.encode_name] = below[0].cls.__name__ if below else ""
            todo += below
    return dict(sorted(found.items()))


@cache
def words_of_pages() -> frozenset[str]:
    words: set[str] = set()
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"):
        text = page.read_text()
        for part in (*_YAML.findall(text), *_INDENTED.findall(text), *_QUOTED.findall(text)):
            words.update(_WORD.findall(part))
    return frozenset(words)


@cache
def words_of_tests() -> frozenset[str]:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return frozenset(word for path in paths for word in _WORD.findall(path.read_text()))


@pytest.mark.parametrize(("section", "key"), declared(), ids=[".".join(names) for names in declared()])
def test_a_key_is_in_the_docs_and_in_a_test(section: str, key: str) -> None:
    assert key in words_of_pages(), f"no page of docs/ names {key} of {section}"
    assert key in words_of_tests(), f"no test uses {key} of {section}"


def test_every_key_is_described_where_it_is_declared() -> None:
    """A heading is described by its section."""
    notes = read_notes()
    assert [
        names for names, below in declared().items() if not (notes.get(names) or notes.get((below, "")))
    ] == []


def test_the_script_counts_these_keys() -> None:
    """And no more than are allowed."""
    script = [sys.executable, str(ROOT / "scripts" / "house.py"), "--no-trace"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    counted = re.search(r"^Configuration keys +(\d+)$", done.stdout, re.MULTILINE)
    assert counted is not None
    assert int(counted[1]) == sum(not below for below in declared().values())
    assert int(counted[1]) <= KEYS_MAX + LATER_MAX
