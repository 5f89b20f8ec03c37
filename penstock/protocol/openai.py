"""The messages of OpenAI's HTTP API, as this server takes and writes them; `server_answers` has other
servers'.

Field names and nesting are OpenAI's. Extensions that vLLM made common (`top_k`, `min_p`, `ignore_eos`, ...)
are marked. Two sections, because the rules differ:

- requests, as this server accepts them. Anything unknown at the top level is refused; within messages it is
  dropped, for clients send back what some server gave them. Ranges that need no configuration are in the
  types, the others in `openai_validate`; `parameters` says what becomes of each parameter.
- answers, as this server writes them: every field is always there. The inner objects (usage,
  log-probabilities, tool calls, errors) are the same in both directions, so their fields have defaults.

This module knows no sockets, models or tokens.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Role = Literal["system", "developer", "user", "assistant", "tool"]
Count = Annotated[int, Meta(ge=1)]
TOKEN_ID_MAX = 2**31 - 1
TokenId = Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]
NumTop = Annotated[int, Meta(ge=0)]
"""Alternatives to show beside a token."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Smaller goes earlier."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
SEED_MAX = 2**63 - 1


class _Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A closed object: a misspelt field is an error and not a silent default.

    Written out again (for a chat template), it has the fields that the client gave.
    """


class _Open(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=True):
    """Part of a message.

    Fields that are not here (`cache_control`, `annotations`, `provider_specific_fields`) are dropped.
    """


# --- requests ------------------------------------------------------------------------------------


class StreamOptions(_Shape, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    """Send one more chunk, with no choices and the usage, before `[DONE]`."""
    continuous_usage_stats: bool | None = None
    """Extension: the usage until there in every chunk."""
    include_obfuscation: bool | None = None


class FunctionSpec(_Shape, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(_Open, frozen=True, kw_only=True):
    """One entry of `tools`. Other types than "function" are their makers' business."""

    type: str
    function: FunctionSpec | None = None


class FunctionCall(_Open, frozen=True, kw_only=True):
    """The function of a call that an earlier answer made; `arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(_Open, frozen=True, kw_only=True):
    """A tool call in an assistant message."""

    id: str
    function: FunctionCall
    type: Literal["function"] = msgspec.field(default_factory=lambda: "function")


class ContentPart(_Open, frozen=True, kw_only=True):
    """One part of a message's content.

    A part that is no text is for workers that get the message as the client sent it.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None
    # No type of part has these here. Some engines read them in a part of any type.
    audio_url: Any = None
    image_pil: Any = None
    image_embeds: Any = None
    audio_embeds: Any = None
    file_url: Any = None
    file_id: Any = None


class Message(_Open, frozen=True, kw_only=True):
    """One message of the conversation. An answer's own message can be sent back as it came."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    """For templates that show earlier reasoning."""
    reasoning: Any = None
    """The same, as some servers name it."""


class GenerationRequest(_Shape, frozen=True, kw_only=True):
    """The common fields of chat and plain completions.

    Parameters that few requests have are in `parameters`.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=SEED_MAX)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    """By token id, in decimal digits."""

    # Extensions, named as in vLLM.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    """EOS and `stop_token_ids` are not drawn before this many tokens."""
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    user: Any = None
    response_format: dict[str, Any] | None = None
    metadata: Any = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False: the answer ends behind its first call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: variables for the model's chat template, such as `enable_thinking`."""

    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0: the prompt is scored, and nothing is answered."""
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: Count | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(_Shape, frozen=True, kw_only=True):
    """`POST /v1/tokenize`, as in vLLM: a prompt, or messages to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Shape, frozen=True, kw_only=True):
    """`POST /v1/detokenize`, as in vLLM."""

    tokens: list[TokenId]
    model: str | None = None


# --- answers -------------------------------------------------------------------------------------


class CachedTokens(msgspec.Struct, frozen=True):
    """`prompt_tokens_details`."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct, frozen=True):
    """`completion_tokens_details`."""

    reasoning_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    """Of the completion's tokens, those that speculation guessed; wrong guesses are none of the completion's.
    Not shown where nothing was guessed."""
    rejected_prediction_tokens: int | msgspec.UnsetType | None = msgspec.UNSET

    @classmethod
    def of(cls, reasoning: int, accepted: int, rejected: int) -> "CompletionDetails | msgspec.UnsetType":
        """`reasoning` below 0: the model does not reason, and nothing is shown of that."""
        thought = reasoning if reasoning >= 0 else msgspec.UNSET
        if accepted or rejected:
            return cls(thought, accepted, rejected)
        return cls(thought) if reasoning >= 0 else msgspec.UNSET


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`, summed over all choices; a prompt counts once however many choices it has.

    None: not reported.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: CompletionDetails | msgspec.UnsetType | None = msgspec.UNSET
    """Of models that reason, and of answers that were guessed at."""

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in a prefix cache."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative; `bytes` because a token may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ContentLogprob(TopLogprob, frozen=True):
    """One generated token with its alternatives, as chat answers show it."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a chat answer."""

    content: list[ContentLogprob] | None = None
    refusal: Any = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`choices[].logprobs` of a plain completion: four lists of equal length; an echoed prompt's first token
    has null.
    """

    text_offset: list[int] | None = None
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of `prompt_logprobs`, as vLLM shows it."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of a prompt: itself and the likeliest there. Null for the first, which nothing
precedes."""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The function part of a tool call in an answer; streamed chunks leave out what was sent before."""

    name: str | None = None
    arguments: str | None = None


class AnswerToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call in an answer. `index` is set in streams only."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`choices[].message`."""

    role: Literal["assistant"] = msgspec.field(default_factory=lambda: "assistant")
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same: vLLM's newer name."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`choices[]` of a chat answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: Sequence[int] | None = None
    """vLLM's: what was asked for by `return_token_ids`."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`choices[]` of a plain completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole answer of `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: Sequence[int] | None = None


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The use that the caller may make, all models together; null is no limit. Extension."""

    tier: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    """Prompt and answer tokens together."""
    concurrent_requests: int | None
    """Of one request's prompt."""
    output_tokens: int | None
    """Of one answer."""
    context_tokens: int | None
    """Of both together."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model of `/v1/models`. vLLM's extensions: `max_model_len`, null while it is unknown, and the model
    that an adapter belongs to. Ours: what the caller may use.
    """

    id: str
    created: int
    object: str = "model"
    owned_by: str = "penstock"
    max_model_len: int | None = None
    parent: str | None = None
    task: str | None = None
    """"generate", "embed" or "score"; null while it is unknown."""
    limits: CallerLimits | None = None
    root: str | None = None
    """Of a name without a version: the version that answers for it."""
    state: str | None = None
    """"asleep" or "waking" for a model that a request would have to wait for."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's answer to `/v1/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's answer to `/v1/detokenize`."""

    prompt: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The inside of every error."""

    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The error object, as a response body or as the last event of a stream."""

    error: ErrorBody
