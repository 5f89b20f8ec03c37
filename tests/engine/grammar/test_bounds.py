"""Ordinary schemas are within the bounds, those that compile for long are not; equal values are shared."""

import json
import time

import msgspec
import pytest

pytest.importorskip("llguidance")

from penstock.engine.grammar.bounds import check_schema, shared
from penstock.engine.grammar.source import check_form
from penstock.engine.grammar.trial import SchemaTrials
from penstock.errors import InvalidRequest


def fields(num: int, value, *, required: bool = False) -> dict:
    """An object; `value`: the schema of one field, by its number."""
    named = {f"field_{i}": value(i) for i in range(num)}
    return {"type": "object", "properties": named, "required": list(named) if required else []}


def bounds_differ(i: int) -> dict:
    return {"type": "integer", "minimum": i, "maximum": 77 * i + 1}


def date(i: int) -> dict:
    return {"type": "string", "format": "date-time", "description": f"the date number {i}"}


ORDINARY = {
    "200 optional texts": fields(200, lambda _: {"type": "string"}),
    "200 numbers, each in bounds of its own": fields(200, bounds_differ),
    "700 required integers": fields(700, lambda _: {"type": "integer", "minimum": 0}, required=True),
    "500 dates": fields(500, date, required=True),
    "an enum of 1,000 words": {"enum": [f"word-{i}" for i in range(1000)]},
    "50 shapes": {"oneOf": [
        fields(2, bounds_differ) | {"properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]}
        for i in range(50)
    ]},
    "a tree": {"$defs": {"node": {"type": "object", "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    }}}, "$ref": "#/$defs/node"},
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_schema_is_compiled(name: str) -> None:
    check_form(msgspec.json.encode({"json": ORDINARY[name]}))


def pairs(num: int) -> list[dict]:
    """Each one property or another."""
    return [
        {"anyOf": [{"type": "object", "required": [f"{side}{i}"], "properties": {f"{side}{i}": {"const": 1}}}
                   for side in "ab"]}
        for i in range(num)
    ]  # fmt: skip


HOSTILE = {
    "it is too large": [
        fields(1000, lambda _: {"type": "string"}),
        fields(400, bounds_differ),
        {"enum": list(range(20_000))},
        {"enum": [{"a": i, "b": i} for i in range(400)]},
        {"anyOf": [fields(2, lambda _: {}) for _ in range(600)]},
        {"$ref": "#/$defs/a", "$defs": {"a": fields(1000, lambda _: {})}},
    ],
    "at /allOf alternatives hold together in 512 ways": [{"allOf": pairs(9)}],
    "at /properties/x/allOf 9 patterns hold together": [
        {"properties": {"x": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(9)]}}}
    ],
    "alternatives hold together": [
        {"$defs": {"a": {"anyOf": pairs(20)}}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(400)}
         | {"d400": {"anyOf": [{}, {}]}}, "$ref": "#/$defs/d0"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("refusal", HOSTILE)
def test_what_would_compile_for_long_is_refused_before_that(refusal: str) -> None:
    for schema in HOSTILE[refusal]:
        began = time.process_time()
        with pytest.raises(InvalidRequest, match=refusal) as caught:
            check_form(msgspec.json.encode({"json": schema}))
        assert caught.value.param == "json"
        assert time.process_time() - began < 5, "the bound itself is a count"


def test_definitions_that_nothing_uses_cost_nothing() -> None:
    check_schema({"type": "object", "$defs": {"a": fields(5000, bounds_differ)}})


def test_references_in_a_circle_are_counted_once() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
    check_schema({"$defs": {"a": {"allOf": [node, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})


def test_equal_values_become_one_definition() -> None:
    plain = {"type": "string", "format": "date"}
    schema = {
        "$defs": {"mine": {"type": "null"}},
        "type": "object",
        "properties": {
            "a": plain | {"title": "A"}, "b": {"type": "array", "items": dict(plain)}, "c": dict(plain),
            "once": {"type": "string", "pattern": "x"}, "text": {"type": "string"},
        },
    }  # fmt: skip
    before = json.dumps(schema)
    found = shared(schema)
    assert json.dumps(schema) == before, "it is the request's"
    reference = {"$ref": "#/$defs/shared-0"}
    assert found["$defs"] == {"shared-0": plain, "mine": {"type": "null"}}
    properties = found["properties"]
    assert (properties["a"], properties["b"]["items"], properties["c"]) == (reference,) * 3
    assert properties["once"] == schema["properties"]["once"]
    check_form(msgspec.json.encode({"json": schema}))


@pytest.mark.parametrize(
    "extra",
    [{"$defs": {"shared-0": {}}}, {"$defs": []}, {"properties": {"x": {"$id": "http://x/y"}}}],
)
def test_nothing_is_shared_where_a_reference_would_be_anothers(extra: dict) -> None:
    two = [{"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}] * 2
    schema = {"anyOf": two} | extra
    assert shared(schema) is schema


@pytest.mark.parametrize(
    "number", [5154358338785905440, 29940310756172288, 3e258, 1.7976931348623155e308, 2.3e-296]
)
@pytest.mark.parametrize("literal", [lambda n: {"const": n}, lambda n: {"enum": ["a", {"b": [n]}]}])
def test_a_literal_that_would_not_be_written_exactly_is_refused_by_keyword(number, literal) -> None:
    schema = {"type": "object", "properties": {"a": literal(number)}}
    with pytest.raises(InvalidRequest, match=r"'(const|enum)' at /properties/a/(const|enum) has the number"):
        check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"type": "array", "items": False, "minItems": 1}, ["/items", "/minItems"]),
        ({"type": "array", "const": [1, 2, 3], "maxItems": 1}, ["/const", "/maxItems"]),
        ({"type": "integer", "minimum": 101, "maximum": 108, "multipleOf": 10}, ["/minimum", "/multipleOf"]),
        (
            {"type": "object", "properties": {"a": {"pattern": "^x$", "minLength": 3, "type": "string"}},
             "required": ["a"]},
            ["/required", "/properties/a/pattern", "/properties/a/minLength"],
        ),
    ],
)  # fmt: skip
def test_a_schema_that_nothing_matches_is_refused_by_the_keywords_that_contradict(schema, places) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_form(json.dumps({"json": schema}).encode())
    assert f"cannot be enforced at {places[0]}: Unsatisfiable" in str(refused.value)
    assert all(place in str(refused.value) for place in places)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": [1]}, "/properties"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/nope"}}}, "/properties/a/$ref"),
        ({"type": "object", "required": "a"}, "/required"),
        ({"type": "array", "items": {"type": "strin"}}, "/items/type"),
    ],
)
def test_a_schema_that_is_none_is_refused_by_its_place(schema, place) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_form(json.dumps({"json": schema}).encode())
    assert f"cannot be enforced at {place}: " in str(refused.value)


