"""The cost of compiling a schema, and the bounds on it: llguidance would take some schemas of a few bytes for
hours.

The bounds are counts, which do not depend on the machine or its load, so that it is no matter of chance
whether an ordinary schema is refused. The trial's time (trial.py) stops schemas that the bounds do not know.
"""

import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn, cast
from urllib.parse import unquote

from penstock.errors import InvalidRequest

COST_MAX = 1024
"""Of one schema, in units of what a required property costs: about 0.05 ms. Definitions count if they are
used."""
_BOUNDED_COST = 3
"""Of each different value that has an automaton of its own, by a keyword of `_BOUNDS`."""
_PATTERN_COST = 5
"""The same of a `pattern`, whose automaton may be large."""
_KEY_COST = 4
"""Of each key of an object in `enum` or `const`."""
_VALUES_PER_UNIT = 4
"""Of an `enum`."""
_OPTIONAL = 512
"""So many optional properties of one object cost as much again: each may be followed by all behind it."""
_BOUNDS = frozenset(
    {"pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
CROSSED_MAX = 128
"""Ways to take one of each of several `anyOf` or `oneOf` that hold together: each is a grammar of its own."""
PATTERNS_MAX = 8
"""Patterns that one string must match together: the automata's states multiply."""
MULTIPLE_MAX = 1000
"""Of `multipleOf`, in units of its last digit: the automaton has as many states, and so has that of the least
common multiple of several."""
EXACT_MAX = 1 << 53
"""Up to here floats hold every integer."""
EXACT_EXPONENT_MAX = 22
"""The largest power of ten that a float holds exactly."""
LITERALS = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)


def check_schema(schema: dict[str, Any]) -> None:
    """Refuse what would take too long to compile.

    Raises:
        InvalidRequest: it is over a bound, or nested too deeply.
    """
    check_schemas([schema])


def check_schemas(schemas: Sequence[dict[str, Any]]) -> None:
    """The same of schemas that are compiled as one grammar."""
    multiples: set[int] = set()
    for path, keyword, value in (each for schema in schemas for each in keywords(schema)):
        if keyword == "multipleOf" and isinstance(value, int | float) and math.isfinite(value) and value > 0:
            step = Fraction(str(value))
            multiples.add(step.numerator if step.denominator == 1 else _digits(value))
            if math.lcm(*multiples) > MULTIPLE_MAX:
                _refuse(f"'multipleOf' at {path} is {value}, which is too large to be enforced")
        if keyword in ("const", "enum"):
            _check_literal(path, keyword, value)
    if (cost := sum(map(_cost, schemas))) > COST_MAX:
        _refuse(
            f"it is too large: {cost} units, and {COST_MAX} is the bound (a property is 1, a value with a "
            f"pattern {_PATTERN_COST} more, a format or numeric bounds {_BOUNDED_COST}, {_VALUES_PER_UNIT} "
            "values of an enum 1)"
        )
    try:
        for schema in schemas:
            _Crossings(schema).check()
    except RecursionError:
        _refuse("the schema is nested too deeply")


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, in which equal values with an automaton of their own are one definition, compiled
    once.
    """
    named = schema.get("$defs", {})
    values = [(node, name, key) for node, name, key in _values(schema) if key]
    counts: dict[str, int] = {}
    for _, _, key in values:
        counts[key] = counts.get(key, 0) + 1
    names = {key: f"shared-{i}" for i, key in enumerate(key for key, num in counts.items() if num > 1)}
    if not names or not isinstance(named, dict) or any(each in names.values() for each in cast(Any, named)):
        return schema
    if any(keyword == "$id" and path != "/$id" for path, keyword, _ in keywords(schema)):
        return schema  # A reference there would be to something else.
    copy = json.loads(json.dumps(schema))
    for node, name, key in _values(copy):
        if key in names:
            node[name] = {"$ref": f"#/$defs/{names[key]}"}
    copy["$defs"] = {name: json.loads(key) for key, name in names.items()} | copy.get("$defs", {})
    return copy


def keywords(schema: object) -> Iterator[tuple[str, str, Any]]:
    """(JSON pointer, keyword, value) of every keyword of a schema and of the schemas in it."""
    todo: list[tuple[str, object]] = [("", schema)]
    while todo:
        here, each = todo.pop()
        if isinstance(each, list):
            todo += [(f"{here}/{i}", item) for i, item in enumerate(cast(list[Any], each))]
        elif isinstance(each, dict):
            for keyword, value in cast(dict[str, Any], each).items():
                there = f"{here}/{keyword.replace('~', '~0').replace('/', '~1')}"
                yield there, keyword, value
                if keyword in _NAMED and isinstance(value, dict):
                    named = cast(dict[str, Any], value)
                    todo += [
                        (f"{there}/{name.replace('~', '~0').replace('/', '~1')}", inner)
                        for name, inner in named.items()
                    ]
                elif keyword not in LITERALS:
                    todo.append((there, value))


def _values(schema: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Of every property and of all items: where they stand, under which name, and the schema without
    annotations as text, if it is one of bounds; else empty.
    """
    found: list[tuple[dict[str, Any], str, str]] = []
    for node in schemas_in(schema):
        if isinstance(value := node.get("properties"), dict):
            named = cast(dict[str, Any], value)
            found += [(named, name, _bounded(inner)) for name, inner in named.items()]
        if "items" in node:
            found.append((node, "items", _bounded(node["items"])))
    return found


def schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    """Every schema that is an object, the outer ones first."""
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += cast(list[Any], each)
        elif isinstance(each, dict):
            node = cast(dict[str, Any], each)
            yield node
            for keyword, value in node.items():
                if keyword in _NAMED and isinstance(value, dict):
                    todo += cast(dict[str, Any], value).values()
                elif isinstance(value, dict | list) and keyword not in LITERALS:
                    todo.append(cast(object, value))


def _bounded(schema: object) -> str:
    if not isinstance(schema, dict) or _BOUNDS.isdisjoint(cast(dict[str, Any], schema)):
        return ""
    fields = cast(dict[str, Any], schema).items()
    fields = {name: value for name, value in fields if name not in ANNOTATIONS}
    if any(isinstance(value, dict | list) for value in fields.values()):
        return ""
    return json.dumps(fields, sort_keys=True)


def _cost(schema: dict[str, Any]) -> int:
    """Of all that the schema uses: definitions count if something refers to them."""
    cost, todo, refs, bounded = 0, list[object]([schema]), set[str](), set[str]()
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += cast(list[object], each)
        if not isinstance(each, dict):
            continue
        node = cast(dict[str, Any], each)
        if not _BOUNDS.isdisjoint(node) and (key := _bounded(node) or str(id(node))) not in bounded:
            bounded.add(key)
            cost += _PATTERN_COST if "pattern" in node else _BOUNDED_COST
        for keyword, value in node.items():
            if keyword == "$ref" and isinstance(value, str):
                if value not in refs:
                    refs.add(value)
                    todo.append(_referred(schema, value))
            elif keyword in ("properties", "patternProperties") and isinstance(value, dict):
                named = cast(dict[str, Any], value)
                cost += _cost_of_object(node, len(named), is_pattern=keyword != "properties")
                todo += named.values()
            elif keyword in ("enum", "const"):
                cost += _KEY_COST * _num_keys(value)
                cost += len(cast(list[Any], value)) // _VALUES_PER_UNIT if isinstance(value, list) else 0
            elif keyword not in (*LITERALS, "$defs", "definitions"):
                if keyword in ("anyOf", "oneOf") and isinstance(value, list):
                    cost += len(cast(list[Any], value))
                todo.append(cast(object, value))
    return cost


def _cost_of_object(node: dict[str, Any], num_properties: int, *, is_pattern: bool) -> int:
    if is_pattern:
        return num_properties * (1 + _BOUNDED_COST)
    required: object = node.get("required")
    num_required = len(cast(list[Any], required)) if isinstance(required, list) else 0
    return num_properties + max(0, num_properties - num_required) ** 2 // _OPTIONAL


class _Crossings:
    """Rules that cross at one place: of how many alternatives, and with how many patterns."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._known: dict[int, tuple[int, int]] = {}

    def check(self) -> None:
        """Refuse where too much holds together."""
        for node in schemas_in(self._schema):
            if not _COMBINING.isdisjoint(node):
                self._count(node)

    def _count(self, schema: object) -> tuple[int, int]:
        """Alternatives and patterns of a schema."""
        if not isinstance(schema, dict):
            return 1, 0
        node = cast(dict[str, Any], schema)
        if (known := self._known.get(id(node))) is not None:
            return known
        self._known[id(node)] = 1, 0  # While it is counted: it may refer to itself.
        patterns = ("pattern" in node) + ("format" in node)
        if _COMBINING.isdisjoint(node):
            return 1, patterns
        factors: list[int] = []
        for keyword in ("anyOf", "oneOf"):
            if branches := [self._count(each) for each in _listed(node.get(keyword))]:
                factors.append(sum(ways for ways, _ in branches))
                patterns += max(num for _, num in branches)
        together = list(_listed(node.get("allOf")))
        if isinstance(ref := node.get("$ref"), str):
            together.append(_referred(self._schema, ref))
        for each in together:
            ways, num = self._count(each)
            factors.append(ways)
            patterns += num
        ways = math.prod(factors)
        if ways > CROSSED_MAX and sum(each > 1 for each in factors) > 1:
            where = self._place(node)
            _refuse(f"at {where} alternatives hold together in {ways} ways, and {CROSSED_MAX} is the bound")
        if patterns > PATTERNS_MAX:
            _refuse(
                f"at {self._place(node)} {patterns} patterns hold together, and {PATTERNS_MAX} is the bound"
            )
        self._known[id(node)] = ways, patterns
        return ways, patterns

    def _place(self, node: dict[str, Any]) -> str:
        """Where a schema stands, as a JSON pointer."""
        for path, keyword, value in keywords(self._schema):
            if keyword in _COMBINING and node.get(keyword) is value:
                return path
        return "the root"


def _listed(value: object) -> Sequence[object]:
    return cast(list[object], value) if isinstance(value, list) else ()


def _num_keys(literal: object) -> int:
    """Keys of all objects in a value: an answer that must be that value has as many properties."""
    count, todo = 0, [literal]
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += cast(list[object], each)
        elif isinstance(each, dict):
            count += len(cast(dict[str, object], each))
            todo += cast(dict[str, object], each).values()
    return count


def _numbers(literal: object) -> Iterator[int | float]:
    """All that are in a value."""
    todo = [literal]
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += cast(list[object], each)
        elif isinstance(each, dict):
            todo += cast(dict[str, object], each).values()
        elif isinstance(each, int | float):
            yield each


def _check_literal(path: str, keyword: str, value: object) -> None:
    """Refuse numbers that would be written as other ones."""
    for number in _numbers(value):
        if not _is_written_exactly(number):
            _refuse(f"'{keyword}' at {path} has the number {number!r:.40}, which cannot be written exactly")


def _is_written_exactly(number: float) -> bool:
    """Whether llguidance writes a literal as it is given: it reads numbers as floats, and those of many
    digits or with large exponents not to the last bit (serde_json without `float_roundtrip`).
    """
    if not math.isfinite(number) or abs(number) > EXACT_MAX:
        return False
    if isinstance(number, int):
        return True
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    value = int("".join(map(str, digits)))
    return value <= EXACT_MAX and isinstance(exponent, int) and abs(exponent) <= EXACT_EXPONENT_MAX


def _referred(schema: object, pointer: str) -> object:
    """The target of a reference within the schema; None if nothing is there."""
    for part in unquote(pointer).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found: object = cast(dict[str, object], schema).get(name) if isinstance(schema, dict) else None
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(cast(list[object], schema)):
            found = cast(list[object], schema)[int(name)]
        schema = found
    return schema


def _digits(value: float) -> int:
    """The digits of a decimal number as one integer."""
    return int("".join(filter(str.isdigit, f"{value:.15g}".partition("e")[0])) or 1)


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, param="json")
