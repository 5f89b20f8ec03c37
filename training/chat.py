"""The chat format of the demo models: special tokens, the Jinja template, and the same format in Python.

`CHAT_TEMPLATE` is what ships in `tokenizer_config.json`. `render` writes the same text for training data,
in pieces that say which of them the model has to learn. A test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

TOOLS_TEXT = (
    "# Tools\nIf one of these functions helps, answer with a tool call: "
    "a JSON object with its name and arguments.\n<tools>"
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}{{- part.text if part.text is defined else '' -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro schema(tool) -%}
  {{- '\\n' + ((tool.function if tool.function is defined else tool) | tojson) -}}
{%- endmacro -%}
{%- set opening = '' -%}
{%- set rest = messages -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
  {%- set opening = text(messages[0].content) -%}
  {%- set rest = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if opening -%}{{- opening + '\\n\\n' -}}{%- endif -%}
  {{- 'TOOLS_TEXT' -}}
  {%- for tool in tools -%}{{- schema(tool) -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif opening -%}
  {{- '<|im_start|>system\\n' + opening + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}
    {%- set body = text(message.content) -%}
    {{- '<|im_start|>' + ('system' if message.role == 'developer' else message.role) + '\\n' + body -}}
    {%- for call in (message.tool_calls or []) -%}
      {%- set function = call.function if call.function is defined else call -%}
      {%- if body or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
      {{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""".replace("TOOLS_TEXT", TOOLS_TEXT.replace("\n", "\\n"))


@dataclass(frozen=True)
class Message:
    """One turn. `role` is user, assistant or tool; an assistant's tool call is already text."""

    role: str
    content: str


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text; the model learns to write it where `learn` is true."""

    text: str
    learn: bool


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The text of an assistant turn that calls one tool."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def render(
    messages: Sequence[Message], *, system: str = "", tools: Sequence[dict[str, Any]] = ()
) -> list[Piece]:
    """The conversation as text pieces; joined they equal what `CHAT_TEMPLATE` renders."""
    pieces: list[Piece] = []
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = (system + "\n\n" if system else "") + TOOLS_TEXT + listed + "\n</tools>"
    if system:
        pieces.append(Piece(f"{TURN_START}system\n{system}{TURN_END}\n", learn=False))
    for message in messages:
        if message.role == "assistant":
            pieces.append(Piece(f"{TURN_START}assistant\n", learn=False))
            pieces.append(Piece(message.content + TURN_END, learn=True))
            pieces.append(Piece("\n", learn=False))
        elif message.role == "tool":
            body = f"\n<tool_response>\n{message.content}\n</tool_response>"
            pieces.append(Piece(f"{TURN_START}user{body}{TURN_END}\n", learn=False))
        else:
            pieces.append(Piece(f"{TURN_START}{message.role}\n{message.content}{TURN_END}\n", learn=False))
    return pieces
