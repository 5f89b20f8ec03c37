"""Arguments from literals: Python's own grammar of strings and comments, and where a call's damage ends."""

import ast
import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text.argument_readers import LiteralArguments
from penstock.text.tool_formats import tool_format
from penstock.text.tools import ParsedToolCall, WholeEvent, joined


def read(name: str, text: str) -> list[WholeEvent]:
    """The events; the same whether the text comes whole or by characters."""
    whole, each = (tool_format([], name).parser({}) for _ in range(2))
    events = joined([*whole.push(text), *whole.finish()])
    assert joined([*(event for char in text for event in each.push(char)), *each.finish()]) == events
    return events


def arguments(name: str, text: str) -> list[dict[str, Any]]:
    """Those of the calls that a text is."""
    found: list[dict[str, Any]] = []
    for event in read(name, text):
        assert isinstance(event, ParsedToolCall), event
        found.append(json.loads(event.arguments_json))
    return found


PREFIXED = [  # A string, and what it is told as.
    (r"r'^a, b'", "^a, b"),
    (r"r'(\d'", r"(\d"),
    (r"R'\'x)'", r"\'x)"),
    (r"r'''it's [\n]'''", r"it's [\n]"),
    ('rb"""a"b, )"""', 'a"b, )'),
    (r"b'a)b\n'", "a)b\n"),
    (r"b'\u0041\x41'", r"\u0041A"),
    ("f'{z}, {y!r}'", "{z}, {y!r}"),
    ('fR"{z}\\d"', "{z}\\d"),
    ("u'a, b'", "a, b"),
    ("r'a' 'b' f'c'", "abc"),
    ("''", ""),
    ("''''''", ""),
    (r"'\a\b\f\v\101\N{DASH}\N{EM DASH}\/\d'", "\a\b\f\vA\\N{DASH}\u2014\\/\\d"),
]


@pytest.mark.parametrize(("written", "value"), PREFIXED)
def test_strings_are_those_of_python(written: str, value: str) -> None:
    text = f"f(p={written}, q=1, r=[{written}], s={{{written}: {written}}})"
    expected = {"p": value, "q": 1, "r": [value], "s": {value: value}}
    assert arguments("pythonic", f"[{text}, g(b=2)]") == [expected, {"b": 2}]
    assert arguments("tool_code", f"```tool_code\n{text}\n```") == [expected]


QUOTES = st.sampled_from(["'", '"', "'''", '"""'])
STRINGS = st.builds(
    lambda prefix, quotes, parts: f"{prefix}{quotes}{''.join(parts)}{quotes}",
    st.sampled_from(["", "r", "R", "u", "U"]),
    QUOTES,
    st.lists(
        st.sampled_from([*"'\"\\ntu0x{}[](),#= a\u00e9", "\\u00e9", "\\x41", "\\N{BULLET}", "\\'"]),
        max_size=8,
    ),
)


@settings(max_examples=200)
@given(strings=st.lists(STRINGS, min_size=1, max_size=2), size=st.integers(1, 9))
@example(strings=["r'\\\\'"], size=1)
@example(strings=["'',''"], size=1)
@example(strings=["''(a)"], size=1)
def test_any_string_that_python_reads_is_read_alike(strings: list[str], size: int) -> None:
    written = " ".join(strings)
    try:
        value = ast.literal_eval(written)
    except (SyntaxError, ValueError):  # Python refuses escapes that are none; here they are text.
        return
    if not isinstance(
        value, str
    ):  # Quotes in a part may end a string: `'',''` is a tuple, and two arguments here.
        return
    reader = LiteralArguments(is_python=True)
    text = f"a={written}\n, b=1)"  # It may end in a comment.
    pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
    assert pieces[-1][1] == ""
    assert json.loads("".join(piece for piece, _ in pieces)) == {"a": value, "b": 1}


