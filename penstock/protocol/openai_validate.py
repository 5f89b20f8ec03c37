"""From the bytes of a body to a request that makes sense, or to an error that says what to change.

Types, ranges and unknown fields are checked by msgspec in one pass over the bytes; this module puts its
findings into OpenAI's words, and checks what a type cannot say: bounds, and fields that exclude one another.
The needs of a request are read in `needs`. It knows nothing about models.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from penstock.config.flow import LimitsConfig
from penstock.errors import InvalidRequest, Unsupported
from penstock.protocol.needs import MEDIA_TYPES
from penstock.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    GenerationRequest,
    Message,
    StreamOptions,
    TokenizeRequest,
    ToolSpec,
)
from penstock.protocol.parameters import RareChatRequest, RareCompletionRequest, explain

T = TypeVar("T")
_UNKNOWN_START = "Object contains unknown field"
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""Plain ASCII and one spelling per id, so that no two entries speak of one token."""
STOP_MAX, STOP_CHARS_MAX, STOP_TOKEN_IDS_MAX = 4, 256, 64
"""Stop strings of a request, characters of one, and stop tokens."""
MESSAGES_MAX, TOOLS_MAX, PROMPTS_MAX = 2048, 128, 64
"""Of one request; the last one of a call to /v1/completions."""
TOP_LOGPROBS_MAX, LOGIT_BIAS_MAX = 20, 1024
JSON_VALUES_MAX = 100_000
"""Strings, objects and arrays in one JSON body: looking through them takes time that others wait."""
JSON_DEPTH_MAX = 64
"""Nesting of free-form JSON (tools' schemas, arguments of the chat template); templates and encoders recurse
over it."""

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_rare: Mapping[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]] = {
    _chat: msgspec.json.Decoder(RareChatRequest),
    _completion: msgspec.json.Decoder(RareCompletionRequest),
}
"""Read with when a body has a parameter that few have."""
_tokenize = msgspec.json.Decoder(TokenizeRequest)
_any = msgspec.json.Decoder()


