"""Which types of JSON a parameter of a tool may have: what its bare text is read as, and held to."""

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote

STRING = frozenset({"string"})
OBJECT = frozenset({"object"})
_DEPTH_MAX = 16


def resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema itself, where it is a reference within `root` or an `allOf` of one, however often."""
    node = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
    for _ in range(_DEPTH_MAX):
        together = node.get("allOf")
        if isinstance(pointer := node.get("$ref"), str):
            found = _at(root, pointer)
        elif isinstance(together, list) and len(cast(list[object], together)) == 1:
            found = cast(list[object], together)[0]
        else:
            break
        node = {name: value for name, value in node.items() if name not in ("$ref", "allOf")}
        node |= cast(dict[str, Any], found) if isinstance(found, dict) else {}
    return node


def kinds_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a value may have; a string where nothing is said."""
    node = resolved(schema, root)
    said = node.get("type")
    kinds = frozenset(map(str, cast(list[object], said))) if isinstance(said, list) else frozenset[str]()
    kinds |= {said} if isinstance(said, str) else frozenset()
    if isinstance(literals := node.get("enum", [node["const"]] if "const" in node else None), list):
        found = frozenset(map(kind_of, cast(list[object], literals)))
        return (found & _with_integers(kinds) if kinds else found) or STRING
    if kinds:
        return kinds
    branches = node.get("anyOf", node.get("oneOf"))
    if isinstance(branches, list) and depth < _DEPTH_MAX:
        return frozenset[str]().union(
            *(kinds_of(each, root, depth + 1) for each in cast(list[object], branches))
        )
    if "properties" in node:
        return OBJECT
    return frozenset({"array"}) if "items" in node else STRING


def kind_of(value: object) -> str:
    """The type of a value that was read from JSON."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def fits(value: object, kinds: frozenset[str]) -> bool:
    """Whether a value is of one of these types."""
    return kind_of(value) in _with_integers(kinds)


def _with_integers(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds


def _at(root: Mapping[str, Any], pointer: str) -> object:
    """What a reference points to; None if nothing is there."""
    found: object = root
    for part in unquote(pointer).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = cast(dict[str, object], found).get(name) if isinstance(found, dict) else None
    return found
