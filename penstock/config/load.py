"""From YAML and the environment to a `Config`, and back to YAML.

What an operator wrote wrong is said with the file, the line or the dotted key, before anything starts. What
keys and values may be is in `tree.py` alone; settings that contradict each other are for `checks.py`.
"""

import ast
import functools
import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from penstock.config.branch import Branch
from penstock.config.keys import SECTIONS, checked, explained
from penstock.config.tenancy import key_problem
from penstock.config.tree import Config
from penstock.errors import ConfigError

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
    commas), `PENSTOCK_KEYS_FILE`, `PENSTOCK_AUTH_SECRET`, `PENSTOCK_SHARED_URL`, `PENSTOCK_HOST` and
    `PENSTOCK_PORT`.

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
    return msgspec.structs.replace(config, server=server, auth=auth, shared=shared)


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
        sources = [inspect.getsource(module) for module in SECTIONS]
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
            notes[field.target.id] = inspect.cleandoc(str(below.value.value))
    return notes


def dump_config(config: Config) -> str:
    """The config as YAML that loads to the same config, with the notes of `tree.py` as comments.

    Keys are in it: hide them first if it is for the eyes of others.
    """
    return "\n".join(_branch_lines(config, "", read_notes())) + "\n"


def _branch_lines(branch: Branch, indent: str, notes: Notes) -> Iterator[str]:
    own = type(branch).__annotations__
    # What a section says itself comes before what it shares with others: a tier's name before its limits.
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
