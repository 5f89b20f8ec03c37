"""The form that a request asks for, as a grammar of llguidance; what cannot be enforced is refused.

Nothing is approximated: llguidance's lenient mode is off, and a keyword that it would pass over stops the
request. JSON is written in one way, with ", " and ": " between its parts and no other white space: so the
length of white space is bounded, and what lies between two values is forced.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from penstock.engine.grammar.bounds import ANNOTATIONS, check_schema, keywords, shared
from penstock.engine.grammar.calls import calls_grammar, with_known_formats, with_known_keywords
from penstock.engine.grammar.values import Marks
from penstock.errors import InvalidRequest
from penstock.protocol.worker_parts import GRAMMAR_BYTES_MAX

KINDS = ("json", "json_object", "regex", "choice", "grammar", "calls")
CHOICES_MAX = 4096
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""llguidance's bounds on one grammar: on compiling, on one mask, and on memory (1 to 2 KB a state)."""
_ANOTHER = re.compile(r"Resource ('[^']*') is not present")
_OWN_TEXT = re.compile(r"\A(at \d+\(\d+\): )?(failed to compile JSON schema: )?|\n\s*\d+ \|.*\Z", re.DOTALL)
"""llguidance's message about the grammar that was made here around a schema: clients have not written it."""
_UNSATISFIABLE = "Unsatisfiable schema"
_TRIED_MAX, _NAMED_MAX = 48, 3
"""Keywords that are taken out of a schema that nothing matches, one at a time, and those that are named."""
_TRIED_CHARS_MAX = 8192
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


def grammar_text(form: bytes, marks: Marks = json.dumps) -> tuple[str, object]:
    """A grammar of llguidance, and the JSON schema that it is made from, if it is.

    `marks` finds the tokens of marks within calls.

    Raises:
        InvalidRequest: it is not understood, or over a bound. `param` names the keyword of `form`.
    """
    if len(form) > GRAMMAR_BYTES_MAX:
        _refuse(f"it has {len(form)} bytes, and {GRAMMAR_BYTES_MAX} is the bound", "")
    try:
        asked: Any = msgspec.json.decode(form)
    except RecursionError:
        _refuse("it is nested too deeply", "")
    given = [kind for kind in KINDS if kind in asked and asked[kind] is not None]
    if len(given) != 1:
        expected = ", ".join(KINDS[:-1])  # The last one is this server's own.
        _refuse(f"expected one of {expected}, but got {' and '.join(given) or 'none of them'}", "")
    for name, value in asked.items():
        if name not in KINDS and value not in (None, False):
            _refuse(f"'{str(name)[:64]}' is not supported", str(name)[:64])
    kind = given[0]
    if kind == "calls":
        return _calls(asked[kind], marks)
    return _MAKERS[kind](asked[kind])


def limits() -> LLParserLimits:
    """The bounds of one grammar."""
    return LLParserLimits(**_LIMITS)


def check_form(form: bytes) -> None:
    """Compile a grammar, without a vocabulary: nearly all that there is to compiling.

    Raises:
        InvalidRequest: it cannot be enforced. `param` names the keyword of `form`.
    """
    text, schema = grammar_text(form)
    is_wrong, said = LLMatcher.validate_grammar_with_warnings(text, None, limits=limits())
    if is_wrong:
        refuse_words(said[0], schema)


def refuse_words(said: str, schema: object) -> NoReturn:
    """Refuse with what llguidance says, and where in the schema that is.

    Raises:
        InvalidRequest: always.
    """
    if said.startswith("NoExtension"):
        said = "nothing matches it"
    if schema is not None:
        said = _OWN_TEXT.sub("", said)
    words = " ".join(said.partition("\n<")[0].split())
    words, _, within = words.partition(" while processing ")
    if schema is None:
        raise InvalidRequest(f"it cannot be enforced: {words[:400]}")
    place = within.partition("#")[2] if "#/" in within else place_of(schema, words)
    if another := _ANOTHER.match(words):
        place = next((p for p, name, value in keywords(schema) if name == "$ref" and value[:1] != "#"), place)
        words = f"'$ref' to {another[1]}, which is another document"
    if _UNSATISFIABLE in words and isinstance(schema, dict) and "tools" not in schema:
        # The library says which value nothing can be, and not where.
        places = contradiction(cast(dict[str, Any], schema))
        place = places[0] if places else place
        words += f" (with {' and '.join(places[1:])})" if places[1:] else ""
    words = words[:400]
    where = f" at {place}" if place else ""
    raise InvalidRequest(f"the schema cannot be enforced{where}: {words}", param="json")


