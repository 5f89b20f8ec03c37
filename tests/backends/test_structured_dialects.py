"""What an answer must look like, in each engine's own words, after their published interfaces. None of these
servers can be started here.
"""

import json
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Requests
from msgspec.structs import replace

from penstock.backends.http.dialects.sglang import SglangDialect
from penstock.backends.http.dialects.tgi import TgiDialect
from penstock.backends.http.dialects.vllm import VllmDialect
from penstock.errors import InvalidRequest
from penstock.protocol.needs import Constraint
from penstock.types import Capability

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
AS_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
GRAMMAR = 'root ::= "a"'
ENGINES = {
    "vllm": VllmDialect("m", has_priorities=False),
    "sglang": SglangDialect("m", byte_tokenizer(), has_priorities=False),
    "tgi": TgiDialect(byte_tokenizer()),
}
Fields = dict[str, Any]
FORMS: list[tuple[Fields, Fields, Fields]] = [
    ({"json": SCHEMA}, {"json_schema": AS_TEXT}, {"type": "json", "value": SCHEMA}),
    ({"json": json.dumps(SCHEMA)}, {"json_schema": AS_TEXT}, {"type": "json", "value": SCHEMA}),
    (
        {"json_object": True},
        {"json_schema": '{"type":"object"}'},
        {"type": "json", "value": {"type": "object"}},
    ),
    ({"regex": "[ab]+"}, {"regex": "[ab]+"}, {"type": "regex", "value": "[ab]+"}),
    (
        {"choice": ["a.b", "c d", "(e)"]},
        {"regex": r"a\.b|c d|\(e\)"},
        {"type": "regex", "value": r"a\.b|c d|\(e\)"},
    ),
]


def sent(engine: str, form: Fields) -> Fields:
    constraint = Constraint(structured=form, form=json.dumps(form).encode(), param="structured_outputs")
    request = replace(Requests().make(), constraint=constraint)
    return json.loads(ENGINES[engine].submission(request).body)


@pytest.mark.parametrize(("form", "sglang", "tgi"), FORMS)
def test_each_engine_gets_a_form_in_its_words(form: Fields, sglang: Fields, tgi: Fields) -> None:
    assert sent("vllm", form)["structured_outputs"] == form
    assert sglang.items() <= sent("sglang", form)["sampling_params"].items()
    assert sent("tgi", form)["parameters"]["grammar"] == tgi


def test_a_grammar_goes_where_there_are_grammars() -> None:
    """TGI has none, and says so: no request that needs one is placed there."""
    assert sent("sglang", {"grammar": GRAMMAR})["sampling_params"]["ebnf"] == GRAMMAR
    able = {name for name, dialect in ENGINES.items() if Capability.GRAMMARS in dialect.capabilities}
    assert able == {"vllm", "sglang"}


@pytest.mark.parametrize(
    "form",
    [
        {"json": SCHEMA, "regex": "a"},
        {"backend": "x"},
        {"regex": 1},
        {"choice": "a"},
        {"json": "{"},
        {"json": 5},
    ],
)
@pytest.mark.parametrize("engine", ["sglang", "tgi"])
def test_what_is_not_one_form_is_bad_input(form: Fields, engine: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sent(engine, form)
    assert refused.value.param == "structured_outputs"
