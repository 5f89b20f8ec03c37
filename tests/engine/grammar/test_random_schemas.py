"""Whatever a schema says: it is refused by name, or every finished answer validates."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest
import random_schemas

llguidance = pytest.importorskip("llguidance")

from demo_grammars import tokens

from penstock.engine.grammar.compiler import GrammarCompiler, compile_grammar
from penstock.errors import InvalidRequest
from penstock.protocol.worker_parts import Grammar
from penstock.rng import stream

TOKENS_MAX = 120


def walk(matcher: Any, seed: int) -> bytes | None:
    """A random answer, each allowed token as likely as any other; None if it has no end in time."""
    random, found = stream(seed, "walk"), b""
    for _ in range(TOKENS_MAX):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [i for i in range(4096) if bits >> i & 1]
        assert allowed, matcher.get_error()
        ends = [i for i in allowed if i in tokens().eos_ids]
        token = ends[0] if ends else random.choice(allowed)
        if token in tokens().eos_ids:
            return found
        assert matcher.consume_token(token), matcher.get_error()
        found += tokens().tokenizer.token_bytes(token)
        if matcher.is_stopped():
            return found
    return None


def test_answers_of_random_schemas_validate() -> None:
    num_valid = 0
    for seed in range(40):
        schema = random_schemas.schema(stream(seed, "schema"))
        try:
            compiled = compile_grammar(Grammar(form=msgspec.json.encode({"json": schema})), tokens())
        except InvalidRequest:
            continue
        text = walk(compiled.first.deep_copy(), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num_valid += 1
    assert num_valid >= 30


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "integer", "multipleOf": 99_999_989}}, "/multipleOf"),
        ({"json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991)]}}, "/multipleOf"),
        ({"json": {"properties": {f"p{i}": {} for i in range(1025)}}}, "it is too large"),
        ({"json": {"enum": [{"a": i, "b": i} for i in range(513)]}}, "it is too large"),
        (
            {
                "json": {
                    "allOf": [
                        {
                            "type": "object",
                            "properties": {"x": {"type": "string", "pattern": f"a.{{{i}}}b"}},
                            "required": ["x"],
                        }
                        for i in range(20)
                    ]
                }
            },
            "too much",
        ),
        ({"grammar": 'start: %json {"type": "integer", "multipleOf": 99999989}'}, "/multipleOf"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "x-guidance"),
        ({"regex": "(" * 9000 + "a" + ")" * 9000}, "regex"),
    ],
    ids=["multiple", "common-multiple", "properties", "enum", "time", "multiple-in-lark", "lenient", "deep"],
)
def test_a_hostile_form_is_refused_and_the_next_one_is_compiled(form: dict[str, Any], words: str) -> None:
    compiler = GrammarCompiler(tokens())
    try:
        with pytest.raises(InvalidRequest, match=words):
            compiler.compile(b"", Grammar(form=msgspec.json.encode(form))).result()
        compiler.compile(b"", Grammar(form=b'{"regex": "a"}')).result()
    finally:
        compiler.close()
