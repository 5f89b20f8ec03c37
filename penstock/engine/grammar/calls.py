"""Calls of tools as grammars: every syntax of text/tool_formats.py, with arguments that obey their schemas.

    JSON           hermes, phi, functools, mistral, llama3_json    all that schemas of answers may say
    XML            qwen3_coder        values that are no strings are JSON; a string is text up to its tag
    Python, Gemma  pythonic, tool_code, gemma    literals of their own (values.py), of types that are plain

A grammar begins where the syntax's `call_mark` says and allows one spelling, which the parser of the syntax
reads. A rule that cannot be enforced is refused.

Schemas, of calls and of answers, are first put in words that llguidance enforces. Dates exist, as RFC 3339
(5.7) wants them of `date` and `date-time`: llguidance's own automata know the lengths of months, but not leap
years, and have a year 0 and leap seconds, which validators refuse. `propertyNames`, which it does not know,
and `oneOf` of types are said otherwise where that means the same.
"""

import json
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from llguidance import LLMatcher

from penstock.engine.grammar.bounds import ANNOTATIONS, check_schemas, schemas_in, shared
from penstock.engine.grammar.values import (
    GEMMA,
    NUMBERS,
    PYTHON,
    SILENT,
    Marks,
    Rules,
    Spelling,
    Values,
    repeated,
)
from penstock.errors import InvalidRequest
from penstock.protocol.needs import CALLS_MAX, SHAPES
from penstock.text.tools import kinds_of, resolved

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])"
_LEAP_YEAR = "([0-9][0-9](0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_LEAP_YEAR}-02-29|{_YEAR}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9][0-9]))"
_SECONDS = "[0-9][0-9]:[0-9][0-9]:[0-5]"
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_SECONDS}", "time": f"^{_SECONDS}"}
"""The patterns that hold beside llguidance's automaton of the format."""
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


_SPACE = r"(/[ \t\r\n]{1,4}/)?"
_CLOSE, _COMMA, _LINE = '"}"', '", "', '"\\n"'
_WHITE = r"[ \t\r\n]{0,8}"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_XML_ENDS = ("</parameter>", "<parameter=", "</function>", "<function=", "<tool_call>", "</tool_call>")
_XML_END = "\n</parameter>"
_XML_NAME = re.compile(r"[^>\n<]+")

Tools = Sequence[tuple[str, dict[str, Any]]]
"""Names and the schemas of their parameters."""
JsonOptions = Mapping[str, Any]


def calls_grammar(value: object, options: JsonOptions, marks: Marks) -> str:
    """The grammar of calls: `value` has `format`, `tools` with `name` and `parameters`, and `several`;
    `options` are those of JSON.

    Raises:
        InvalidRequest: it is not understood, or a schema cannot be enforced in this syntax.
    """
    asked = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    maker = _FORMATS.get(asked.get("format", ""))
    if maker is None or not isinstance(asked.get("tools"), list):
        raise InvalidRequest("expected a format and tools", param="calls")
    tools = [(str(each["name"]), _parameters(each.get("parameters") or {})) for each in asked["tools"]]
    check_schemas([schema for _, schema in tools])
    calls = _Calls(tools, options, marks, several=asked.get("several") is not False)
    start = maker(calls)
    return LLMatcher.grammar_from_lark("\n".join([f"start: {start}", *calls.rules.lines()]))


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object if nothing says what they are."""
    schema = with_known_keywords(schema)
    return schema if SHAPES & schema.keys() else schema | {"type": "object"}


class _Calls:
    """The parts of the grammars of one request's calls, and their rules so far."""

    def __init__(self, tools: Tools, options: JsonOptions, marks: Marks, *, several: bool) -> None:
        self.tools, self.rules = tools, Rules(marks)
        self._options = options
        self._more = CALLS_MAX - 1 if several else 0
        """How many calls may follow the first."""

    def json(self, schema: dict[str, Any]) -> str:
        """A value that the schema accepts."""
        return "%json " + json.dumps(shared(with_known_formats(schema)) | {"x-guidance": dict(self._options)})

    def arguments(self) -> list[str]:
        """The rules of each tool's arguments as JSON."""
        return [self.rules.rule(self.json(schema)) for _, schema in self.tools]

    def in_a_row(self, call: str, between: str) -> str:
        """One call or several."""
        return f"{call} {repeated(f'({between} {call})', 0, self._more)}"

    def any_of(self, calls: Iterable[str]) -> str:
        """The rule of a call of any of the tools."""
        return self.rules.rule(" | ".join(calls))

    def json_calls(self, head: Callable[[str], str], end: str) -> str:
        """The rule of a call that is `head` of a name, its arguments as JSON, and `end`."""
        pairs = zip(self.tools, self.arguments(), strict=True)
        return self.any_of(f"{head(name)} {arguments} {end}" for (name, _), arguments in pairs)


def _named(name: str) -> str:
    return json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')


def _hermes(calls: _Calls) -> str:
    return f"{_SPACE} {calls.json_calls(_named, _CLOSE)}"


def _phi(calls: _Calls) -> str:
    call = calls.json_calls(_named, _CLOSE)
    return f'{_SPACE} "[" {calls.in_a_row(call, _COMMA)} "]"'


def _functools(calls: _Calls) -> str:
    call = calls.json_calls(_named, _CLOSE)
    return f'{calls.in_a_row(call, _COMMA)} "]"'


