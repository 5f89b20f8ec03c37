"""Random schemas as people write them; about a tenth have a keyword that no grammar enforces."""

from typing import Any

from penstock.rng import Stream

ROOT_DEPTH = 3
_WORDS = ("name", "id", "count", "tags", "owner", "price", "a", "b", "value", "kind")
_PATTERNS = ("^[a-z]+$", "^[A-Z]{2,4}$", "[0-9]{3}", "^(red|green)$", "^a.{0,8}z$", "x", "^\\d{4}-\\d{2}$")
_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "duration", "uri")
_REFUSABLE = (
    {"not": {"type": "null"}}, {"uniqueItems": True}, {"contains": {}}, {"propertyNames": {"maxLength": 3}},
    {"if": {}, "then": {}}, {"dependentRequired": {"a": ["b"]}}, {"unevaluatedProperties": False},
)  # fmt: skip


def schema(random: Stream, depth: int = ROOT_DEPTH) -> dict[str, Any]:
    """One of them."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf", "allOf", "types", "tuple", "ref"]
    found = _MAKE[random.choice(kinds)](random, depth)
    if random.random() < 0.03:
        found |= random.choice(_REFUSABLE)
    return found


def _string(random: Stream, _depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    way = random.random()
    if way < 0.25:
        found["pattern"] = random.choice(_PATTERNS)
    elif way < 0.45:
        found["format"] = random.choice(_FORMATS)
    elif way < 0.9:
        found["maxLength"] = random.randrange(1, 40)
        if random.random() < 0.4:
            found["minLength"] = random.randrange(found["maxLength"] + 1)
    return found


def _integer(random: Stream, _depth: int) -> dict[str, Any]:
    low = random.randrange(-1000, 1000)
    found: dict[str, Any] = {"type": "integer"}
    if random.random() < 0.7:
        found |= {"minimum": low, "maximum": low + random.randrange(500)}
    elif random.random() < 0.3:
        found["multipleOf"] = random.choice((2, 3, 5, 10))
    return found


def _number(random: Stream, _depth: int) -> dict[str, Any]:
    low = round(random.uniform(-50, 50), 2)
    names = ("minimum", "maximum") if random.random() < 0.5 else ("exclusiveMinimum", "exclusiveMaximum")
    bounds = dict(zip(names, (low, round(low + random.uniform(0.5, 90), 2)), strict=True))
    return {"type": "number"} | (bounds if random.random() < 0.7 else {})


def _object(random: Stream, depth: int) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randrange(1, 6))
    properties = {name: schema(random, depth - 1) for name in names}
    required = [name for name in names if random.random() < 0.7]
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if random.random() < 0.8:
        found["additionalProperties"] = False
    elif random.random() < 0.5:
        found["additionalProperties"] = schema(random, 0)
    return found


def _array(random: Stream, depth: int) -> dict[str, Any]:
    low = random.randrange(3)
    found: dict[str, Any] = {"type": "array", "items": schema(random, depth - 1)}
    return found | ({"minItems": low, "maxItems": low + random.randrange(4)} if random.random() < 0.8 else {})


def _tuple(random: Stream, depth: int) -> dict[str, Any]:
    parts = [schema(random, depth - 1) for _ in range(random.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _ref(random: Stream, depth: int) -> dict[str, Any]:
    """A tree of itself, at the root."""
    if depth < ROOT_DEPTH:
        return _object(random, depth)
    node = {"type": "object", "properties": {
        "value": schema(random, 0),
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    }, "required": ["value"], "additionalProperties": False}  # fmt: skip
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


_MAKE: dict[str, Any] = {
    "string": _string, "integer": _integer, "number": _number, "object": _object, "array": _array,
    "tuple": _tuple, "ref": _ref,
    "boolean": lambda *_: {"type": "boolean"},
    "null": lambda *_: {"type": "null"},
    "enum": lambda random, _: {"enum": random.sample(["x", "yes", 3, 4.5, None, True, ["a"], {"b": 1}], 3)},
    "const": lambda random, _: {"const": random.choice(["é\n", 7, {"k": [1, 2]}, False])},
    "anyOf": lambda random, depth: {"anyOf": [schema(random, depth - 1) for _ in range(2)]},
    "allOf": lambda random, depth: {"allOf": [schema(random, depth - 1), {"description": "both"}]},
    "types": lambda random, _: {"type": random.sample(["string", "integer", "null", "boolean"], 2)},
}  # fmt: skip
