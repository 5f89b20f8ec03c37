"""Values in a syntax that is no JSON, Python's or Gemma's, as rules of a grammar, from a JSON schema.

Only keywords that say what a value is made of are known; one that is not known is refused, for nothing here
is approximated. A reference is a rule of its own, so a schema may refer to itself.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any, NoReturn, cast

from penstock.engine.grammar.bounds import ANNOTATIONS
from penstock.errors import InvalidRequest
from penstock.text.tools import OBJECT, kind_of, kinds_of, resolved

Marks = Callable[[str], str]
"""The grammar of a mark: its text, or its token where it is a special one."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_GEMMA_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_GEMMA_ENDS = ("<escape>", "<end_function_call>")
_ALL_KINDS = ("string", "number", "boolean", "null", "array", "object")
_NUMERIC = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KNOWN = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
SILENT = ANNOTATIONS | {"type", "$schema", "$id", "$defs", "definitions"}
_DIGITS = "-?(0|[1-9][0-9]{0,17})"
NUMBERS = {"integer": f"/{_DIGITS}/", "number": rf"/{_DIGITS}(\.[0-9]{{1,17}})?/"}
"""Such as every parser reads exactly as they stand."""


@dataclass(frozen=True)
class Spelling:
    """How one syntax writes what JSON has."""

    name: str
    words: tuple[str, str, str]
    """True, false, null."""
    between: str
    key: Callable[[str], str | None]
    """How a property's name is written, with what stands behind it; None: it cannot be."""
    any_key: str
    is_python: bool = False
    excluded: str = ""
    """Characters that no string has."""

    def without(self, char: str) -> "Spelling":
        """The same, and no string has this character."""
        return replace(self, excluded=char)


def _python_key(name: str) -> str:
    return f"{_python_text(name)}: "


def _python_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped) + "'"


def _gemma_key(name: str) -> str | None:
    return f"{name}:" if _GEMMA_KEY.fullmatch(name) else None


PYTHON = Spelling(
    "Python", ("True", "False", "None"), ", ", _python_key, r"/'[A-Za-z0-9_ .-]{1,64}': /", is_python=True
)
GEMMA = Spelling("Gemma", ("true", "false", "null"), ",", _gemma_key, "/[A-Za-z_][A-Za-z0-9_]{0,63}:/")


def repeated(item: str, minimum: int, maximum: int | None) -> str:
    """So many of it."""
    if maximum == 0:
        return ""
    return f"{item}{{{minimum},{'' if maximum is None else maximum}}}"


class Rules:
    """A grammar that is being written."""

    def __init__(self, marks: Marks) -> None:
        self.mark = marks
        self._rules: list[str] = []
        self._num_names = 0
        self._terminals: dict[str, str] = {}

    def rule(self, body: str, name: str = "") -> str:
        """A rule's name."""
        name = name or self.new_name()
        self._rules.append(f"{name}: {body}")
        return name

    def new_name(self) -> str:
        """Of a rule that is yet to be written."""
        self._num_names += 1
        return f"rule_{self._num_names}"

    def terminal(self, body: str) -> str:
        """The name of a regular expression, or of several that hold together."""
        return self._terminals.setdefault(body, f"T_{len(self._terminals)}")

    def text(self, before: str, ends: Sequence[str], minimum: int = 0, maximum: int | None = None) -> str:
        """Text without any of `ends`, then `before` and the first of them."""
        first, *others = map(_escaped, ends)
        some, counts = "(?s:.*)", f"{{{minimum},{'' if maximum is None else maximum}}}"
        return self.terminal(
            f"/(?s:.{counts}){before}{first}/ & ~/{some}{first}(?s:.+)/ & ~/{some}({'|'.join(others)}){some}/"
        )

    def lines(self) -> list[str]:
        """All of it."""
        return [*self._rules, *(f"{name}: {body}" for body, name in self._terminals.items())]


