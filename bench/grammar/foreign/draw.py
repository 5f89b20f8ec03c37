"""Random schemas as lines of JSON, drawn by Hypothesis and hypothesis-jsonschema.

    python bench/grammar/foreign/draw.py COUNT SEED

JSON Schema's own meta-schema refers to itself, of which hypothesis-jsonschema draws nothing. So it draws the
parts that hold no other schema, from schemas of them, and Hypothesis puts these into one another. Names,
constants and bounds are whatever it comes upon: empty and odd keys, huge numbers, control characters.
"""

import json
import sys
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema  # pyright: ignore[reportMissingImports]

PATTERNS = ["^[a-z]+$", "^[A-Z]{2,4}$", "[0-9]{3}", "^(red|green)$", "^a.{0,8}z$", "x", "^\\d{4}-\\d{2}$"]
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration", "uri"]
TYPES = ["string", "integer", "number", "boolean", "null"]
PARTS_MAX = 12
"""Of one schema, about."""

Drawn = st.SearchStrategy[Any]


def shape(required: str, **keywords: object) -> Drawn:
    """Objects with these properties; `required` are names with spaces between them."""
    return from_schema({
        "type": "object", "properties": keywords, "required": required.split(), "additionalProperties": False,
    })  # fmt: skip


def between(low: int, high: int, kind: str = "integer") -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": high}


def listed(items: object, limit: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": limit, "uniqueItems": True}


def leaves() -> Drawn:
    """Schemas without another one in them."""
    return st.one_of(
        shape("type", type={"const": "string"}, minLength=between(0, 8), maxLength=between(8, 40)),
        shape("type pattern", type={"const": "string"}, pattern={"enum": PATTERNS}),
        shape("type format", type={"const": "string"}, format={"enum": FORMATS}),
        shape("type", type={"const": "integer"}, minimum=between(-(10**9), 0), maximum=between(0, 10**9)),
        shape("type multipleOf", type={"const": "integer"}, multipleOf=between(1, 12)),
        shape(
            "type", type={"const": "number"}, minimum=between(-100, 0, "number"),
            exclusiveMaximum=between(1, 10**6, "number"),
        ),
        shape("type", type=listed({"enum": TYPES}, 3)),
        shape("enum", enum=listed({}, 4)),
        shape("const", const={}),
    )  # fmt: skip


def around(inner: Drawn) -> Drawn:
    """Schemas with such ones in them."""
    names = from_schema({"type": "string", "maxLength": 12})
    properties = st.dictionaries(names, inner, max_size=4)
    counts = from_schema(between(0, 2)), from_schema(between(2, 4))
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": properties},
        optional={"additionalProperties": st.one_of(st.booleans(), inner)},
    ).map(with_required)
    lists = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner}, optional={"minItems": counts[0], "maxItems": counts[1]}
    )
    several = st.lists(inner, min_size=1, max_size=3)
    tuples = st.fixed_dictionaries({"type": st.just("array"), "prefixItems": several, "items": st.booleans()})
    unions = st.fixed_dictionaries({"anyOf": several})
    both = st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
    return st.one_of(*[objects] * 5, *[lists] * 3, *[tuples] * 2, *[unions] * 2, both)


def around_with_refused(inner: Drawn) -> Drawn:
    """Those, and with keywords that no grammar enforces."""
    refused = st.one_of(
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"contains": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner}),
        shape("type uniqueItems", type={"const": "array"}, uniqueItems={"const": True}),
    )
    return st.one_of(around(inner), refused)


def with_required(found: dict[str, Any]) -> dict[str, Any]:
    """Every other property must be there."""
    return found | {"required": sorted(found["properties"])[::2]}


def main() -> None:
    count, found = int(sys.argv[1]), list[Any]()
    plain, odd = (
        st.recursive(leaves(), each, max_leaves=PARTS_MAX) for each in (around, around_with_refused)
    )

    @seed(int(sys.argv[2]))
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(st.integers(0, 11).flatmap(lambda each: odd if not each else plain))
    def draw(drawn: object) -> None:
        found.append(drawn)

    draw()
    for each in found[:count]:
        print(json.dumps(each))


if __name__ == "__main__":
    main()
