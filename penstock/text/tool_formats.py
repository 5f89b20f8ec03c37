"""The syntaxes in which models call tools, and which of them a chat template teaches."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from re import Pattern
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
    make_parser: Callable[[Schemas, Pattern[str] | None], ToolParser]
    taught_by: tuple[str, ...]
    """What a template of this syntax has in its source, one of them."""
    mark: str
    """What begins a call, or several, as a regular expression: a mark in front of it, or in the group "call"
    its own beginning. NAMES stands for those of the tools."""
    ends_answer: bool = False
    """No text follows the calls."""
    family: tuple[str, ...] = ()
    """What templates of models that know this syntax have in their source, where none teaches one."""

    def parser(self, schemas: Schemas, held: Pattern[str] | None = None) -> ToolParser:
        """Of one answer; with a pattern, that of `call_mark`, calls that do not begin so are text."""
        return self.make_parser(schemas, held)

    def call_mark(self, names: Iterable[str]) -> str:
        """The mark of calls of these tools."""
        return self.mark.replace("NAMES", "|".join(re.escape(name) for name in sorted(set(names))))


_PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
"""Llama 3's mark, and Llama 4's, which writes the same JSON."""
_SPACE = r"[ \t\r\n]{0,8}"
_LLAMA_CALL = _SPACE.join([r"\{(?:", '"type"', ":", '"function"', ",)?", '"name"', ":", '"(?:NAMES)"'])
TOOL_FORMATS = (
    ToolFormat(
        "qwen3_coder", lambda schemas, _: Qwen3CoderToolParser(schemas), ("<function=",), "<tool_call>"
    ),
    ToolFormat(
        "mistral",
        lambda schemas, _: JsonTailParser(["[TOOL_CALLS]"], names=schemas.keys()),
        ("[TOOL_CALLS]",),
        r"\[TOOL_CALLS\]",
        ends_answer=True,
    ),
    ToolFormat(
        "gemma", lambda _schemas, _: GemmaToolParser(), ("<start_function_call>",), "<start_function_call>"
    ),
    ToolFormat("phi", lambda _schemas, _: PhiToolParser(), ("<|tool_call|>", "<|tool|>"), r"<\|tool_call\|>"),
    ToolFormat(
        "functools",
        lambda schemas, _: JsonTailParser(["functools["], names=schemas.keys()),
        ("functools[",),
        r"functools\[",
        ends_answer=True,
    ),
    ToolFormat(
        "pythonic",
        lambda _schemas, held: PythonicToolParser(held=held),
        ("[func_name1(",),
        rf"\A{_SPACE}(?:<\|python_start\|>{_SPACE})?(?P<call>\[{_SPACE}(?:NAMES)\()",
        ends_answer=True,
    ),
    ToolFormat(
        "llama3_json",
        lambda schemas, held: JsonTailParser(_PYTHON_MARKS, at_start=True, names=schemas.keys(), held=held),
        ("<|python_tag|>", '"parameters": dictionary', "Environment: ipython"),
        rf"(?:\A|<\|python_(?:tag|start)\|>){_SPACE}(?P<call>{_LLAMA_CALL})",
        ends_answer=True,
    ),
    ToolFormat(
        "tool_code",
        lambda _schemas, _: ToolCodeParser(),
        ("```tool_code",),
        "```tool_code",
        family=("<start_of_turn>",),
    ),
    ToolFormat("hermes", lambda _schemas, _: HermesToolParser(), ("<tool_call>",), "<tool_call>"),
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
