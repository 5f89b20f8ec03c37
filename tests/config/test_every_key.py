"""Every key of the configuration is described beside its declaration, in a page of docs/ and by a test.

A page names a key as `section.key`, as `key` between backticks, or in YAML; a test gives it as an argument,
reads it as an attribute, or writes it in YAML or JSON. Both name its section or its section's class as well:
a word that happens to be spelled like the key is not enough.
"""

import re
import subprocess
import sys
from dataclasses import dataclass, field
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
_INDENTED = re.compile(r"^ {4,}.*$", re.MULTILINE)
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[a-z_][a-z0-9_.\[\]]*")
_GIVEN = re.compile(r"(?<![\w/])([a-z_][a-z0-9_]*)\"?:(?!//)")
_USED = re.compile(r"\b([a-z_][a-z0-9_]*)(?==[^=]|\"?: |\")|\.([a-z_][a-z0-9_]*)\b")
"""In Python `key=`, `.key` and `"key"`; in YAML and JSON `key: ` and `"key": `."""
_WORD = re.compile(r"[A-Za-z0-9_]+")


@dataclass(slots=True)
class Key:
    """One key, and what it may be reached through."""

    opens: str
    """The class of the section that it opens; empty if it is no heading."""
    sections: set[str] = field(default_factory=set)
    """The keys and the classes of the sections that have it; empty: it is at the top."""


@dataclass(slots=True, frozen=True)
class Text:
    """A page or a test."""

    words: frozenset[str]
    keys: frozenset[str]
    """What it names or uses as a key."""

    def has(self, name: str, key: Key) -> bool:
        return name in self.keys and (not key.sections or not key.sections.isdisjoint(self.words))


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
def declared() -> dict[tuple[str, str], Key]:
    """By the class that declares it and its name."""
    found: dict[tuple[str, str], Key] = {}

    def walk(kind: inspect.StructType, heading: str) -> None:
        for each in kind.fields:
            owner = next(base for base in kind.cls.__mro__ if each.name in base.__annotations__)
            below = sections(each.type)
            opens = below[0].cls.__name__ if below else ""
            key = found.setdefault((owner.__name__, each.encode_name), Key(opens))
            if heading:
                key.sections |= {heading, kind.cls.__name__}
            for section in below:
                walk(section, each.encode_name)

    (top,) = sections(inspect.type_info(Config))
    walk(top, "")
    return dict(sorted(found.items()))


@cache
def page_texts() -> list[Text]:
    found = list[Text]()
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"):
        text = page.read_text()
        quoted = _QUOTED.findall(text)
        named = {key for each in quoted if (path := _PATH.match(each)) for key in _WORD.findall(path.group())}
        written = "\n".join([*_YAML.findall(text), *_INDENTED.findall(text), *quoted])
        found.append(Text(frozenset(_WORD.findall(text)), frozenset(named.union(_GIVEN.findall(written)))))
    return found


@cache
def texts_of_tests() -> list[Text]:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return [_read_test(path.read_text()) for path in paths]


def _read_test(source: str) -> Text:
    source = source.replace("\\n", "\n")
    return Text(
        frozenset(_WORD.findall(source)), frozenset(key for keys in _USED.findall(source) for key in keys)
    )


@pytest.mark.parametrize(("section", "key"), declared(), ids=[".".join(names) for names in declared()])
def test_a_key_is_in_the_docs_and_in_a_test(section: str, key: str) -> None:
    facts = declared()[section, key]
    assert any(page.has(key, facts) for page in page_texts()), f"no page of docs/ names {key} of {section}"
    assert any(test.has(key, facts) for test in texts_of_tests()), f"no test uses {key} of {section}"


def test_a_word_that_is_spelled_like_a_key_is_not_enough() -> None:
    key = Key("", {"engine", "EngineConfig"})
    assert not _read_test("engine = 1  # the port\nport = engine").has("port", key)
    assert not _read_test("f(port=1)").has("port", key)
    assert _read_test("EngineConfig(port=1)").has("port", key)
    assert _read_test("'engine: {port: 1}'").has("port", key)
    assert _read_test("config.engine.port").has("port", key)


def test_every_key_is_described_where_it_is_declared() -> None:
    """A heading is described by its section."""
    notes = read_notes()
    assert [
        names for names, key in declared().items() if not (notes.get(names) or notes.get((key.opens, "")))
    ] == []


def test_the_script_counts_these_keys() -> None:
    """And no more than are allowed."""
    script = [sys.executable, str(ROOT / "scripts" / "house.py"), "--no-trace"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    counted = re.search(r"^Configuration keys +(\d+)$", done.stdout, re.MULTILINE)
    assert counted is not None
    assert int(counted[1]) == sum(not key.opens for key in declared().values())
    assert int(counted[1]) <= KEYS_MAX + LATER_MAX
