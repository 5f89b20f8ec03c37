"""Arguments in Qwen3-Coder's XML, as JSON, while they are written."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.text.argument_readers import JSON_WORDS, LiteralArguments
from penstock.text.json_calls import json_of, value_of
from penstock.text.tool_types import STRING, fits, kinds_of, resolved
from penstock.text.tools import SLICE_CHARS_MAX

_NESTED = frozenset({"object", "array"})
_NUMERIC = frozenset({"integer", "number"})
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>|</tool_call>")
_HALF_PARAMETER = re.compile(r"<parameter=[^<>\n]{0,256}")
_VALUE_END = re.compile(r"\n?(?:</parameter>|(?=<parameter=|(?:</function>\s{0,256})?</tool_call>))")
_HALF_VALUE_END = re.compile(
    r"\n?(?:<(?:/(?:function>\s{0,256}(?:<(?:/[a-z_]{0,9})?)?|[a-z_]{0,9})?|[a-z]{0,9})?)?\Z"
)
_LAST_VALUE_END = re.compile(r"\n?(?:</parameter>\s{0,256}|</function>\s{0,256})?\Z")
_HELD_CHARS_MAX = 600
"""At least the longest match of `_HALF_VALUE_END`; and of a value that may still be a word or a number."""
_DIGITS = re.compile(r"[0-9.e+-]*")


class XmlArguments:
    """`<parameter=KEY>VALUE</parameter>`, up to `</tool_call>`: values are bare, and have the types of the
    tool's schema. Texts, objects and arrays are told while they are written, other values at their end.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """`schema`: of the tool's parameters."""
        self._root = schema
        self._properties: Mapping[str, Any] = resolved(schema, schema).get("properties") or {}
        self._buffer = ""
        self._written = ["{"]
        self._num_parameters = 0
        self._value: _XmlValue | None = None
        self._is_over = False

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        taken = 0
        while not self._is_over and taken < len(text):
            self._buffer += text[taken : taken + SLICE_CHARS_MAX]
            taken += SLICE_CHARS_MAX
            while not self._is_over and (
                self._read_value(self._value) if self._value is not None else self._read_between()
            ):
                pass  # Each turn that goes on has taken a tag off the buffer.
        written, self._written = "".join(self._written), []
        return written, self._buffer + text[taken:] if self._is_over else None

    def close(self) -> str:
        """What was cut off ends there: the value's text is what there is of it."""
        if self._is_over:
            return ""
        if self._value is not None:
            end = _LAST_VALUE_END.search(self._buffer)
            assert end is not None, "it matches nothing at the end"
            self._written += [self._value.push(self._buffer[: end.start()]), self._value.end()]
        self._written.append("}")
        return "".join(self._written)

    def _read_between(self) -> bool:
        match = _PARAMETER.search(self._buffer)
        if match is None:
            # Only the last `<` may begin a tag: none has another one within it.
            last = self._buffer[self._buffer.rfind("<") :]
            is_half = "</tool_call>".startswith(last) or _HALF_PARAMETER.fullmatch(last)
            self._buffer = last if is_half or "<parameter=".startswith(last) else ""
            return False
        if match[1] is None:
            self._written.append("}")
            self._buffer, self._is_over = self._buffer[match.start() :], True
            return True
        name = match[1].strip()
        self._written.append(f"{', ' if self._num_parameters else ''}{json_of(name)}: ")
        self._num_parameters += 1
        self._value = _XmlValue(kinds_of(self._properties.get(name), self._root))
        self._buffer = self._buffer[match.end() :]
        return True

    def _read_value(self, value: "_XmlValue") -> bool:
        match = _VALUE_END.search(self._buffer)
        if match is not None:
            self._written += [value.push(self._buffer[: match.start()]), value.end()]
            self._buffer, self._value = self._buffer[match.end() :], None
            return True
        # The end of what is here may be the beginning of a tag.
        begin = max(0, len(self._buffer) - _HELD_CHARS_MAX)
        half = _HALF_VALUE_END.search(self._buffer, begin)
        cut = len(self._buffer) if half is None else half.start()
        self._written.append(value.push(self._buffer[:cut]))
        self._buffer = self._buffer[cut:]
        return False


class _XmlValue:
    """One bare value."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        self._begun = ""
        """Its beginning."""
        self._parts: list[str] = []
        """All of it, while it is not known what it is."""
        self._num_chars = 0
        self._is_first = True
        """The line break behind the tag is still to come, or not there."""
        self._is_string = False
        """It is certain to be a text."""
        self._may_be_nested = kinds <= _NESTED
        """It has nothing but blanks so far, and may be told as an object or an array."""
        self._nested: LiteralArguments | None = None

    def push(self, text: str) -> str:
        """More of it; more of the JSON."""
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        if not text:
            return ""
        if self._is_string:
            return json_of(text)[1:-1]
        if self._nested is not None:
            return self._nested.push(text)[0]
        self._parts.append(text)
        self._num_chars += len(text)
        self._begun += text[: _HELD_CHARS_MAX - len(self._begun)]
        if self._may_be_nested and (begun := text.lstrip()):
            self._may_be_nested = False
            if begun[0] in "[{":
                self._nested = LiteralArguments(begun[0])
                return self._nested.push(begun[1:])[0]
        if self._may_be_other():
            return ""
        self._is_string = True
        text, self._parts = "".join(self._parts), []
        return '"' + json_of(text)[1:-1]

    def end(self) -> str:
        """There is no more of it."""
        if self._nested is not None:
            return self._nested.complete()
        if self._is_string:
            return '"'
        return _value_json("".join(self._parts), self._kinds)

    def _may_be_other(self) -> bool:
        """Whether it may be anything but a string."""
        if "string" not in self._kinds:
            return True
        if self._kinds == STRING:
            return False
        begun = self._begun.strip().lower()
        if not begun or begun[0] in "[{":
            return not begun or bool(self._kinds & _NESTED)
        return self._num_chars < _HELD_CHARS_MAX and (
            any(word.startswith(begun) for word in JSON_WORDS)
            or (bool(self._kinds & _NUMERIC) and _DIGITS.fullmatch(begun) is not None)
        )


def _value_json(value: str, kinds: frozenset[str]) -> str:
    """A bare value as one of these types, in JSON; what does not fit is a string."""
    found: object = value
    if kinds != STRING:
        try:
            found = value_of(value.strip())
        except ValueError:
            found = {"true": True, "false": False, "none": None}.get(value.strip().lower(), value)
    return json_of(value if "string" in kinds and not fits(found, kinds - STRING) else found)
