"""Makes a chat of a request to the Responses API, so that it goes the way of every chat.

instructions                      a system message, the first
message                           a message
reasoning                         `reasoning_content` of the assistant's message that follows it
function_call                     a tool call of the assistant's message there, if there is one
function_call_output              a message of the role "tool"
text, reasoning.effort, ...       the parameters that a chat has for them

Errors speak of the chat; `renamed` puts them into the words of the request.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from penstock.errors import ClientError, InvalidRequest, Unsupported
from penstock.protocol.openai_validate import MESSAGES_MAX, decoded
from penstock.protocol.responses import (
    CHAT_WORDS,
    SHARED,
    FullResponseRequest,
    FunctionTool,
    InputItem,
    InputPart,
    ResponseRequest,
    check_own,
)

INCLUDED = {
    "message.output_text.logprobs": "the log-probabilities of the answer",
    "reasoning.encrypted_content": "nothing: reasoning is shown as it was written",
}
"""The values of `include`. The others belong to built-in tools."""
ITEMS_MAX = 2 * MESSAGES_MAX
"""Of one conversation. Reasoning and calls are items of their own, so a message may be several."""
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_TRANSLATED = {"tools", "tool_choice", "top_logprobs"}
_CHAT_PATH = re.compile(
    r"(?<![\w.])(?:messages\[(?P<message>\d+)\](?P<within>[\w.\[\]]*)|tools\[(?P<tool>\d+)\]\.function"
    r"|tool_choice\.function|response_format\.json_schema|(?P<word>messages|max_completion_tokens"
    r"|response_format|reasoning_effort|verbosity))(?!\w)"
)
_decoder = msgspec.json.Decoder(FullResponseRequest)
_OWN_WORDS = {chat: own for own, chat in reversed(CHAT_WORDS.items())}
_WITHIN = {".tool_call_id": ".call_id", ".tool_calls": ""}


class ResponseChat(msgspec.Struct, frozen=True, kw_only=True):
    """The chat, and where its messages stood."""

    body: bytes
    """A request to `/v1/chat/completions`."""
    origins: Sequence[str]
    """For each message the part of the request that it was made of."""

    def renamed(self, error: Exception) -> Exception:
        """The error, in the words of the request."""
        if isinstance(error, ClientError):
            error.args = (self._reworded(str(error)),)
            error.param = None if error.param is None else self._reworded(error.param)
        return error

    def _reworded(self, text: str) -> str:
        return _CHAT_PATH.sub(self._own_path, text)

    def _own_path(self, found: re.Match[str]) -> str:
        if found["word"]:
            return _OWN_WORDS[found["word"]]
        if found["tool"]:
            return f"tools[{found['tool']}]"
        if found["message"]:
            number, within = int(found["message"]), found["within"]
            origin = self.origins[number] if number < len(self.origins) else "input"
            return origin + _WITHIN.get(within, within)
        return "tool_choice" if found[0].startswith("tool") else "text.format"


def parse_response(body: bytes) -> ResponseRequest:
    """Read `/v1/responses`. The fields that it shares with a chat are checked when that is made of it.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_decoder, body)
    assert isinstance(request, ResponseRequest), "the shape with all its parameters is one"
    return request


def chat_of(request: ResponseRequest, earlier: Sequence[InputItem] = ()) -> ResponseChat:
    """The chat that a request asks for; `earlier` are the items of the response that it follows.

    Raises:
        InvalidRequest: naming the parameter.
    """
    check_own(request)
    items = items_of(request)
    if len(earlier) + len(items) > ITEMS_MAX:
        after = f" and follows {len(earlier)} earlier ones" if earlier else ""
        _bad(
            f"'input' has {len(items)} items{after}; at most {ITEMS_MAX} are allowed.",
            "input",
            "array_above_max_length",
        )
    conversation = _Conversation()
    if request.instructions is not None:
        conversation.add({"role": "system", "content": request.instructions}, "instructions")
    for item in earlier:
        conversation.take(item, "previous_response_id")
    for i, item in enumerate(items):
        conversation.take(item, "input" if isinstance(request.input, str) else f"input[{i}]")
    chat: dict[str, Any] = {
        each.name: value
        for each in SHARED
        if each.name not in _TRANSLATED and (value := getattr(request, each.name)) is not None
    }
    assert len(conversation.messages) == len(conversation.origins), "each message stood somewhere"
    chat["messages"] = conversation.messages
    chat |= _tools(request)
    chat |= _reported(request)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if (reasoning := request.reasoning) is not None:
        _check_summary("reasoning.summary", reasoning.summary)
        _check_summary("reasoning.generate_summary", reasoning.generate_summary)
        if reasoning.effort is not None:
            chat["reasoning_effort"] = reasoning.effort
    if (text := request.text) is not None:
        if text.format is not None:
            chat["response_format"] = _format(text.format)
        if text.verbosity is not None:
            chat["verbosity"] = text.verbosity
    return ResponseChat(body=msgspec.json.encode(chat), origins=conversation.origins)


