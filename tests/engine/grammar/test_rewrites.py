"""Schemas in other words mean the same; dates and times match those alone that Python's own parser takes."""

import datetime
import json
from collections.abc import Callable
from decimal import Decimal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from demo_grammars import tokens

from penstock.engine.grammar.compiler import compile_grammar
from penstock.errors import InvalidRequest
from penstock.protocol.worker_parts import Grammar


def maker(form: dict[str, object]) -> Callable[[object], bool]:
    """Whether a value matches."""
    first = compile_grammar(Grammar(form=json.dumps(form).encode()), tokens()).first

    def matches(value: object) -> bool:
        ids = list(tokens().tokenizer.encode(json.dumps(value)))
        matcher = first.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return matches


def parses(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


is_date = maker({"json": {"type": "string", "format": "date"}})
is_moment = maker({"json": {"type": "string", "format": "date-time"}})
years = st.integers(0, 9999) | st.sampled_from([0, 1, 4, 100, 400, 1900, 2000, 2023, 2024])
days = st.integers(1, 31) | st.sampled_from([28, 29, 30, 31])


@given(year=years, month=st.integers(1, 12) | st.just(2), day=days)
def test_a_date_is_one_that_exists(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    assert is_date(text) is parses(datetime.date.fromisoformat, text)
    assert is_moment(f"{text}T12:00:00Z") is parses(datetime.date.fromisoformat, text)


@given(hour=st.integers(0, 25), minute=st.integers(0, 61), second=st.integers(0, 61))
def test_a_moment_has_no_leap_second(hour: int, minute: int, second: int) -> None:
    text = f"2024-02-29T{hour:02}:{minute:02}:{second:02}+02:00"
    assert is_moment(text) is parses(datetime.datetime.fromisoformat, text)


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "string", "format": "date", "pattern": "^20"}},
        {"json": {"type": "string", "format": "date", "pattern": "^20", "allOf": [{"maxLength": 10}]}},
        {"json": {"anyOf": [{"type": ["string", "null"], "format": "date", "minLength": 1}]}},
        {"json": {"$ref": "#/$defs/day", "$defs": {"day": {"type": "string", "format": "date"}}}},
        {"grammar": 'start: %json {"type": "string", "format": "date"}'},
    ],
    ids=["pattern", "allOf", "anyOf", "$ref", "lark"],
)
def test_wherever_the_format_stands(form: dict[str, object]) -> None:
    matches = maker(form)
    assert matches("2024-02-29")
    assert not matches("2023-02-29")


def test_a_value_named_format_is_no_format() -> None:
    matches = maker({"json": {"enum": [{"format": "date", "x": "2023-02-29"}]}})
    assert matches({"format": "date", "x": "2023-02-29"})


REWRITTEN: list[tuple[dict[str, object], list[object], list[object]]] = [
    (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "null"},
        },
        [{}, {"ab": None}],
        [{"Ab": None}, {"ab": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/key"}, "$defs": {"key": {"enum": ["a", "b"]}}},
        [{}, {"b": 1}, {"a": 1, "b": []}],
        [{"c": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"type": "string"}, "properties": {"a": {"const": 1}}},
        [{"a": 1}],
        [{"a": 2}],
    ),
    (
        {"oneOf": [{"type": ["string", "null"]}, {"type": ["number", "null"], "description": "d"}]},
        ["x", 3],
        [None, []],
    ),
    (
        {"type": "string", "format": "uri-reference"},
        ["#/a/b", "a/b?c=d#e", "https://example.com/a", "/x", ""],
        ["a b", "http://[", "\\"],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), REWRITTEN)
def test_what_is_said_otherwise_means_the_same(
    schema: dict[str, object], right: list[object], wrong: list[object]
) -> None:
    matches = maker({"json": schema})
    assert all(map(matches, right))
    assert not any(map(matches, wrong))
    for value in right if "format" not in schema else ():
        jsonschema.validate(value, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"minLength": 2}},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string"}]},
    ],
)
def test_what_cannot_be_said_otherwise_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"propertyNames|oneOf"):
        maker({"json": schema})


@pytest.mark.parametrize("number", [0, -1, 1 << 53, 0.1, -3.25, 1e-06, 12345678.25, 7e15, 4.35e-20])
def test_a_literal_number_is_written_with_its_own_digits(number: float) -> None:
    matcher = compile_grammar(Grammar(form=json.dumps({"json": {"const": number}}).encode()), tokens()).first
    ids = list(tokens().tokenizer.encode(format(Decimal(repr(number)), "f").removesuffix(".0")))
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
