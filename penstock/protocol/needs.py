"""The needs of a request, the required form of the answer's text, and the places that its media may come
from.

Read once per request, from the checked body. Nearly every chat is plain (`openai_validate.is_plain`), and
nothing here is asked of it. The required form of the text is
written as vLLM's `structured_outputs`: one form for every engine that has grammars.

This server fetches no media. A worker does, from its own network, so an address in a message could reach what
only the operator should: data URLs are passed on, and others only where the operator allows their host. A
worker gets the message as it came, so a part may hold no medium but the one that its type names.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import msgspec

from penstock.errors import InvalidRequest, Unsupported
from penstock.protocol.openai import ChatRequest, CompletionRequest, ContentPart, GenerationRequest, Message
from penstock.protocol.parameters import (
    CHAT,
    COMPLETION,
    Checker,
    Need,
    RareChatRequest,
    RareCompletionRequest,
)
from penstock.protocol.worker_parts import Grammar
from penstock.types import Capability

_MEDIA = {
    "image_url": Capability.IMAGES,
    "input_audio": Capability.AUDIO,
    "video_url": Capability.VIDEOS,
    "file": Capability.FILES,
}
MEDIA_TYPES = frozenset(_MEDIA)
"""Types of content parts that are no text."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
SHAPES = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
"""Keywords of a schema that say what a value is; arguments are an object if none does."""
_LITERALS = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name."""
CALLS_MAX = 16
"""Calls of one answer where a grammar shapes them all: without a bound a model may write calls to the end of
its context."""
_ENGINE_FIELDS = ("bad_words", "allowed_token_ids")
_JSON_KINDS = {"json_object": Capability.JSON_OBJECT, "json_schema": Capability.JSON_SCHEMA}

_COMMON_NAMES = ("presence_penalty", "logit_bias", "min_p", "min_tokens")
_common = Checker(GenerationRequest, _COMMON_NAMES, CHAT)
_rare_chat = Checker(
    RareChatRequest, set(RareChatRequest.__struct_fields__) - set(ChatRequest.__struct_fields__), CHAT
)
_rare_completion = Checker(
    RareCompletionRequest,
    set(RareCompletionRequest.__struct_fields__) - set(CompletionRequest.__struct_fields__),
    COMPLETION,
)
from penstock.types import Capability


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The required form of an answer's text, and how it is read."""

    structured: Mapping[str, Any] = {}
    """vLLM's `structured_outputs`; empty: anything goes."""
    fields: Mapping[str, Any] = {}
    """Further parameters that an engine is given by the same names."""
    forced_tool: str | None = None
    """The text is a call's arguments (a function's name), or an array of calls (empty); None: it is text."""
    form: bytes = b""
    """`structured` as JSON."""
    param: str = ""
    """The parameter that asks for `structured`, or for `grammar`."""
    grammar: Grammar | None = None
    """The form for our own engine in the place of `structured`; None: the same."""

    def as_grammar(self) -> Grammar | None:
        """The form for our own engine; None: anything goes."""
        if self.grammar is not None or not self.form:
            return self.grammar
        return Grammar(form=self.form)


NO_CONSTRAINT = Constraint()


def rare_needs(request: GenerationRequest) -> list[Need]:
    """The needs of the request beyond what nearly every engine has. Empty for nearly every request.

    Raises:
        Unsupported: nothing here can do it, on any worker.
        InvalidRequest: `response_format` or `tool_choice` says nothing that can be understood.
    """
    needs: list[Need] = []
    if isinstance(request, RareChatRequest):
        needs = _rare_chat.check(request)
    elif isinstance(request, RareCompletionRequest):
        needs = _rare_completion.check(request)
    if needs and (param := _grammar_param(request)):
        needs.append(Need(Capability.GRAMMARS, param, f"A grammar in '{param}'"))
    if isinstance(request, ChatRequest):
        if request.tools is not None or request.tool_choice is not None:
            needs += _tool_needs(request)
        for i, message in enumerate(request.messages):
            if isinstance(message.content, list):
                needs += _part_needs(message.content, i)
    if request.response_format is not None:
        needs += _format_needs(request.response_format)
    return needs