def _mistral(calls: _Calls) -> str:
    """The array, or the newer way: a name, a mark, and the arguments."""
    mark, arguments = calls.rules.mark, calls.arguments()
    named = [
        (json.dumps(name), _named(name), each) for (name, _), each in zip(calls.tools, arguments, strict=True)
    ]
    older = calls.any_of(f"{head} {each} {_CLOSE}" for _, head, each in named)
    call_id = f"({mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
    newer = calls.any_of(f"{name} {call_id} {mark('[ARGS]')} {_SPACE} {each}" for name, _, each in named)
    return (
        f'{_SPACE} "[" {calls.in_a_row(older, _COMMA)} "]" | '
        f"{_SPACE} {calls.in_a_row(newer, mark('[TOOL_CALLS]'))}"
    )


def _llama(calls: _Calls) -> str:
    """White space is as the model likes it: it has begun the call."""

    def head(name: str) -> str:
        kind = _WHITE.join(["", '"type"', ":", '"function"', ","])
        word = re.sub(r"([^\w\"-])", r"\\\1", json.dumps(name))
        parts = [rf"\{{({kind})?", '"name"', ":", word, ",", '"(parameters|arguments)"', ":", ""]
        return f"/{_WHITE.join(parts)}/"

    call = calls.json_calls(head, f"/{_WHITE}\\}}/")
    return calls.in_a_row(call, f"/{_WHITE};{_WHITE}/")


def _pythonic(calls: _Calls) -> str:
    call = _python_call(calls, PYTHON)
    return f'/\\[{_WHITE}/ {calls.in_a_row(call, _COMMA)} "]"'


def _tool_code(calls: _Calls) -> str:
    """A block's strings have no backtick: its end begins with one."""
    call = _python_call(calls, PYTHON.without("`"))
    line = calls.rules.rule(f'{call} | "print(" {call} ")"')
    return f'/[ \\t]{{0,4}}\\n/ {calls.in_a_row(line, _LINE)} "\\n```"'


def _python_call(calls: _Calls, spelling: Spelling) -> str:
    found: list[str] = []
    for name, schema in calls.tools:
        if not _DOTTED.fullmatch(name) or any(map(keyword.iskeyword, name.split("."))):
            _refuse(f"the name {name!r} cannot be called in Python")
        arguments = Values(spelling, schema, calls.rules).arguments()
        found.append(f'{json.dumps(f"{name}(")} {arguments} ")"')
    return calls.any_of(found)


def _gemma(calls: _Calls) -> str:
    found: list[str] = []
    for name, schema in calls.tools:
        arguments = Values(GEMMA, schema, calls.rules).arguments()
        found.append(f'{json.dumps(f"call:{name}{{")} {arguments} "}}"')
    return f"{_SPACE} {calls.any_of(found)} {calls.rules.mark('<end_function_call>')}"


def _qwen3_coder(calls: _Calls) -> str:
    found = [
        f'{json.dumps(f"<function={name}>")} "\\n" {_xml_parameters(calls, schema)} "</function>"'
        for name, schema in calls.tools
    ]
    return f"{_SPACE} {calls.any_of(found)} {_SPACE} {calls.rules.mark('</tool_call>')}"


def _xml_parameters(calls: _Calls, root: dict[str, Any]) -> str:
    """The parameters of one tool, in the order of its schema."""
    schema, rules = Values.plain_object(root), calls.rules
    if schema is None:
        text = rules.text(r"\n", _XML_ENDS)
        return f'(/<parameter=[A-Za-z_][A-Za-z0-9_]{{0,63}}>\n/ {text} "\n")*'
    properties, required = schema
    parts: list[str] = []
    for name, inner in properties.items():
        if not _XML_NAME.fullmatch(name) or name != name.strip():
            _refuse(f"the property {name[:64]!r} cannot be written in this syntax")
        rule = rules.rule(f'{json.dumps(f"<parameter={name}>")} "\\n" {_xml_value(calls, inner, root)} "\\n"')
        parts.append(rule if name in required else f"{rule}?")
    return " ".join(parts) or '""'


def _xml_value(calls: _Calls, schema: object, root: dict[str, Any]) -> str:
    """A bare value and its closing tag."""
    kinds = kinds_of(schema, root)
    if "string" not in kinds:
        if len(kinds) == 1 and set(cast(dict[str, Any], schema)) <= SILENT:
            return f"{NUMBERS.get(min(kinds)) or calls.json({'type': min(kinds)})} {json.dumps(_XML_END)}"
        _no_other_roots(schema)
        named = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{calls.json(dict(cast(dict[str, Any], schema)) | named)} {json.dumps(_XML_END)}"
    found = resolved(schema, root)
    if len(kinds) > 1:
        Values.check_loose(found, root)
        return calls.rules.text(r"\n", _XML_ENDS)
    if (literals := Values.literals_of(found)) is not None:
        texts = [each for each in literals if isinstance(each, str)]
        if any(end in text for text in texts for end in _XML_ENDS):
            _refuse("a string of an 'enum' has a tag of this syntax")
        return f"({' | '.join(json.dumps(text + _XML_END, ensure_ascii=False) for text in texts)})"
    return calls.rules.text(r"\n", _XML_ENDS, *Values.lengths_of(found))


def _no_other_roots(schema: object) -> None:
    """References of a property, which becomes a schema of its own, are to definitions."""
    for found in re.finditer(r'"\$ref": "(#[^"]*)"', json.dumps(schema)):
        if not found[1].startswith(("#/$defs/", "#/definitions/")):
            _refuse(f"the reference {found[1][:64]!r} cannot be enforced in this syntax")


_FORMATS: Mapping[str, Callable[[_Calls], str]] = {
    "hermes": _hermes,
    "phi": _phi,
    "functools": _functools,
    "mistral": _mistral,
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "tool_code": _tool_code,
    "gemma": _gemma,
    "qwen3_coder": _qwen3_coder,
}


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, param="calls")