def items_of(request: ResponseRequest) -> Sequence[InputItem]:
    """The input; a string is what the user says."""
    if isinstance(request.input, str):
        return [InputItem(type="message", role="user", content=request.input)]
    return request.input


class _Conversation:
    """Messages that grow item by item."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._answers = False
        """The last message is the assistant's, made of items that belong together."""
        self._thoughts: list[str] = []
        """Of the assistant's message that follows."""

    def add(self, message: dict[str, Any], origin: str) -> None:
        assert message["role"] == "assistant" or "reasoning_content" not in message, "others do not think"
        self.messages.append(message)
        self.origins.append(origin)
        self._answers = message["role"] == "assistant"
        if not self._answers:
            self._thoughts = []

    def take(self, item: InputItem, where: str) -> None:
        """Take the next item, which stands at `where`.

        Raises:
            InvalidRequest: it is not whole, or of a kind that nothing here understands.
        """
        kind = item.type or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._thoughts.append(_text(item.content) or _text(item.summary))
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self.add({
                "role": "tool",
                "tool_call_id": _needed(item.call_id, f"{where}.call_id"),
                "content": _content(_needed(item.output, f"{where}.output"), f"{where}.output"),
            }, where)  # fmt: skip
        else:
            raise Unsupported(
                f"'{where}.type': an item of type '{kind[:64]}' is not supported by this server, which has "
                f"no built-in tools.",
                param=f"{where}.type",
            )

    def _message(self, item: InputItem, where: str) -> None:
        role = _needed(item.role, f"{where}.role")
        if role not in ("user", "assistant", "system", "developer"):
            _bad(
                f"Invalid value for '{where}.role': {role[:64]!r}. Supported values are 'user', "
                "'assistant', 'system' and 'developer'.",
                f"{where}.role",
            )
        content: str | list[InputPart] = _needed(item.content, f"{where}.content")
        if role != "assistant":
            self.add({"role": role, "content": _content(content, f"{where}.content")}, where)
            return
        message: dict[str, Any] = {"role": role, "content": _text(content)}
        parts: Sequence[InputPart] = () if isinstance(content, str) else content
        if refusal := "".join(part.refusal or "" for part in parts):
            message["refusal"] = refusal
        self.add(self._thoughtful(message), where)

    def _call(self, item: InputItem, where: str) -> None:
        call = {
            "id": _needed(item.call_id, f"{where}.call_id"),
            "type": "function",
            "function": {
                "name": _needed(item.name, f"{where}.name"),
                "arguments": _needed(item.arguments, f"{where}.arguments"),
            },
        }
        if not self._answers:
            self.add(self._thoughtful({"role": "assistant", "content": None}), where)
        assert self.messages[-1]["role"] == "assistant", "it calls"
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _thoughtful(self, message: dict[str, Any]) -> dict[str, Any]:
        thought, self._thoughts = "".join(self._thoughts), []
        return message | ({"reasoning_content": thought} if thought else {})


