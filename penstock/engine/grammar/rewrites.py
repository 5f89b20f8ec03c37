"""Schemas in words that llguidance enforces.

Dates exist, as RFC 3339 (5.7) wants them of `date` and `date-time`: llguidance's own automata know the
lengths of months, but not leap years, and have a year 0 and leap seconds, which validators refuse.
`propertyNames`, which it does not know, and `oneOf` of types are said otherwise where that means the same.
"""

import json
from collections import Counter
from typing import Any, cast

from penstock.engine.grammar.bounds import ANNOTATIONS, schemas_in
from penstock.text.tool_types import resolved

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])"
_LEAP_YEAR = "([0-9][0-9](0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_LEAP_YEAR}-02-29|{_YEAR}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9][0-9]))"
_SECONDS = "[0-9][0-9]:[0-9][0-9]:[0-5]"
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_SECONDS}", "time": f"^{_SECONDS}"}
"""What holds beside llguidance's automaton of the format."""
_CHARS = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_MORE = r"[A-Za-z0-9._~!$&'()*+,;=@:/?-]"
_HOST = r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.-]+(:[0-9]{1,5})?"
_INSTEAD = {
    "uri-reference": rf"^({_HOST}(/{_CHARS}+)*/?|(/?{_CHARS}+(/{_CHARS}+)*/?)?)(\?{_MORE}*)?(#{_MORE}*)?$"
}
"""Formats that llguidance does not know: what only such text matches."""


def with_known_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, without `propertyNames`, and `oneOf` of types that overlap, where it can be said
    otherwise.
    """
    if not any("propertyNames" in node or "oneOf" in node for node in schemas_in(schema)):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for node in list(schemas_in(copy)):
        if "propertyNames" in node:
            _say_names(node, copy)
        if isinstance(branches := node.get("oneOf"), list):
            _say_types(node, [resolved(each, copy) for each in cast(list[object], branches)])
    return copy


def _say_names(node: dict[str, Any], root: dict[str, Any]) -> None:
    """By `patternProperties`, or by `properties`."""
    names = resolved(node["propertyNames"], root)
    said = names.keys() - ANNOTATIONS - {"type"}
    if not names or names.get("type", "string") != "string" or said - {"pattern", "enum"}:
        return
    others = {"properties", "patternProperties", "unevaluatedProperties"} & node.keys()
    if said and (others or len(said) > 1):
        return
    del node["propertyNames"]
    more: object = node.get("additionalProperties", True)
    if "pattern" in said:
        node["patternProperties"], node["additionalProperties"] = {names["pattern"]: more}, False
    elif "enum" in said:
        node["properties"] = {name: more for name in names["enum"] if isinstance(name, str)}
        node["additionalProperties"] = False


def _say_types(node: dict[str, Any], branches: list[dict[str, Any]]) -> None:
    """Values of a type that two branches take are in neither: what is left are the types of one alone."""
    types: Counter[str] = Counter()
    for branch in branches:
        said = branch.get("type")
        if said is None or branch.keys() - ANNOTATIONS - {"type"}:
            return
        types.update(set(cast(list[str], said)) if isinstance(said, list) else [str(said)])
    if "number" in types and "integer" in types:
        return
    if once := [name for name, num in types.items() if num == 1]:
        held = cast(list[object], node["allOf"]) if isinstance(node.get("allOf"), list) else []
        node["allOf"] = [*held, {"type": once}]
        del node["oneOf"]


def with_known_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, whose dates and times are such that every validator takes them, and in which formats
    that llguidance does not know are patterns.
    """
    if not any(_has_pattern(node) for node in schemas_in(schema)):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for node in list(schemas_in(copy)):
        if _has_pattern(node):
            name = node["format"]
            pattern = _PATTERNS.get(name) or _INSTEAD[name]
            if name in _INSTEAD:
                del node["format"]
            if "pattern" not in node:
                node["pattern"] = pattern
            else:
                held = cast(list[object], node["allOf"]) if isinstance(node.get("allOf"), list) else []
                node["allOf"] = [*held, {"type": "string", "pattern": pattern}]
    return copy


def _has_pattern(node: dict[str, Any]) -> bool:
    """A `format` says nothing of values that are no strings."""
    name = node.get("format")
    return isinstance(name, str) and (name in _PATTERNS or name in _INSTEAD)
