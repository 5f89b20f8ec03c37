"""From YAML and the environment to a `Config`, and back to YAML.

An operator's mistake is reported with the file, the line or the dotted key, before anything starts. The
keys and values that are allowed are in `tree.py` alone; settings that contradict each other are for
`checks.py`.
"""

import ast
import difflib
import functools
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from inspect import cleandoc, getsource
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml
from msgspec import inspect

from penstock.config import cells, fleet, flow, ledger, routing, scale, tenancy, tree
from penstock.config.branch import Branch
from penstock.config.tenancy import key_problem
from penstock.config.tree import Config
from penstock.errors import ConfigError

# Problems of a key or a value, in an operator's words.
#
# Works on any struct of the tree through msgspec's view of its types, so `tree.py` stays the only place
# that says what settings there are.

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
        """Say which key is unknown, and which one was meant: one near it, or one of another section."""
        here = list(_paths(kind, "", depth=1))
        if near := difflib.get_close_matches(key, here, n=1):
            below = next(iter(cast(dict[object, object], value)), None) if isinstance(value, dict) else None
            tail = f".{below}" if f"{near[0]}.{below}" in _paths(kind, "") else ""
            return f"unknown key `{_join(path, key)}{tail}`; did you mean `{_join(path, near[0])}{tail}`?"
        # Sorted by depth backwards, so that of equal names the one nearest the root is left.
        paths = sorted(_paths(self._root, ""), key=lambda path: -path.count("."))
        # An entry of a list is no place where a key of another section ends up by mistake.
        top = path.partition("[")[0].partition(".")[0] if path.endswith("]") else ""
        elsewhere = {each.rpartition(".")[2]: each for each in paths if each.startswith(top)}
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

SECTIONS = (tree, fleet, cells, flow, routing, scale, tenancy, ledger)
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
    """The fate of a key: its own sentence, else its section's."""
    plain = re.sub(r"\[\d+\]", "[]", path)
    return known.get(plain) or known.get(f"{plain.rpartition('.')[0]}.*")


FILE_BYTES_MAX = 1024 * 1024


def load_config(path: Path) -> Config:
    """Read a config file.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something wrong.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: over the bound of {FILE_BYTES_MAX} bytes")
    return parse_config(data, source=str(path))


def parse_config(text: str | bytes, *, source: str = "config") -> Config:
    """Read a config from YAML. `source` stands before every message.

    Raises:
        ConfigError: it is no YAML, or holds something wrong.
    """
    try:
        raw: object = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise ConfigError(f"{source}{where}: {error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    try:
        return convert_config({} if raw is None else raw)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def convert_config(raw: object) -> Config:
    """Build a config from plain mappings, lists and scalars, such as YAML gives.

    Raises:
        ConfigError: an unknown key (with the nearest known one), or a wrong type or range.
    """
    clean = checked(raw, Config)
    try:
        return msgspec.convert(clean, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explained(str(error), clean, Config)) from None


def with_environment(config: Config, environ: Mapping[str, str]) -> Config:
    """Apply `PENSTOCK_API_KEY`, `PENSTOCK_ADMIN_KEY` and `PENSTOCK_SCRAPE_KEY` (one key or several with
    commas), `PENSTOCK_KEYS_FILE`, `PENSTOCK_AUTH_SECRET`, `PENSTOCK_SHARED_URL`, `PENSTOCK_CELL`,
    `PENSTOCK_HOST` and `PENSTOCK_PORT`.

    A variable that is set to nothing counts as not set.

    Raises:
        ConfigError: the port is no port, or a key is too short.
    """
    server, auth = config.server, config.auth
    if host := environ.get("PENSTOCK_HOST", "").strip():
        server = msgspec.structs.replace(server, host=host)
    if port := environ.get("PENSTOCK_PORT", "").strip():
        if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
            raise ConfigError(f"PENSTOCK_PORT: expected a port between 0 and 65535, got {port!r}")
        server = msgspec.structs.replace(server, port=int(port))
    if keys := _keys(environ, "PENSTOCK_API_KEY"):
        auth = msgspec.structs.replace(auth, keys=keys)
    if keys := _keys(environ, "PENSTOCK_ADMIN_KEY"):
        auth = msgspec.structs.replace(auth, admin_keys=keys)
    if keys := _keys(environ, "PENSTOCK_SCRAPE_KEY"):
        auth = msgspec.structs.replace(auth, scrape_keys=keys)
    if keys_file := environ.get("PENSTOCK_KEYS_FILE", "").strip():
        auth = msgspec.structs.replace(auth, keys_file=keys_file)
    if secret := environ.get("PENSTOCK_AUTH_SECRET", "").strip():
        auth = msgspec.structs.replace(auth, secret=secret)
    shared = config.shared
    if url := environ.get("PENSTOCK_SHARED_URL", "").strip():
        shared = msgspec.structs.replace(shared, url=url)
    cells = config.cells
    if here := environ.get("PENSTOCK_CELL", "").strip():
        cells = msgspec.structs.replace(cells, here=here)
    return msgspec.structs.replace(config, server=server, auth=auth, shared=shared, cells=cells)


def _keys(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    keys = tuple(key for part in environ.get(name, "").split(",") if (key := part.strip()))
    for key in keys:
        if problem := key_problem(key):
            raise ConfigError(f"{name}: {problem}")
    return keys


Notes = Mapping[tuple[str, str], str]
"""(class, field) -> note; (class, "") is the note of the class."""


@functools.cache
def read_notes() -> Notes:
    """All notes; none if the source is not installed."""
    try:
        sources = [getsource(module) for module in SECTIONS]
    except OSError:
        return {}
    notes: dict[tuple[str, str], str] = {}
    for node in (node for source in sources for node in ast.parse(source).body):
        if isinstance(node, ast.ClassDef):
            notes[node.name, ""] = ast.get_docstring(node) or ""
            notes |= {(node.name, field): note for field, note in _field_notes(node).items()}
    return notes


def _field_notes(node: ast.ClassDef) -> dict[str, str]:
    """A field's note is the string that stands below it."""
    notes: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            notes[field.target.id] = cleandoc(str(below.value.value))
    return notes