def _content(content: str | Sequence[InputPart], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part(part: InputPart, where: str) -> dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": _needed(part.text, f"{where}.text")}
        case "refusal":
            return {"type": "refusal", "refusal": _needed(part.refusal, f"{where}.refusal")}
        case "input_image":
            if part.image_url is None:
                raise Unsupported(
                    f"'{where}': an image must be given by its 'image_url'; this server stores no files.",
                    param=f"{where}.image_url",
                )
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": part.image_url} | detail}
        case "input_file":
            names = ("file_data", "file_id", "file_url", "filename")
            return {"type": "file", "file": {name: value for name in names if (value := getattr(part, name))}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": _needed(part.input_audio, f"{where}.input_audio")}
        case _:
            pass
    raise InvalidRequest(
        f"Invalid value for '{where}.type': {part.type[:64]!r}. Supported values are 'input_text', "
        "'input_image', 'input_file', 'input_audio', 'output_text' and 'refusal'.",
        param=f"{where}.type",
        code="invalid_value",
    )


def _text(content: str | Sequence[InputPart] | None) -> str:
    """The text of what an answer held."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content if part.type in _TEXT_PARTS)


def _tools(request: ResponseRequest) -> dict[str, Any]:
    choice, tools = request.tool_choice, request.tools
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise Unsupported(
                f"'tools[{i}].type': the built-in tool '{tool.type[:64]}' is not supported by this server; "
                "it has tools of type 'function', which the client runs.",
                param=f"tools[{i}].type",
            )
        if not tool.name:
            _needed(None, f"tools[{i}].name")
    assert all(tool.type == "function" and tool.name for tool in tools or ()), "the others were refused"
    if isinstance(choice, dict):
        tools, choice = _chosen(tools or (), choice)
    found: dict[str, Any] = {} if choice is None else {"tool_choice": choice}
    if tools:
        found["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    return found


def _function(tool: FunctionTool) -> dict[str, Any]:
    assert tool.type == "function", "the others were refused"
    names = ("name", "description", "parameters", "strict")
    return {name: value for name in names if (value := getattr(tool, name)) is not None}


def _chosen(
    tools: Sequence[FunctionTool], choice: Mapping[str, Any]
) -> tuple[Sequence[FunctionTool], str | dict[str, Any]]:
    """The tools that may be called, and how a chat says which: "allowed_tools" is a choice among fewer."""
    kind = choice.get("type")
    if kind == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        raise Unsupported(
            f"'tool_choice' of type {str(kind)[:64]!r} is not supported by this server.", param="tool_choice"
        )
    allowed: Any = choice.get("tools")
    names = [each.get("name") for each in allowed] if _is_objects(allowed) else []
    known = {tool.name for tool in tools}
    if not names or not all(isinstance(name, str) and name in known for name in names):
        _bad("'tool_choice.tools' must name functions that are among 'tools'.", "tool_choice.tools")
    chosen = [tool for tool in tools if tool.name in names]
    assert chosen, "all the names are known"
    return chosen, choice.get("mode") or "auto"


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)  # pyright: ignore[reportUnknownVariableType]


def _reported(request: ResponseRequest) -> dict[str, Any]:
    """Log-probabilities, which have to be asked for twice."""
    for i, what in enumerate(request.include or ()):
        if what not in INCLUDED:
            raise Unsupported(
                f"'include[{i}]': {what[:64]!r} is not supported by this server.", param=f"include[{i}]"
            )
    if "message.output_text.logprobs" in (request.include or ()):
        return {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.top_logprobs:
        _bad("'top_logprobs' needs 'message.output_text.logprobs' in 'include'.", "top_logprobs")
    return {}


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` as a chat has it: the schema one level deeper."""
    if form.get("type") != "json_schema":
        return dict(form)
    if not isinstance(form.get("schema"), dict):
        _bad(
            "Missing required parameter: 'text.format.schema'.",
            "text.format.schema",
            "missing_required_parameter",
        )
    return {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}


def _check_summary(param: str, asked: str | None) -> None:
    if asked not in (None, "auto"):
        raise Unsupported(
            f"'{param}' {asked!r} is not supported by this server, which shows reasoning as it was written; "
            "'auto' asks for nothing.",
            param=param,
        )


def _needed(value: Any, where: str) -> Any:  # noqa: ANN401
    if value is None:
        _bad(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    return value


def _bad(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequest(message, param=param, code=code)