class Values:
    """The rules of one tool's arguments."""

    def __init__(self, spelling: Spelling, root: dict[str, Any], rules: Rules) -> None:
        self._spelling, self._root, self._rules = spelling, root, rules
        self._refs: dict[str, str] = {}
        self._any = ""
        """The rule of any value, once it is there."""

    def arguments(self) -> str:
        """The text between the brackets of the call."""
        if kinds_of(self._root, self._root) != OBJECT:
            _refuse("arguments that are no object")
        if self._spelling.is_python:
            return self._members(
                resolved(self._root, self._root), _argument, "/[A-Za-z_][A-Za-z0-9_]{0,63}=/"
            )
        return self._members(resolved(self._root, self._root), self._spelling.key, self._spelling.any_key)

    @staticmethod
    def plain_object(schema: dict[str, Any]) -> tuple[dict[str, Any], Sequence[str]] | None:
        """The properties of an object, and those that it must have; None: it may have any.

        Raises:
            InvalidRequest: more is said of it, or it is none.
        """
        node = resolved(schema, schema)
        if kinds_of(node, schema) != OBJECT:
            _refuse("arguments that are no object")
        _check(node, "object")
        if "properties" not in node and node.get("additionalProperties", True) is True:
            if node.get("required"):
                _refuse("'required' without such a property")
            return None
        return _properties(node)

    @staticmethod
    def check_loose(schema: dict[str, Any], root: dict[str, Any]) -> None:
        """Refuse a value of several types of which more than the types is said."""
        branches: list[Any] = schema.get("anyOf", [schema])
        _check({name: value for name, value in schema.items() if name != "anyOf"}, "null")
        for each in branches:
            _check(resolved(each, root), "null")

    @staticmethod
    def literals_of(schema: dict[str, Any]) -> list[Any] | None:
        """The values of `enum` or `const`; None: there is neither."""
        if "enum" not in schema and "const" not in schema:
            return None
        _check({name: each for name, each in schema.items() if name not in ("enum", "const")}, "null")
        found = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            found = [each for each in found if each == schema["const"]]
        if not found:
            _refuse("an 'enum' without a value")
        return found

    @staticmethod
    def lengths_of(schema: dict[str, Any]) -> tuple[int, int | None]:
        """`minLength` and `maxLength`."""
        _check(schema, "string")
        return int(schema.get("minLength", 0)), schema.get("maxLength")

    def _value(self, schema: object) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            _refuse("a schema that allows nothing")
        node = cast(dict[str, Any], schema)
        if isinstance(pointer := node.get("$ref"), str):
            _check({name: each for name, each in node.items() if name != "$ref"}, "null")
            return self._reference(pointer)
        node = resolved(node, self._root)
        if (literals := self.literals_of(node)) is not None:
            kinds = node.get("type")
            allowed = {kinds} if isinstance(kinds, str) else set(cast(list[str], kinds or ()))
            found = [each for each in literals if not allowed or _fits(each, allowed)]
            return "(" + " | ".join(map(self._literal, found)) + ")"
        if isinstance(branches := node.get("anyOf"), list):
            _check({name: each for name, each in node.items() if name != "anyOf"}, "null")
            return "(" + " | ".join(map(self._value, cast(list[Any], branches))) + ")"
        said = node.get("type")
        if not said and node.keys() <= SILENT:
            return self._anything()
        kinds = cast(list[str], said) if isinstance(said, list) else [said] if said else _implied(node)
        known = frozenset[str]().union(*(_KNOWN.get(kind, ()) for kind in kinds))
        for name in node.keys() - known - SILENT:
            _refuse_keyword(name)
        return self._of_kinds(kinds, node)

    def _anything(self) -> str:
        """Where nothing is said of a value, it is any one of JSON. Its rule refers to itself."""
        if not self._any:
            self._any = self._rules.new_name()
            self._rules.rule(self._of_kinds(_ALL_KINDS, {}), self._any)
        return self._any

    def _of_kinds(self, kinds: Sequence[str], node: dict[str, Any]) -> str:
        return "(" + " | ".join(self._typed(kind, node) for kind in kinds) + ")"

    def _typed(self, kind: str, node: dict[str, Any]) -> str:
        if kind == "string":
            return self._string(int(node.get("minLength", 0)), node.get("maxLength"))
        if kind in ("integer", "number"):
            bounds = {name: each for name, each in node.items() if name in _NUMERIC}
            return "%json " + json.dumps({"type": kind} | bounds) if bounds else NUMBERS[kind]
        if kind == "boolean":
            return f'("{self._spelling.words[0]}" | "{self._spelling.words[1]}")'
        if kind == "null":
            return f'"{self._spelling.words[2]}"'
        if kind == "array":
            return self._array(node)
        if kind == "object":
            spelling = self._spelling
            return f'"{{" {self._members(node, spelling.key, spelling.any_key)} "}}"'
        return _refuse(f"the type {kind!r}")

    def _array(self, node: dict[str, Any]) -> str:
        item, minimum, maximum = (
            self._value(node.get("items", True)),
            node.get("minItems", 0),
            node.get("maxItems"),
        )
        if maximum is not None and maximum < max(minimum, 1):
            return '"[]"' if minimum == 0 else _refuse("'maxItems' below 'minItems'")
        rule, between = self._rules.rule(item), json.dumps(self._spelling.between)
        more = repeated(f"({between} {rule})", max(minimum - 1, 0), None if maximum is None else maximum - 1)
        return f'"[" {rule} {more} "]"' if minimum else f'"[" ({rule} {more})? "]"'

    def _members(self, node: dict[str, Any], key: Callable[[str], str | None], any_key: str) -> str:
        """The members of an object, in the order of its schema: a member may be left out if it is not
        required.
        """
        between = json.dumps(self._spelling.between)
        if "properties" not in node and (more := node.get("additionalProperties", True)) is not False:
            if node.get("required"):
                _refuse("'required' without such a property")
            member = self._rules.rule(f"{any_key} {self._value(more)}")
            return f"({member} ({between} {member})*)?"
        properties, required = _properties(node)
        behind, first = '""', '""'
        """The members that may follow another one, and those that may come first."""
        for name, schema in reversed(properties.items()):
            if (spelled := key(name)) is None:
                _refuse(f"a property that is called {name[:64]!r}")
            member = self._rules.rule(f"{json.dumps(spelled, ensure_ascii=False)} {self._value(schema)}")
            begun = f"{member} {behind}"
            first = self._rules.rule(begun if name in required else f"{begun} | {first}")
            more = f"{between} {member}"
            behind = self._rules.rule(f"{more if name in required else f'({more})?'} {behind}")
        return first

    def _reference(self, pointer: str) -> str:
        if pointer not in self._refs:
            self._refs[pointer] = name = self._rules.new_name()
            found = resolved({"$ref": pointer}, self._root)
            if not found:
                _refuse(f"the reference {pointer[:64]!r}")
            self._rules.rule(self._value(found), name)
        return self._refs[pointer]

    def _literal(self, value: object) -> str:
        spelling, between = self._spelling, json.dumps(self._spelling.between)
        if value is None or isinstance(value, bool):
            return json.dumps(spelling.words[2 if value is None else 0 if value else 1])
        if isinstance(value, int | float):
            return json.dumps(json.dumps(value))
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            inner = f" {between} ".join(map(self._literal, cast(list[object], value)))
            return f'"[" {inner} "]"' if value else '"[]"'
        members: list[str] = []
        for name, each in cast(dict[str, object], value).items():
            if (spelled := spelling.key(name)) is None:
                _refuse(f"a property that is called {name[:64]!r}")
            members.append(f"{json.dumps(spelled, ensure_ascii=False)} {self._literal(each)}")
        return f'"{{" {f" {between} ".join(members)} "}}"' if members else '"{}"'

    def _text(self, text: str) -> str:
        spelling = self._spelling
        if any(char in text for char in spelling.excluded) or any(end in text for end in _GEMMA_ENDS):
            _refuse("a string with a mark of this syntax")
        if spelling.is_python:
            return json.dumps(_python_text(text), ensure_ascii=False)
        mark = self._rules.mark("<escape>")
        return f"{mark} {json.dumps(text, ensure_ascii=False)} {mark}" if text else f"{mark} {mark}"

    def _string(self, minimum: int, maximum: int | None) -> str:
        upper = "" if maximum is None else maximum
        if self._spelling.is_python:
            escape = r"\\['\"\\nrt]"
            plain = r"\\\x00-\x1f\x7f" + self._spelling.excluded
            single, double = (
                rf"/{quote}([^{quote}{plain}]|{escape}){{{minimum},{upper}}}{quote}/" for quote in "'\""
            )
            return f"({single} | {double})"
        mark = self._rules.mark("<escape>")
        held = self._rules.text("", _GEMMA_ENDS, minimum, maximum)
        if "<[" not in mark:
            return f'"<escape>" {held}'
        ends = "|".join(map(_escaped, _GEMMA_ENDS))
        body = f"/(?s:.{{{max(minimum, 1)},{upper}}})/ & ~/(?s:.*)({ends})(?s:.*)/"
        return f"{mark} ({held} | {self._rules.terminal(body)}{'' if minimum else '?'} {mark})"


def _argument(name: str) -> str | None:
    return f"{name}=" if _IDENTIFIER.fullmatch(name) and not iskeyword(name) else None


def _implied(node: dict[str, Any]) -> Sequence[str]:
    """Of a value without a type. A keyword holds for values of its own type; others are free."""
    if "properties" in node:
        return ("object",)
    return ("array",) if "items" in node else _ALL_KINDS


def _properties(node: dict[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
    properties: dict[str, Any] = node.get("properties", {})
    required: Sequence[str] = node.get("required", ())
    if any(name not in properties for name in required):
        _refuse("'required' without such a property")
    return properties, required


def _fits(value: object, kinds: set[str]) -> bool:
    kind = kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _check(node: dict[str, Any], kind: str) -> None:
    for name in node.keys() - _KNOWN[kind] - SILENT:
        _refuse_keyword(name)


def _escaped(text: str) -> str:
    return re.sub(r"([/.?*+()\[\]{}|\\^$])", r"\\\1", text)


def _refuse_keyword(name: str) -> NoReturn:
    _refuse(f"'{name[:64]}'")


def _refuse(what: str) -> NoReturn:
    raise InvalidRequest(f"{what} cannot be enforced in this model's syntax of calls", param="calls")