def parse_chat(body: bytes, limits: LimitsConfig) -> ChatRequest:
    """Read and check `/v1/chat/completions`.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_chat, body)
    _check_generation(request, limits)
    check_messages(request.messages)
    check_tools(request.tools)
    if request.top_logprobs is not None:
        _check_chat_logprobs(request, request.top_logprobs)
    if request.chat_template_kwargs is not None:
        _check_depth(request.chat_template_kwargs, "chat_template_kwargs")
    return request


def is_plain(request: GenerationRequest) -> bool:
    """Whether it is a chat that asks for any text as the answer to text, by parameters that many requests
    have, as nearly all do. It has no needs (`needs.rare_needs`), no required form, and no media.
    """
    if type(request) is not ChatRequest or request.response_format is not None:
        return False
    for message in request.messages:
        if isinstance(message.content, list):
            return False
    return request.tools is None is request.tool_choice


def parse_completion(body: bytes, limits: LimitsConfig) -> CompletionRequest:
    """Read and check `/v1/completions`.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_completion, body)
    _check_generation(request, limits)
    prompts_of(request)
    if request.logprobs is not None and request.logprobs > TOP_LOGPROBS_MAX:
        _too_big("logprobs", TOP_LOGPROBS_MAX, request.logprobs)
    if request.max_tokens == 0 and not (
        request.echo or getattr(request, "prompt_logprobs", None) is not None
    ):
        _refuse(
            "'max_tokens' may be 0 only to score a prompt, with 'echo' or 'prompt_logprobs'.",
            "max_tokens",
            "invalid_value",
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise Unsupported("'best_of' other than 'n' is not supported by this server.", param="best_of")
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Read and check `/v1/tokenize`: exactly one of `prompt` and `messages`.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decoded(_tokenize, body)
    if (request.prompt is None) == (request.messages is None):
        _refuse("Give exactly one of 'prompt' and 'messages'.", "prompt")
    if request.messages is not None:
        check_messages(request.messages)
        check_tools(request.tools)
        _check_depth(request.chat_template_kwargs, "chat_template_kwargs")
    return request


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of one call, each text or token ids.

    Raises:
        InvalidRequest: empty, too many, or of mixed kinds.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        _refuse("'prompt' must not be empty.", "prompt")
    if all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    if len(prompt) > PROMPTS_MAX:
        _refuse(f"'prompt' has {len(prompt)} entries; at most {PROMPTS_MAX} are allowed.", "prompt")
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        _refuse("'prompt' must be all strings or all arrays of token ids, not a mixture.", "prompt")
    prompts = [part for part in prompt if not isinstance(part, int)]
    for i, part in enumerate(prompts):
        if isinstance(part, list) and not part:
            _refuse("An array of token ids must not be empty.", f"prompt[{i}]")
    return prompts


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse a conversation that no template can render.

    Raises:
        InvalidRequest: naming the message.
    """
    if not messages:
        _refuse("'messages' must hold at least one message.", "messages", "empty_array")
    if len(messages) > MESSAGES_MAX:
        _refuse(
            f"'messages' has {len(messages)} entries; at most {MESSAGES_MAX} are allowed.",
            "messages",
            "array_above_max_length",
        )
    for i, message in enumerate(messages):
        if type(message.content) is not str or message.role == "tool" or message.tool_calls is not None:
            _check_message(message, f"messages[{i}]")


def check_tools(tools: Sequence[ToolSpec] | None) -> None:
    """Refuse tools that are too many, nested beyond reason, or functions without one.

    Raises:
        InvalidRequest: naming the tool.
    """
    if tools is None:
        return
    if len(tools) > TOOLS_MAX:
        _refuse(f"'tools' has {len(tools)} entries; at most {TOOLS_MAX} are allowed.", "tools")
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.function is None:
            if tool.type != "function":
                continue
            _refuse(
                f"Missing required parameter: '{where}.function'.",
                f"{where}.function",
                "missing_required_parameter",
            )
        _check_depth(tool.function.parameters, f"{where}.function.parameters")


def _check_message(message: Message, where: str) -> None:
    if isinstance(message.content, list):
        for j, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                _check_part(part, f"{where}.content[{j}]")
    if message.content is None:
        spoken = message.role == "assistant" and (message.tool_calls or message.refusal)
        if not spoken:
            _refuse(
                f"Missing required parameter: '{where}.content'.",
                f"{where}.content",
                "missing_required_parameter",
            )
    if message.role == "tool" and not message.tool_call_id:
        _refuse(
            f"Missing required parameter: '{where}.tool_call_id'. Messages with role 'tool' answer a tool "
            f"call.",
            f"{where}.tool_call_id",
            "missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        _refuse("Only messages with role 'assistant' may have 'tool_calls'.", f"{where}.tool_calls")


def _check_part(part: ContentPart, where: str) -> None:
    kind = part.type
    if kind == "text":
        name, value = "text", part.text
    elif kind == "refusal" or kind in MEDIA_TYPES:
        name, value = kind, getattr(part, kind)
    else:
        _refuse(
            f"Invalid value for '{where}.type': '{kind[:64]}'. Supported values are 'text', 'image_url', "
            f"'input_audio', 'video_url', "
            "'file' and 'refusal'.",
            f"{where}.type",
            "invalid_value",
        )
    if value is None:
        _refuse(
            f"Missing required parameter: '{where}.{name}'.", f"{where}.{name}", "missing_required_parameter"
        )


def _check_generation(request: GenerationRequest, limits: LimitsConfig) -> None:
    if request.n is not None and request.n > limits.n_max:
        _too_big("n", limits.n_max, request.n)
    if request.stream_options is not None:
        _check_stream_options(request.stream_options, streams=bool(request.stream))
    if request.response_format is not None:
        _check_depth(request.response_format, "response_format")
    if isinstance(request, RareChatRequest | RareCompletionRequest):
        _check_prompt_logprobs(request)
        for name in ("structured_outputs", "guided_json"):
            _check_depth(getattr(request, name), name)
    if request.logit_bias:
        _check_logit_bias(request.logit_bias)
    if request.stop is not None:
        _check_stop(request.stop)
    if request.stop_token_ids is not None and len(request.stop_token_ids) > STOP_TOKEN_IDS_MAX:
        _refuse(
            f"'stop_token_ids' has {len(request.stop_token_ids)} entries; at most {STOP_TOKEN_IDS_MAX} are "
            f"allowed.",
            "stop_token_ids",
            "array_above_max_length",
        )


def _check_prompt_logprobs(request: GenerationRequest) -> None:
    wanted: int | None = getattr(request, "prompt_logprobs", None)
    if wanted is None:
        return
    if wanted > TOP_LOGPROBS_MAX:
        _too_big("prompt_logprobs", TOP_LOGPROBS_MAX, wanted)
    if request.stream:
        _refuse(
            "'prompt_logprobs' is only allowed when 'stream' is false.", "prompt_logprobs", "invalid_value"
        )


def _check_stream_options(options: StreamOptions, *, streams: bool) -> None:
    if not streams:
        _refuse("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise Unsupported(f"'{param}' is not supported by this server.", param=param)
    if options.continuous_usage_stats and not options.include_usage:
        _refuse(
            "'stream_options.continuous_usage_stats' needs 'stream_options.include_usage' to be true.",
            "stream_options.continuous_usage_stats",
        )


def _check_logit_bias(bias: dict[str, float]) -> None:
    if len(bias) > LOGIT_BIAS_MAX:
        _refuse(
            f"'logit_bias' has {len(bias)} entries; at most {LOGIT_BIAS_MAX} are allowed.",
            "logit_bias",
        )
    wrong = next((key for key in bias if not _TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        _refuse(
            f"Invalid 'logit_bias': its keys are token ids in decimal digits, but one is '{wrong[:64]}'.",
            "logit_bias",
        )


def _check_stop(stop: str | list[str]) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > STOP_MAX:
        _refuse(
            f"'stop' has {len(strings)} entries; at most {STOP_MAX} are allowed.",
            "stop",
            "array_above_max_length",
        )
    for text in strings:
        if not text:
            _refuse("'stop' must not contain an empty string.", "stop")
        if len(text) > STOP_CHARS_MAX:
            _refuse(f"A stop string may have at most {STOP_CHARS_MAX} characters.", "stop")


def _check_chat_logprobs(request: ChatRequest, num_top: int) -> None:
    if not request.logprobs:
        _refuse("'logprobs' must be true when 'top_logprobs' is given.", "top_logprobs")
    if num_top > TOP_LOGPROBS_MAX:
        _too_big("top_logprobs", TOP_LOGPROBS_MAX, num_top)


def _check_depth(value: object, where: str) -> None:
    """Walk free-form JSON without recursion; the work is bounded by the size of the body."""
    level: list[Any] = [value]
    for _ in range(JSON_DEPTH_MAX):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            elif isinstance(item, list):
                below.extend(item)  # pyright: ignore[reportUnknownArgumentType]
        if not below:
            return
        level = below
    _refuse(f"'{where}' is nested more than {JSON_DEPTH_MAX} levels deep.", where)


# --- from msgspec's findings to OpenAI's words -----------------------------------------------------


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Read a body.

    Raises:
        InvalidRequest: naming the field.
    """
    try:
        try:
            request = decoder.decode(body)
        except msgspec.ValidationError as error:
            if (rare := _rare.get(decoder)) is None or not str(error).startswith(_UNKNOWN_START):
                raise
            decoder = rare
            request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error), decoder) from None
    except UnicodeDecodeError:
        _refuse(f"The body is not valid UTF-8{_bad_utf8_at(body)}.", None, "invalid_json")
    except msgspec.DecodeError as error:
        where = f"it ends too early (byte {len(body)})" if "truncated" in str(error) else str(error)
        where = where.removeprefix("JSON is malformed: ")
        _refuse(f"We could not parse the JSON body of your request: {where}.", None, "invalid_json")
    except RecursionError:
        _refuse("The JSON body is nested too deeply.", None, "invalid_json")
    _check_keys(body, JSON_VALUES_MAX)
    return request