def contradiction(schema: dict[str, Any]) -> list[str]:
    """The keywords of a schema that nothing matches without each of which something would, as JSON pointers:
    the inner ones, and none where there are too many to try, or each try is long: the time for them is the
    schema's own.
    """
    places = [path for path, name, _ in keywords(schema) if name not in ANNOTATIONS]
    if len(places) > _TRIED_MAX or len(json.dumps(schema)) > _TRIED_CHARS_MAX:
        return []
    found = [path for path in places if _compiles(_without(schema, path))]
    inner = [path for path in found if not any(other.startswith(f"{path}/") for other in found)]
    # Without its type nearly any schema is matched by something: others say more.
    return sorted(inner, key=lambda path: path.endswith("/type"))[:_NAMED_MAX]


def _compiles(schema: dict[str, Any]) -> bool:
    is_wrong, _ = LLMatcher.validate_grammar_with_warnings(_schema_text(schema), None, limits=limits())
    return not is_wrong


def _without(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy without the keyword at a JSON pointer."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    node: Any = copy
    *outer, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])
    for part in outer:
        node = cast(Any, node[int(part)] if isinstance(node, list) else node[part])
    del node[last]
    return copy


def place_of(schema: object, message: str) -> str:
    """Where in a schema the keyword is that llguidance complains of, as a JSON pointer; empty if unknown."""
    by_value = by_name = ""
    for path, keyword, value in keywords(schema):
        if f'"{keyword}"' in message or message.startswith(f"{keyword} "):
            return path
        if not by_value and isinstance(value, str):
            text = value.lstrip("#")
            by_value = path if len(text) > 1 and text in message else ""
        if not by_name and keyword in message:
            by_name = path
    return by_value or by_name


def _json(schema: object) -> tuple[str, object]:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            _refuse(f"the schema is not JSON: {error}", "json")
        except RecursionError:
            _refuse("the schema is nested too deeply", "json")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        _refuse("a schema is an object, or true", "json")
    schema = cast(dict[str, Any], schema)
    if "x-guidance" in schema:  # llguidance's own options, which are ours to set.
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    schema = with_known_keywords(schema)
    check_schema(schema)
    try:
        return _schema_text(schema), schema
    except ValueError as error:
        _refuse(f"the schema is not supported: {error}", "json")


def _schema_text(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(shared(with_known_formats(schema))), overrides=cast(Any, _JSON_OPTIONS)
    )


def _json_object(value: object) -> tuple[str, object]:
    if value is not True:
        _refuse("expected true", "json_object")
    return _json({"type": "object"})


def _calls(value: object, marks: Marks) -> tuple[str, object]:
    """The schema, for places in it, is as clients write `tools`."""
    asked = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    named: dict[str, Any] = {"tools": [{"function": each} for each in asked.get("tools", ())]}
    try:
        return calls_grammar(asked, _JSON_OPTIONS, marks), named
    except InvalidRequest as error:
        if error.param != "calls":
            raise
        refuse_words(str(error), named)


def _regex(value: object) -> tuple[str, object]:
    if not isinstance(value, str):
        _refuse("expected a string", "regex")
    return LLMatcher.grammar_from_regex(value), None


def _choice(value: object) -> tuple[str, object]:
    values = cast(list[Any], value) if isinstance(value, list) else []
    if not values or not all(isinstance(each, str) and each for each in values):
        _refuse("expected an array of strings, none of them empty", "choice")
    if len(values) > CHOICES_MAX:
        _refuse(f"it has {len(values)} strings, and {CHOICES_MAX} is the bound", "choice")
    choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in dict.fromkeys(values))
    return LLMatcher.grammar_from_lark(f"start: {choices}"), None


def _grammar(value: object) -> tuple[str, object]:
    if not isinstance(value, str) or not value.strip():
        _refuse("expected a string that is not empty", "grammar")
    pieces, end = list[str](), 0
    for found in re.finditer(r"%json\b\s*", value):  # The rules of a schema hold in here too.
        try:
            schema, behind = json.JSONDecoder().raw_decode(value, found.end())
        except (ValueError, RecursionError) as error:
            _refuse(f"the schema behind %json is not JSON: {error}", "grammar")
        if isinstance(schema, dict):
            inner = cast(dict[str, Any], schema)
            if "x-guidance" in inner:
                _refuse("'x-guidance' is not supported", "grammar")
            inner = with_known_keywords(inner)
            check_schema(inner)
            pieces += value[end : found.end()], json.dumps(with_known_formats(inner))
            end = behind
    try:
        return LLMatcher.grammar_from_lark(any_to_lark("".join([*pieces, value[end:]]))), None
    except Exception as error:  # noqa: BLE001 The converter raises what it likes.
        _refuse(f"the grammar cannot be read: {error}", "grammar")


_MAKERS: Mapping[str, Callable[[object], tuple[str, object]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def _refuse(message: str, keyword: str) -> NoReturn:
    raise InvalidRequest(message, param=keyword)
