"""Every key of the configuration, as it is declared: described, read by the product, in docs/
configuration.md, decoded, refused and printed as its type says, and used by a test.

A new key needs no line here and none in the docs: `make format` writes the page from the declaration. A test
uses a key if it gives it as an argument, reads it as an attribute, or writes it in YAML or JSON, and names
its section or its section's class as well: a word that happens to be spelled like the key is not enough.
"""

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import NODEFAULT, inspect

from penstock.config.load import dump_config, parse_config
from penstock.config.tree import Config
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[2]
_USED = re.compile(r"\b([a-z_][a-z0-9_]*)(?==[^=]|\"?: |\")|\.([a-z_][a-z0-9_]*)\b")
"""In Python `key=`, `.key` and `"key"`; in YAML and JSON `key: ` and `"key": `."""
_WORD = re.compile(r"[A-Za-z0-9_]+")
KEYS_MAX, LATER_MAX = 150, 60
"""Of the house as it was counted in docs/design/015, and of four features since, 15 each."""


def _page_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_page", ROOT / "scripts" / "config_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["config_page"] = module
    spec.loader.exec_module(module)
    return module


PAGE = _page_script()
KEYS = {key.path: key for key in PAGE.declared_keys()}
VALUES = {path: key for path, key in KEYS.items() if key.section is None}
"""Without headings, which hold no value of their own."""
SAMPLES: dict[str, object] = {
    "models[].reasoning_marks": "<say> </say>",
    "auth.secret": "s" * 32,
    "auth.keys": ["k" * 32],
    "auth.admin_keys": ["k" * 32],
    "auth.scrape_keys": ["k" * 32],
}
"""Where the type alone does not say what is allowed."""


def sample(kind: inspect.Type, default: object = NODEFAULT) -> Any:
    """A value that the type allows and that is not the default."""
    match kind:
        case inspect.Metadata():
            return sample(kind.type, default)
        case inspect.UnionType():
            return sample(
                next(each for each in kind.types if not isinstance(each, inspect.NoneType)), default
            )
        case inspect.BoolType():
            return default is False
        case inspect.IntType() | inspect.FloatType():
            found = [bound for bound in (kind.ge, kind.le) if bound is not None]
            found += [kind.gt + 0.5] if kind.gt is not None else []
            return next(each for each in [*found, 1, 2] if each != default)
        case inspect.LiteralType():
            return next(each for each in kind.values if each != default)
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.VarTupleType():
            return [sample(kind.item_type)]
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.StructType():
            return {field.name: sample(field.type) for field in kind.fields if field.required}
        case _:
            assert isinstance(kind, inspect.StrType), kind
            return "sample" if default != "sample" else "other"


def written(path: str, value: object) -> str:
    """YAML with this value at the path, and what else the sections around it need."""
    raw: dict[str, Any] = {}
    at, here = raw, ""
    *sections, name = path.split(".")
    for step in sections:
        here = f"{here}.{step}" if here else step
        heading = KEYS[here.removesuffix("[]")]
        below = sample(heading.section) if heading.section else {}
        at[step.removesuffix("[]")] = [below] if step.endswith("[]") else below
        at = below
    at[name] = value
    return yaml.safe_dump(raw)


def at(config: Config, path: str) -> Any:
    found: Any = config
    for step in path.split("."):
        found = getattr(found, step.removesuffix("[]"))
        found = found[0] if step.endswith("[]") else found
    return found


def attributes_read() -> set[str]:
    """Names that the product reads as attributes."""
    texts = (file.read_text() for file in (ROOT / "penstock").rglob("*.py"))
    return {name for text in texts for name in re.findall(r"\.([a-z_]+)\b", text)}


@pytest.mark.parametrize("path", VALUES)
def test_a_key_is_decoded_and_printed(path: str) -> None:
    key = VALUES[path]
    value = SAMPLES.get(path, sample(key.kind, key.default))
    config = parse_config(written(path, value))
    found = msgspec.to_builtins(at(config, path))
    assert ([*found] if isinstance(found, tuple) else found) == value
    name = path.rpartition(".")[2]
    printed = re.findall(rf"^[ -]*{name}: (.*)$", dump_config(config), re.MULTILINE)
    assert value in [yaml.safe_load(each) for each in printed]


@pytest.mark.parametrize("path", VALUES)
def test_a_value_of_no_type_of_the_key_is_refused_by_its_path(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(path.replace("[]", "[0]"))):
        parse_config(written(path, [[["no key takes this"]]]))


def test_the_product_reads_every_key() -> None:
    read = attributes_read()
    assert [path for path in VALUES if path.rpartition(".")[2] not in read] == []


@dataclass(slots=True, frozen=True)
class Source:
    """A test."""

    words: frozenset[str]
    keys: frozenset[str]
    """What it gives or reads as a key."""

    @classmethod
    def of(cls, text: str) -> "Source":
        text = text.replace("\\n", "\n")
        keys = frozenset(key for found in _USED.findall(text) for key in found)
        return cls(frozenset(_WORD.findall(text)), keys)

    def uses(self, name: str, sections: set[str]) -> bool:
        """Whether it uses the key, and names the section that has it or the section's class."""
        return name in self.keys and (not sections or not sections.isdisjoint(self.words))


@cache
def texts_of_tests() -> list[Source]:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return [Source.of(path.read_text()) for path in paths]


@pytest.mark.parametrize("path", VALUES)
def test_a_test_uses_the_key(path: str) -> None:
    heading, _, name = path.rpartition(".")
    section = heading.rpartition(".")[2].removesuffix("[]")
    sections = {section, VALUES[path].owner} if section else set[str]()
    if section:
        opened = KEYS[heading.removesuffix("[]")].section
        assert opened is not None
        sections.add(opened.cls.__name__)
    assert any(test.uses(name, sections) for test in texts_of_tests()), f"no test uses {path}"


def test_a_word_that_is_spelled_like_a_key_is_not_enough() -> None:
    sections = {"engine", "EngineConfig"}
    assert not Source.of("engine = 1  # the port\nport = engine").uses("port", sections)
    assert not Source.of("f(port=1)").uses("port", sections)
    assert Source.of("EngineConfig(port=1)").uses("port", sections)
    assert Source.of("'engine: {port: 1}'").uses("port", sections)
    assert Source.of("config.engine.port").uses("port", sections)


def test_every_key_is_described_where_it_is_declared() -> None:
    """A heading is described by its section."""
    assert [path for path, key in KEYS.items() if not key.note] == []


def test_the_page_has_every_key_as_it_is_declared() -> None:
    assert PAGE.page() == PAGE.PAGE.read_text(), "run: make format"


def test_the_script_counts_these_keys() -> None:
    """And no more than are allowed."""
    script = [sys.executable, str(ROOT / "scripts" / "house.py"), "--no-trace"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    counted = re.search(r"^Configuration keys +(\d+)$", done.stdout, re.MULTILINE)
    assert counted is not None
    assert int(counted[1]) == len(VALUES)
    assert int(counted[1]) <= KEYS_MAX + LATER_MAX