def _grammar_param(request: GenerationRequest) -> str:
    """The parameter that has a grammar as text; empty: none has."""
    if getattr(request, "guided_grammar", None) is not None:
        return "guided_grammar"
    structured: Mapping[str, Any] = getattr(request, "structured_outputs", None) or {}
    return "structured_outputs" if structured.get("grammar") is not None else ""


def common_needs(request: GenerationRequest) -> list[Need]:
    """Its needs that nearly every engine meets (`COMMON`). Looked at where a worker lacks one of these."""
    needs = _common.check(request)
    if isinstance(request, CompletionRequest):
        if request.logprobs is not None:
            needs.append(Need(Capability.LOGPROBS, "logprobs", "'logprobs'"))
            if request.echo:
                needs.append(Need(Capability.ECHO_LOGPROBS, "echo", "'echo' with 'logprobs'"))
    elif isinstance(request, ChatRequest) and request.logprobs:
        needs.append(Need(Capability.LOGPROBS, "logprobs", "'logprobs'"))
    return needs


def constraint_of(request: GenerationRequest) -> Constraint:
    """The required form of the answer.

    Raises:
        InvalidRequest: two parameters ask for different things.
    """
    fields = {name: value for name in _ENGINE_FIELDS if (value := getattr(request, name, None))}
    asked: list[tuple[str, Mapping[str, Any]]] = []
    if (structured := getattr(request, "structured_outputs", None)) is not None:
        if not structured or "calls" in structured:  # The latter is our engine's own word.
            _bad(
                "Invalid 'structured_outputs': expected one of json, json_object, regex, choice, grammar.",
                "structured_outputs",
                "invalid_value",
            )
        asked.append(("structured_outputs", structured))
    for name, keyword in _GUIDED.items():
        if (value := getattr(request, name, None)) is not None:
            asked.append((name, {keyword: value}))
    if (form := _structured_format(request.response_format)) is not None:
        asked.append(("response_format", form))
    forced = None
    if isinstance(request, ChatRequest) and (forced := forced_tool(request)) is not None:
        asked.append(("tool_choice", {"json": _calls_schema(request, forced)}))
    if len(asked) > 1:
        first, second = asked[0][0], asked[1][0]
        raise InvalidRequest(
            f"'{first}' and '{second}' cannot both shape one answer.", param=second, code="invalid_value"
        )
    if not asked and not fields:
        return NO_CONSTRAINT
    name, structured = asked[0] if asked else ("", dict[str, Any]())
    try:
        form = msgspec.json.encode(structured) if structured else b""
    except RecursionError:
        raise InvalidRequest(f"Invalid '{name}': it is nested too deeply.", param=name) from None
    # The schemas of a forced call are those of its tools.
    param = "tools" if forced is not None else name
    return Constraint(structured=structured, form=form, fields=fields, forced_tool=forced, param=param)


def forced_tool(request: ChatRequest) -> str | None:
    """The function that must be called; empty: any of them; None: the model decides."""
    choice = request.tool_choice
    if choice == "required":
        return ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function: Any = choice.get("function")
        return str(function["name"])
    return None


def text_only(message: Message) -> Message:
    """The message without what is no text: what a template here makes of it for an estimate."""
    if not isinstance(message.content, list) or all(part.type not in MEDIA_TYPES for part in message.content):
        return message
    parts = [part for part in message.content if part.type not in MEDIA_TYPES]
    return msgspec.structs.replace(message, content=parts or "")


def unsupported(needs: Sequence[Need], lacking: frozenset[str], model: str) -> Unsupported:
    """The error of a request that no worker of a model could answer; `lacking` is what the ablest of them
    lacks.
    """
    need = next(each for each in needs if each.capability in lacking)
    return Unsupported(
        f"{need.what} is not supported by the model '{model}': it has no worker that could do it.",
        param=need.param,
        code="unsupported_by_model",
    )


def _format_needs(form: Mapping[str, Any]) -> list[Need]:
    kind = form.get("type")
    if kind == "text":
        return []
    if kind == "json_schema":
        inner = form.get("json_schema")
        if not isinstance(inner, dict):
            _bad(
                "Missing required parameter: 'response_format.json_schema'.",
                "response_format.json_schema",
                "missing_required_parameter",
            )
        if not isinstance(inner.get("schema", {}), dict):  # pyright: ignore[reportUnknownMemberType]
            _bad(
                "Invalid type for 'response_format.json_schema.schema': expected an object.",
                "response_format.json_schema.schema",
                "invalid_type",
            )
    elif kind != "json_object":
        if kind is None:
            _bad(
                "Missing required parameter: 'response_format.type'.",
                "response_format.type",
                "missing_required_parameter",
            )
        _bad(
            f"Invalid value for 'response_format.type': {str(kind)[:64]!r}. Supported values are 'text', "
            f"'json_object' and 'json_schema'.",
            "response_format.type",
            "invalid_value",
        )
    return [Need(_JSON_KINDS[kind], "response_format", f"'response_format' of type '{kind}'")]


