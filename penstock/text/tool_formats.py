"""The syntaxes in which models call tools, and which of them a chat template teaches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.tool_blocks import (
    GemmaToolParser,
    HermesToolParser,
    PhiToolParser,
    Qwen3CoderToolParser,
    ToolCodeParser,
)
from penstock.text.tool_tails import JsonTailParser, PythonicToolParser
from penstock.text.tools import ToolParser

Schemas = Mapping[str, Mapping[str, Any]]
"""Of each offered function's parameters, by its name."""


@dataclass(slots=True, frozen=True)
class ToolFormat:
    """One syntax."""

    name: str
    parser: Callable[[Schemas], ToolParser]
    """Makes the parser of one answer."""
    taught_by: tuple[str, ...]
    """What a template of this syntax has in its source, one of them."""
    call_mark: str = ""
    """What stands before the JSON of a call, or of an array of them if `calls_are_array`, and nowhere else.
    Empty: calls have no such mark, or are no JSON."""
    calls_are_array: bool = False
    family: tuple[str, ...] = ()
    """What templates of models that know this syntax have in their source, where none teaches one."""


_PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
"""Llama 3's mark, and Llama 4's, which writes the same JSON."""
TOOL_FORMATS = (
    ToolFormat("qwen3_coder", Qwen3CoderToolParser, ("<function=",)),
    ToolFormat(
        "mistral", lambda schemas: JsonTailParser(["[TOOL_CALLS]"], names=schemas.keys()), ("[TOOL_CALLS]",)
    ),
    ToolFormat("gemma", lambda _schemas: GemmaToolParser(), ("<start_function_call>",)),
    ToolFormat("phi", lambda _schemas: PhiToolParser(), ("<|tool_call|>", "<|tool|>"), "<|tool_call|>", True),
    ToolFormat(
        "functools", lambda schemas: JsonTailParser(["functools["], names=schemas.keys()), ("functools[",)
    ),
    ToolFormat("pythonic", lambda _schemas: PythonicToolParser(), ("[func_name1(",)),
    ToolFormat(
        "llama3_json",
        lambda schemas: JsonTailParser(_PYTHON_MARKS, at_start=True, names=schemas.keys()),
        ("<|python_tag|>", '"parameters": dictionary', "Environment: ipython"),
    ),
    ToolFormat(
        "tool_code", lambda _schemas: ToolCodeParser(), ("```tool_code",), family=("<start_of_turn>",)
    ),
    ToolFormat("hermes", lambda _schemas: HermesToolParser(), ("<tool_call>",), "<tool_call>"),
)
"""The more telling ones first: a template of Qwen3-Coder has the marks of Hermes too."""
HERMES = TOOL_FORMATS[-1]
TOOL_FORMAT_NAMES = tuple(each.name for each in TOOL_FORMATS)


def tool_format(templates: Iterable[str], name: str = "auto") -> ToolFormat:
    """The syntax of this name; "auto": the one that a checkpoint's templates teach, else that of their
    family, else that of Hermes.
    """
    if name != "auto":
        return next(each for each in TOOL_FORMATS if each.name == name)
    source = "\n".join(templates)
    taught = (each for each in TOOL_FORMATS if any(mark in source for mark in each.taught_by))
    known = (each for each in TOOL_FORMATS if any(mark in source for mark in each.family))
    return next(taught, next(known, HERMES))