def dump_config(config: Config) -> str:
    """The config as YAML that loads to the same config, with the notes of `tree.py` as comments.

    Keys are in it: hide them first if it is for the eyes of others.
    """
    return "\n".join(_branch_lines(config, "", read_notes())) + "\n"


def _branch_lines(branch: Branch, indent: str, notes: Notes) -> Iterator[str]:
    own = type(branch).__annotations__
    # A section's own keys come before those that it shares with others: a tier's name before its limits.
    for field in sorted(msgspec.structs.fields(branch), key=lambda field: field.name not in own):
        value: object = getattr(branch, field.name)
        shared = (notes.get((kind.__name__, field.name)) for kind in type(branch).__mro__)
        note = next(filter(None, shared), "") or notes.get((type(value).__name__, ""), "")
        yield from (f"{indent}# {line}" for line in note.splitlines())
        if isinstance(value, Branch):
            yield f"{indent}{field.name}:"
            yield from _branch_lines(value, indent + "  ", notes)
        elif entries := _branches(value):
            yield f"{indent}{field.name}:"
            for item in entries:
                yield from _item_lines(item, indent, notes)
        else:
            yield f"{indent}{field.name}: {_scalar(value)}"


def _branches(value: object) -> list[Branch]:
    """The entries of a list of sections; empty for every other value."""
    entries = cast(tuple[object, ...], value) if isinstance(value, tuple) else ()
    return [entry for entry in entries if isinstance(entry, Branch)]


def _item_lines(item: Branch, indent: str, notes: Notes) -> Iterator[str]:
    """One entry of a list: its first key stands after a dash, with the comments above it."""
    dashed = False
    for line in _branch_lines(item, indent + "    ", notes):
        if dashed or line.lstrip().startswith("#"):
            yield line
        else:
            dashed = True
            yield f"{indent}  - {line.lstrip()}"


def _scalar(value: object) -> str:
    plain: object = msgspec.to_builtins(value)
    plain = list(cast(tuple[object, ...], plain)) if isinstance(plain, tuple) else plain
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, which besides refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else id(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key_node.value}` is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