def _structured_format(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    return {"json": form["json_schema"].get("schema") or {}}


def _tool_needs(request: ChatRequest) -> list[Need]:
    needs = _choice_needs(request)
    tools = () if request.tool_choice == "none" else request.tools or ()
    for i, tool in enumerate(tools):
        if tool.function is None:  # Of a type that only its maker knows.
            needs.append(
                Need(Capability.PASS_THROUGH, f"tools[{i}].type", f"A tool of type '{tool.type[:64]}'")
            )
        elif tool.function.strict and not any(need.capability is Capability.FORCED_TOOLS for need in needs):
            needs.append(Need(Capability.STRICT_TOOLS, f"tools[{i}].function.strict", "'strict' of a tool"))
    return needs


def _choice_needs(request: ChatRequest) -> list[Need]:
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return []
    if isinstance(choice, str) and choice != "required":
        _bad(
            f"Invalid value for 'tool_choice': '{choice[:64]}'. Supported values are 'none', 'auto' and "
            f"'required', and an object "
            "that names a function.",
            "tool_choice",
            "invalid_value",
        )
    if not request.tools:
        _bad("'tool_choice' asks for a call, so 'tools' must be given.", "tool_choice", "invalid_value")
    if isinstance(choice, dict) and choice.get("type") != "function":
        return [
            Need(
                Capability.PASS_THROUGH,
                "tool_choice",
                f"'tool_choice' of type '{str(choice.get('type'))[:64]}'",
            )
        ]
    if isinstance(choice, str):
        return [Need(Capability.FORCED_TOOLS, "tool_choice", "'tool_choice' 'required'")]
    function: Any = choice.get("function")
    name: Any = function.get("name") if isinstance(function, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(name, str):
        _bad(
            "Missing required parameter: 'tool_choice.function.name'.",
            "tool_choice.function.name",
            "missing_required_parameter",
        )
    if all(tool.function is None or tool.function.name != name for tool in request.tools or ()):
        _bad(
            f"'tool_choice' names the function '{name[:64]}', which is not among 'tools'.",
            "tool_choice",
            "invalid_value",
        )
    return [Need(Capability.FORCED_TOOLS, "tool_choice", "'tool_choice' naming a function")]


def _part_needs(parts: Sequence[ContentPart], index: int) -> list[Need]:
    return [
        Need(capability, f"messages[{index}].content[{j}]", f"A content part of type '{part.type}'")
        for j, part in enumerate(parts)
        if (capability := _MEDIA.get(part.type)) is not None
    ]


def _calls_schema(request: ChatRequest, name: str) -> dict[str, Any]:
    """The JSON schema of a forced call's arguments, or of an array of calls."""
    if name:
        functions = [tool.function for tool in request.tools or () if tool.function is not None]
        return next(dict(each.parameters or {"type": "object"}) for each in functions if each.name == name)
    return calls_schema(request)


def calls_schema(request: ChatRequest) -> dict[str, Any]:
    """The JSON schema of an array of calls of any of the tools.

    The parameters of each function stand whole under `$defs`, where their references still find what they
    refer to.
    """
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for i, tool in enumerate(request.tools or ()):
        if (function := tool.function) is None:
            continue
        # No name of a function has a "+".
        key = function.name if function.name not in definitions else f"{function.name}+{i}"
        parameters: dict[str, Any] = _rooted(function.parameters or {}, f"#/$defs/{key}")
        parameters.pop("$id", None)  # References would be from there.
        if not SHAPES & parameters.keys():
            parameters["type"] = "object"
        definitions[key] = parameters
        calls.append({
            "type": "object",
            "properties": {
                "name": {"enum": [function.name]},
                "arguments": {"$ref": f"#/$defs/{key}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    limit = 1 if request.parallel_tool_calls is False else CALLS_MAX
    return {"type": "array", "minItems": 1, "maxItems": limit, "items": one, "$defs": definitions}


def _rooted(schema: Any, root: str, *, names: bool = False) -> Any:  # noqa: ANN401
    """A copy of a schema whose references from its root are from `root`; `names`: it is a mapping of names to
    schemas.
    """
    if isinstance(schema, list):
        return [_rooted(each, root) for each in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in cast(dict[str, Any], schema).items():
        if names:
            found[key] = _rooted(value, root)
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[key] = root + value[1:]
        else:
            found[key] = value if key in _LITERALS else _rooted(value, root, names=key in _NAMED)
    return found


def _bad(message: str, param: str, code: str) -> NoReturn:
    raise InvalidRequest(message, param=param, code=code)


ANY_HOST = "*"
"""In the list of hosts: every public name or address."""
_FIELDS = (
    "image_url", "input_audio", "video_url", "file", "audio_url", "image_pil", "image_embeds", "audio_embeds",
    "file_url", "file_id",
)  # fmt: skip
_media_of = attrgetter(*_FIELDS)
_NONE = (None,) * len(_FIELDS)
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]{0,31}:")
"""How a URL begins. Base64 and the names of files at providers have no colon."""


def check_media(messages: Sequence[Message], hosts: Sequence[str]) -> None:
    """Refuse media that a worker would fetch from a host that is not among `hosts`: names, `*.name` for all
    below one, or `ANY_HOST`; and media that stand in a part of another type.

    Raises:
        InvalidRequest: naming the part.
    """
    for i, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for j, part in enumerate(message.content):
            values: tuple[Any, ...] = _media_of(part)
            if values != _NONE:
                _check_part(part, values, f"messages[{i}].content[{j}]", hosts)


def _check_part(part: ContentPart, values: Sequence[object], where: str, hosts: Sequence[str]) -> None:
    for name, value in zip(_FIELDS, values, strict=True):
        if value is None:
            continue
        here = f"{where}.{name}"
        if name != part.type:
            raise InvalidRequest(
                f"Invalid '{here}': a part of type '{part.type[:64]}' has no such field.",
                param=here,
                code="invalid_value",
            )
        if isinstance(value, dict):
            for key, inner in cast(dict[str, object], value).items():
                if inner is not None:
                    _check_field(key, inner, f"{here}.{key[:64]}", hosts)
        else:
            _check_field(name, value, here, hosts)


def _check_field(name: str, value: object, where: str, hosts: Sequence[str]) -> None:
    """Check a URL, and what is written as one where something else is expected."""
    is_url = name == "url" or name.endswith("_url")
    if is_url or (name != "filename" and isinstance(value, str) and _SCHEME.match(value)):
        _check_url(value, where, hosts)


def _check_url(url: object, where: str, hosts: Sequence[str]) -> None:
    if not isinstance(url, str):
        raise InvalidRequest(f"Invalid type for '{where}': expected a URL.", param=where, code="invalid_type")
    if url[:5].lower() == "data:":
        return
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".")
    except ValueError:
        scheme = host = ""
    # Readers of URLs differ on what these mean, and the worker's is not ours.
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(" \\@")
    if scheme not in ("http", "https") or not host or not is_plain:
        raise InvalidRequest(
            f"Invalid '{where}': expected a data URL, or one of http or https.",
            param=where,
            code="invalid_value",
        )
    if not _is_allowed(host, hosts):
        raise InvalidRequest(
            f"Invalid '{where}': this server passes on data URLs, and URLs of hosts that its operator "
            f"allows; '{host[:64]}' is none of them.",
            param=where,
            code="invalid_value",
        )


def _is_allowed(host: str, hosts: Sequence[str]) -> bool:
    for each in hosts:
        name = each.lower()
        if name == host or (name.startswith("*.") and host.endswith(name[1:])):
            return True
        if name == ANY_HOST and _is_public(host):
            return True
    return False


def _is_public(host: str) -> bool:
    """Whether a name or an address is one that the internet knows, as far as its spelling tells."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        # Some resolvers read "127.1", "0x7f000001" and "2130706433" as addresses.
        last = host.rpartition(".")[2]
        return (
            "." in host and last.isalpha() and last not in ("local", "localhost", "internal", "lan", "home")
        )
