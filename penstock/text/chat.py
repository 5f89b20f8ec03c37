"""Chat templates: from messages and tools to the prompt text that the model was trained on.

Templates are Jinja2 programs in the checkpoint, so they run in Jinja's sandbox with the few extras that
Hugging Face's `apply_chat_template` gives them, and give the same text to the character. Token ids
are not made here, and requests are assumed to be of OpenAI's shape already.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2

from penstock.errors import CheckpointError, InvalidRequest
from penstock.text.files import read_optional_object, read_text
from penstock.text.sandbox import template_environment
from penstock.text.tokenizer import token_string

PROMPT_CHARS_MAX = 32 * 1024 * 1024
"""Four times the default bound on a request's body: more is a template that runs away."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]


class ChatTemplate:
    """A checkpoint's template or templates. One object serves every request. Made by `load`."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        wall_ns: Callable[[], int],
        prompt_chars_max: int = PROMPT_CHARS_MAX,
    ) -> None:
        """Compile the named templates: "default", and perhaps "tool_use" for requests with tools.

        Raises:
            jinja2.TemplateSyntaxError: a template is no Jinja.
        """
        environment = template_environment(wall_ns, chars_max=prompt_chars_max)
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)
        self._chars_max = prompt_chars_max

    @classmethod
    def load(
        cls, model_dir: Path, *, wall_ns: Callable[[], int], prompt_chars_max: int = PROMPT_CHARS_MAX
    ) -> "ChatTemplate":
        """Read the template from wherever this checkpoint has it; a base model has none.

        Raises:
            CheckpointError: a file is broken, or the template does not compile.
        """
        config = read_optional_object(model_dir / "tokenizer_config.json")
        named = read_optional_object(model_dir / "special_tokens_map.json") | config
        tokens = {key: token_string(named.get(key)) for key in SPECIAL_TOKENS}
        try:
            return cls(
                _sources(model_dir, config),
                special_tokens={key: token for key, token in tokens.items() if token is not None},
                wall_ns=wall_ns,
                prompt_chars_max=prompt_chars_max,
            )
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{model_dir}: the chat template, line {error.lineno}: {error}") from error

    @property
    def exists(self) -> bool:
        """Whether this checkpoint is a chat model at all."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages of OpenAI's shape. `extra` reaches the template as variables.

        Raises:
            InvalidRequest: the template refuses the messages, fails on them, or writes too much.
        """
        template = self._template(bool(tools))
        variables = {
            **self._special_tokens,
            "messages": [_plain(message) for message in messages],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(extra or {}),
        }
        try:
            return self._bounded(template, variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template: {error.message}", param="messages") from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # What a template's own expressions raise on messages that its author did not think of.
            raise InvalidRequest(
                f"the chat template fails on these messages: {error}", param="messages"
            ) from error

    def _template(self, with_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        room = self._chars_max
        for piece in template.generate(variables):
            room -= len(piece)
            if room < 0:
                raise InvalidRequest(
                    f"the prompt is over the bound of {self._chars_max} characters", param="messages"
                )
            pieces.append(piece)
        return "".join(pieces)


def _sources(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. The newer files win over tokenizer_config.json, as in Hugging Face's loaders."""
    found: dict[str, str] = {}
    inline: Any = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif inline is not None:
        try:
            found = {str(entry["name"]): str(entry["template"]) for entry in inline}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{model_dir / 'tokenizer_config.json'}: chat_template is neither a string nor a list of "
                "objects with name and template"
            ) from error
    legacy = read_optional_object(model_dir / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if (path := model_dir / "chat_template.jinja").exists():
        found["default"] = read_text(path)
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    return found


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it, which is not quite what OpenAI's API sends.

    Text parts become one string and the arguments of a tool call an object; templates write
    them out again in the model's own way.
    """
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part) for part in content)  # pyright: ignore[reportUnknownVariableType]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any) -> str:  # noqa: ANN401
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return text
    raise InvalidRequest(
        "this model reads text only: every content part must be of type text", param="messages"
    )


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model wrote it and the client sends it back: what is no JSON is shown to the model as it was.
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": function}