def test_a_keyword_whose_absence_breaks_something_else_is_not_named() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/q"}], "$defs": {"q": {"type": "object"}}, "type": "object",
        "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}},
    }  # fmt: skip
    with pytest.raises(InvalidRequest) as refused:
        check_form(json.dumps({"json": schema}).encode())
    assert "/properties/a/minimum" in str(refused.value)
    assert "/properties/a/maximum" in str(refused.value)
    assert "$defs" not in str(refused.value)


def test_the_search_for_keywords_does_not_take_the_time_of_a_schema_that_is_large() -> None:
    """Of 60 kB: it is told that nothing matches it, and not that it takes too long."""
    named = {f"f{i}": {"type": "string"} for i in range(20)}
    named |= {"g": {"type": "integer", "minimum": 5, "maximum": 3}}
    named |= {"h": {"enum": [f"a word of number {i}" for i in range(3000)]}}
    schema = {"type": "object", "properties": named, "required": ["g"], "additionalProperties": False}
    trials = SchemaTrials()
    try:
        with pytest.raises(InvalidRequest, match="Unsatisfiable"):
            trials.check(json.dumps({"json": schema}).encode())
    finally:
        trials.close()


def test_a_large_schema_that_nothing_matches_is_refused_without_a_search() -> None:
    named = {f"f{i}": {"type": "string"} for i in range(60)} | {"g": {"enum": []}}
    schema = {"type": "object", "properties": named, "required": ["g"], "additionalProperties": False}
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        check_form(json.dumps({"json": schema}).encode())
    assert time.process_time() - began < 1.0