def test_what_is_no_literal_ends_where_python_ends_it() -> None:
    text = r"[f(a=re.compile(r'\', (', b'x)'), b=len('''a, ')'''), c=it's, d=x''y, e=g('a''b)')), g(z=1)]"
    first, second = arguments("pythonic", text)
    assert first == {
        "a": r"re.compile(r'\', (', b'x)')", "b": "len('''a, ')''')", "c": "it's", "d": "x''y",
        "e": "g('a''b)')",
    }  # fmt: skip
    assert second == {"z": 1}


COMMENTED = """[  # the calls, of which there are two ]
  weather(  # where, when)
    city='a # b',  # not "here"
    # days=9,
    days=3  # or 4
    , tags=['x', # one
      1# two, 2
    ], exact=True# sure
    , no=None
  ),  # and
  # it's the other
  clock()  # done ]
]"""


def test_comments_are_no_arguments() -> None:
    expected = [{"city": "a # b", "days": 3, "tags": ["x", 1], "exact": True, "no": None}, {}]
    assert arguments("pythonic", COMMENTED) == expected
    block = "```tool_code\n# first\nweather(days=3, # or 4\n  exact=True)\n# then\nclock()\n```"
    assert arguments("tool_code", block) == [{"days": 3, "exact": True}, {}]
    assert arguments("pythonic", "[f(a=1), # the e") == [{"a": 1}], "an answer may be cut off in one"
    assert arguments("pythonic", "[f(a=1) # the e") == [{"a": 1}]


@pytest.mark.parametrize("value", ["#ff0000", "C#", "a#b", "http://a/#b"])
def test_what_has_a_hash_and_is_no_comment_is_text(value: str) -> None:
    assert arguments("pythonic", f"[f(a={value}, b=1)]") == [{"a": value, "b": 1}]


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        ("a:(3,b:1", {"a": [3, "b:1"]}),
        ("a:x(3,b:1", {"a": "x(3,b:1"}),
        ("a:it's", {"a": "it's"}),
        ("a: 'x,b:1", {"a": "x,b:1"}),
        ("a:say ('hi", {"a": "say ('hi"}),
        ("a:<escape>x", {"a": "x"}),
        ("a:<esc", {"a": "<esc"}),
        ("a:[1,{b:2", {"a": [1, {"b": 2}]}),
        ("a", {"a": None}),
        ("", {}),
    ],
)
@pytest.mark.parametrize("closing", ["", "}"])
def test_a_call_of_gemma_ends_with_its_mark(written: str, reported: dict[str, Any], closing: str) -> None:
    text = f"<start_function_call>call:f{{{written}{closing}<end_function_call>"
    first, *others = arguments("gemma", text + "\n<start_function_call>call:g{b:1}<end_function_call>")
    assert first == reported or closing
    assert others == [{"b": 1}], "the call behind it is not touched"


def test_a_bare_value_of_any_length_is_told() -> None:
    for token in ("9" * 5000, "x" * 5000, "0x" + "f" * 300, "x(" * 3000 + ")" * 3000, "1" + "+1" * 3000):
        assert arguments("pythonic", f"[f(a={token})]") == [{"a": token}]
    for token, value in {"1_000": 1000, "0x1f": 31, ".5": 0.5, "+3": 3, "1e3": 1000.0, "1j": "1j"}.items():
        assert arguments("pythonic", f"[f(a={token})]") == [{"a": value}]


def test_a_value_that_was_cut_off_keeps_what_there_is() -> None:
    for text, is_python, value in (
        ("a='", False, {"a": ""}),
        ("a=''", False, {"a": ""}),
        ("a=r", True, {"a": "r"}),
        ("a=f('x\\", True, {"a": "f('x\\"}),
        ("a=f(''", True, {"a": "f(''"}),
        ("a=1 # x", True, {"a": 1}),
    ):
        for pieces in ([text], list(text)):
            reader = LiteralArguments(is_python=is_python)
            written = "".join(itertools.chain(*(reader.push(piece)[0] for piece in pieces)))
            assert json.loads(written + reader.complete()) == value
