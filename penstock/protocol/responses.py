"""OpenAI's Responses API: its requests as this server takes them, and its answers as this server writes them.

A response is a chat that is written otherwise: `responses_chat` makes the one of the other. An item of the
input may be anything that an earlier answer held, so what is unknown within one is dropped, as within the
messages of a chat. Parameters of a chat that this API has no word for (`seed`, `top_k`, ...) are taken under
the same names.

This module knows no sockets, models or tokens.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol.openai import ContentLogprob, NumTop, StreamOptions
from penstock.protocol.parameters import CHAT, Checker, Fate, Parameter, refused

Count = Annotated[int, Meta(ge=1)]


# --- requests ------------------------------------------------------------------------------------


class InputPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    input_audio: Any = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message (which need not say so), or whatever else an answer may hold; by `type` it has some fields
    or others.
    """

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    """Of reasoning that is not shown itself."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    """The result of a called function."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `tools`; other types than "function" are what a provider runs itself."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older spelling."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`, without the parameters that it has in common with a chat."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Count | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: NumTop | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None


_OWN_WORDS = (
    "messages", "n", "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort",
    "verbosity", "logprobs", "functions", "function_call", "modalities", "audio", "prediction",
    "web_search_options", "prompt_logprobs", "echo", "best_of", "store", "reasoning", "thinking",
    "return_token_ids",
)  # fmt: skip
"""Parameters of a chat that this API says in other words, or has not."""
SHARED = tuple(each for each in CHAT if each.name not in _OWN_WORDS)
"""Those that mean here what they mean there."""
RESPONSES = (
    *(Parameter(name, Fate.HONOURED) for name in (
        "input", "instructions", "previous_response_id", "store", "max_output_tokens", "reasoning", "text",
        "include",
    )),
    *SHARED,
    refused("background", False, instead="ask with 'stream', or wait for the answer"),
    refused("conversation", instead="'previous_response_id' continues a response that was stored"),
    refused("prompt", instead="there are no stored prompts here; give 'instructions' and 'input'"),
    refused("max_tool_calls", instead="it bounds built-in tools, which this server does not have"),
    refused("truncation", "disabled", instead="what does not fit the model's context is an error"),
    refused("context_management", []),
    refused("return_token_ids", False, instead="'/v1/chat/completions' and '/v1/completions' have them"),
    refused("image"),
    refused("access_programs"),
)  # fmt: skip
"""Every parameter of `POST /v1/responses`."""
CHAT_WORDS = {
    "input": "messages",
    "instructions": "messages",
    "max_output_tokens": "max_completion_tokens",
    "text.format": "response_format",
    "text.verbosity": "verbosity",
    "reasoning.effort": "reasoning_effort",
    "include": "logprobs",
}
"""The chat's name for the same."""
FullResponseRequest = msgspec.defstruct(
    "FullResponseRequest",
    [
        (each.name, each.type | None, None)
        for each in RESPONSES
        if each.name not in ResponseRequest.__struct_fields__
    ],
    bases=(ResponseRequest,),
    frozen=True,
    kw_only=True,
)
"""The shape with all its parameters; those of a chat are looked at as such."""
_OWN = {each.name for each in RESPONSES if each not in SHARED}
check_own = Checker(FullResponseRequest, _OWN, RESPONSES).check
"""Refuses what this API has and this server has not, by name."""


# --- answers -------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True):
    """The one part of a message."""

    type: str = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    """The one part of a reasoning."""

    type: str = "reasoning_text"
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True):
    """Prose."""

    id: str
    type: str = "message"
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True):
    """The model's reasoning. It is shown as it was: there is no summary, and nothing is encrypted."""

    id: str
    type: str = "reasoning"
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A call of one of the client's functions. The answer to it names `call_id`."""

    id: str
    type: str = "function_call"
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct, frozen=True):
    """`usage.input_tokens_details`."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    """`error` of a response that failed after it had begun."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer ends before its end."""

    reason: str


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The response object: what was asked for, and the answer as far as it is there."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True
