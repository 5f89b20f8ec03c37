"""Every key of the configuration is described beside its declaration, in a page of docs/ and by a test.

A page names a key as `section.key` or `key` between backticks, or shows it in a block of YAML.
"""

import re
from functools import cache
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from penstock.config.notes import read_notes
from penstock.config.tree import Config

ROOT = Path(__file__).parents[2]
_YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
_QUOTED = re.compile(r"`([^`\n]+)`")


def declared() -> list[tuple[str, str]]:
    """(section's class, key) of every key, once, where it is declared."""
    seen: dict[tuple[str, str], None] = {}
    todo: list[inspect.Type] = [inspect.type_info(Config)]
    done: set[type] = set()
    while todo:
        kind = todo.pop()
        if isinstance(kind, inspect.Metadata):
            todo.append(kind.type)
        elif isinstance(kind, inspect.UnionType):
            todo += kind.types
        elif isinstance(kind, inspect.VarTupleType):
            todo.append(kind.item_type)
        elif isinstance(kind, inspect.StructType) and kind.cls not in done:
            done.add(kind.cls)
            todo += [field.type for field in kind.fields]
            for field in kind.fields:
                owner = next(each for each in kind.cls.__mro__ if field.name in each.__annotations__)
                seen[owner.__name__, field.encode_name] = None
    return sorted(seen)


@cache
def words_of_pages() -> frozenset[str]:
    words: set[str] = set()
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"):
        text = page.read_text()
        shown = [*_YAML.findall(text), *_QUOTED.findall(text)]
        words |= {word for part in shown for word in re.findall(r"[a-z0-9_]+", part)}
    return frozenset(words)


@cache
def words_of_tests() -> frozenset[str]:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return frozenset(word for path in paths for word in re.findall(r"[a-z0-9_]+", path.read_text()))


@pytest.mark.parametrize(("section", "key"), declared(), ids=".".join)
def test_a_key_is_in_the_docs_and_in_a_test(section: str, key: str) -> None:
    assert key in words_of_pages(), "no page of docs/ names it"
    assert key in words_of_tests(), "no test uses it"


def test_every_key_is_described_where_it_is_declared() -> None:
    notes = read_notes()
    described = {(section, key) for section, key in declared() if notes.get((section, key))}
    assert msgspec.structs.fields(Config)
    assert set(declared()) - described == set()