_STRING = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*:)?|[{}\[\]]', re.DOTALL)
"""A string (with the colon after it, if it is a key) or a bracket; numbers and words between them are passed
over."""
_FEW = 1000
_SPACED = re.compile(rb"[ \t\r\n]:")
_HOLDERS = (dict, list)


class TooManyValues(Exception):
    """The body holds more strings, objects and arrays than allowed."""


class _Repeated(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def repeated_key(body: bytes, values_max: int) -> str | None:
    """The first key that one object of `body`, which is valid JSON, has twice; None if there is none.

    Decoders pass over it in silence, and what a receiver does with such an object cannot be predicted (RFC
    8259, section 4). A proxy that reads the first `model` and a server that reads the last do not speak of
    the same request.

    Raises:
        TooManyValues: there are more than `values_max` strings and brackets; the rest was not looked at.
        RecursionError: it is nested too deeply.
    """
    num_objects = body.count(b"{")
    num_at_most = body.count(b'"') // 2 + 2 * (num_objects + body.count(b"["))
    if num_at_most > values_max:
        for count, _ in enumerate(_STRING.finditer(body)):
            if count >= values_max:
                raise TooManyValues
    if num_at_most < _FEW:
        # Each key has a colon: as many colons as different keys leave none for a key that comes again.
        try:
            num_keys = _num_keys(body)
        except (msgspec.DecodeError, RecursionError):
            num_keys = -1  # A number out of range, in a field that is passed over; the slow way makes none.
        if body.count(b":") == num_keys:
            return None
        if body.count(b'":') == num_keys and _SPACED.search(body) is None:
            return None
    try:
        _DECODER.decode(body.decode())
    except _Repeated as found:
        return found.key
    return None


def _num_keys(body: bytes) -> int:
    """How many keys the objects of a body have, those that one object has twice counted once; or fewer."""
    values: list[Any] = [_any.decode(body)]
    count = 0
    for value in values:  # It grows.
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is dict:
            count += len(value)
            values += value.values()
        elif kind is list and value and type(value[0]) in _HOLDERS:  # No list of token ids.
            values += value
    return count


def _check_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    """Called for each object when its end is reached; what it held is not needed any more."""
    if len(dict(pairs)) == len(pairs):
        return
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise _Repeated(key)
        seen.add(key)


# Numbers are not made: their lengths are as good, and take no time that grows with the square of the digits.
_DECODER = json.JSONDecoder(object_pairs_hook=_check_pairs, parse_int=len, parse_float=len, strict=False)


def _check_keys(body: bytes, values_max: int) -> None:
    try:
        key = repeated_key(body, values_max)
    except TooManyValues:
        _refuse(
            f"The JSON body holds more than {values_max} strings, objects and arrays.", None, "invalid_json"
        )
    except RecursionError:  # The decoder of the request, with fewer frames around it, has just managed.
        _refuse("The JSON body is nested too deeply.", None, "invalid_json")
    if key is not None:
        shown = key[:64]
        _refuse(f"The JSON body has the key '{shown}' twice in one object.", shown, "invalid_json")


def _bad_utf8_at(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f" (byte {error.start})"
    return ""


def _too_big(param: str, limit: int, got: int) -> NoReturn:
    shown = got if got < 10**18 else "a larger number"
    _refuse(
        f"Invalid '{param}': expected an integer of at most {limit}, but got {shown}.", param, "invalid_value"
    )


def _refuse(message: str, param: str | None, code: str | None = None) -> NoReturn:
    raise InvalidRequest(message, param=param, code=code)
