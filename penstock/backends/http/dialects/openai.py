"""OpenAI's HTTP API: what everything compatible with it shares (vllm.py, triton.py), and providers with a
key.

    provider  POST {base}/chat/completions   the client's own messages and tools; text and tool calls come
                                             back
              POST {base}/completions        plain prompts, as text
              GET  {base}/models             whether it is there, and which models it has

A provider has its own tokenizer and template, so what we send is what the client sent. Tokens are counted
with the model's tokenizer here until the provider's `usage` comes, which then counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.backends.base import GenerateRequest, TextLogprob, ToolCallPiece
from penstock.backends.http.dialects.base import (
    NOTHING,
    AtOnce,
    HttpSubmission,
    Piece,
    ReportedUsage,
    SaidError,
    ServerFacts,
    refuse,
    said_by,
)
from penstock.protocol.openai import (
    TOKEN_ID_MAX,
    AnswerToolCall,
    CalledFunction,
    CompletionLogprobs,
    ContentLogprob,
    TopLogprob,
    UsageBody,
)
from penstock.protocol.server_answers import (
    AnswerDelta,
    ChatEvent,
    CompletionEvent,
    CompletionEventChoice,
    decode_chat_event,
    decode_chat_events,
    decode_completion_event,
    decode_completion_events,
    decode_models,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types import (
    ALL_CAPABILITIES,
    COMMON_CAPABILITIES,
    VECTOR_CAPABILITIES,
    Capability,
    FinishReason,
)

_TOKEN_ID = "token_id:"
_ID_DIGITS_MAX = len(str(TOKEN_ID_MAX))
_FINISHES = {
    "stop": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "content_filter": FinishReason.CONTENT_FILTER,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}
_FAILED = frozenset({"abort", "error"})
"""vLLM's finish reasons of answers that did not come to their end."""
_NOT_FORWARDED = frozenset(
    {"n", "stream", "stream_options", "model", "max_tokens", "max_completion_tokens", "seed", "priority"}
)

_DONE_HERE = frozenset({"prompt", "n", "best_of", "echo", "stop", "include_stop_str_in_output", "priority"})
"""Of a plain completion."""


_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""A body's fields, each as the bytes that came."""


def finish_of(word: str | None) -> FinishReason | None:
    """An engine's finish reason. An unknown one counts as an ordinary end."""
    return None if not word else _FINISHES.get(word, FinishReason.STOP)


def models_of(body: bytes, model: str) -> ServerFacts:
    """The content of `/v1/models`; the context is that of `model`.

    Raises:
        msgspec.DecodeError: it is no list of models.
    """
    cards = decode_models(body).data
    lengths = [card.max_model_len for card in cards if card.id == model]
    return ServerFacts(
        models=tuple(card.id for card in cards),
        max_model_len=lengths[0] if lengths else None,
        adapters={card.id: card.root or "" for card in cards if card.parent},
    )


def top_of(found: dict[str, float] | None, num_top: int) -> list[tuple[str, float]]:
    """The `most` likeliest alternatives, best first: servers put the chosen token among them, or the worst
    first.
    """
    ranked = sorted((found or {}).items(), key=lambda item: (-item[1], item[0]))
    return ranked[:num_top]


def token_id_of(name: str) -> int:
    """The id in "token_id:123".

    Raises:
        msgspec.DecodeError: it is something else.
    """
    digits = name.removeprefix(_TOKEN_ID)
    is_number = digits != name and digits.isascii() and digits.isdigit() and len(digits) <= _ID_DIGITS_MAX
    if not is_number or (token_id := int(digits)) > TOKEN_ID_MAX:
        raise msgspec.DecodeError(f"expected a token id, got {name[:32]!r}")
    return token_id


def completion_fields(request: GenerateRequest, model: str) -> dict[str, Any]:
    """The fields of `/v1/completions` that OpenAI defined; those that change nothing are left out."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.presence_penalty:
        fields["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        fields["frequency_penalty"] = sampling.frequency_penalty
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        fields["logprobs"] = sampling.logprobs
    return fields


def text_logprobs(found: CompletionLogprobs | None, num_top: int) -> tuple[TextLogprob, ...]:
    """Log-probabilities of tokens that come as text."""
    if found is None:
        return ()
    tops = found.top_logprobs or [None] * len(found.tokens)
    return tuple(
        TextLogprob(
            token,
            token.encode(errors="replace"),
            value,
            tuple((name, name.encode(errors="replace"), logprob) for name, logprob in top_of(top, num_top)),
        )
        for token, value, top in zip(found.tokens, found.token_logprobs, tops, strict=False)
    )


def _said_once(
    events: Sequence[ChatEvent] | Sequence[CompletionEvent], num_events: int
) -> tuple[list[Any], ReportedUsage | None, str] | None:
    """The choices of an answer's events, what it reports of usage, and its model; None: they are not so many
    events of one model without an error, or something follows the choice with which the answer ends.
    """
    if len(events) != num_events:
        return None
    choices: list[Any] = []
    usage, model = None, events[0].model
    for event in events:
        if event.error is not None or event.object == "error" or event.model != model:
            return None
        usage = event.usage or usage
        if event.choices:
            if choices and choices[-1].finish_reason:
                return None
            choices.append(event.choices[0])
    if not choices or not (finish := choices[-1].finish_reason) or finish in _FAILED:
        return None
    return choices, None if usage is None else _usage_of(usage), model or ""


def _ids_at_once(lines: bytes, num_events: int) -> Piece | None:
    """See `AtOnce`."""
    if (said := _said_once(decode_completion_events(lines), num_events)) is None:
        return None
    choices, usage, model = said
    ids: list[int] = []
    for choice in choices:
        if choice.logprobs is not None or not (choice.token_ids or choice.text == ""):
            return None
        ids += choice.token_ids or ()
    last = choices[-1]
    return Piece(
        token_ids=tuple(ids),
        finish=finish_of(last.finish_reason),
        stop=last.stop_reason,
        usage=usage,
        model=model,
        done=True,
    )


class CompletionReader:
    """Reads a stream of `/v1/completions` that has text, and perhaps token ids and log-probabilities."""

    __slots__ = ("_num_top", "_reports_logprobs")
    is_steady = True
    at_once: AtOnce | None = AtOnce(1024, _ids_at_once)

    def __init__(self, request: GenerateRequest) -> None:
        self._reports_logprobs = request.sampling.logprobs is not None
        self._num_top = request.sampling.logprobs or 0

    def read(self, event: bytes) -> Piece:
        """See `AnswerReader`."""
        found = decode_completion_event(event)
        if (found.error is not None or found.object == "error") and (said := said_by(found)) is not None:
            return Piece(error=said)
        usage = None if found.usage is None else _usage_of(found.usage)
        if not found.choices:
            return Piece(usage=usage, model=found.model or "")
        choice = found.choices[0]
        if choice.finish_reason in _FAILED:
            return Piece(error=SaidError(message=f"it ended the answer with '{choice.finish_reason}'"))
        return self.piece(choice, usage, found.model or "")

    def piece(self, choice: CompletionEventChoice, usage: ReportedUsage | None, model: str) -> Piece:
        """Decode a choice."""
        return Piece(
            token_ids=tuple(choice.token_ids or ()),
            text="" if choice.token_ids else choice.text or "",
            text_logprobs=text_logprobs(choice.logprobs, self._num_top) if self._reports_logprobs else (),
            finish=finish_of(choice.finish_reason) if choice.finish_reason else None,
            stop=choice.stop_reason,
            usage=usage,
            model=model,
        )

    def end(self) -> Piece:
        """See `AnswerReader`."""
        return NOTHING


class TextReader(CompletionReader):
    """Reads a stream that has no ids: its texts are read by what stands around them, so to decode a whole
    answer as one would be in vain.
    """

    __slots__ = ()
    at_once = None


def _chat_at_once(lines: bytes, num_events: int) -> Piece | None:
    """See `AtOnce`."""
    if (said := _said_once(decode_chat_events(lines), num_events)) is None:
        return None
    choices, usage, model = said
    texts: list[str] = []
    for choice in choices:
        if choice.logprobs is not None:
            return None
        if (delta := choice.delta) is not None:
            if delta.tool_calls or delta.reasoning_content or delta.reasoning:
                return None
            if delta.content:
                texts.append(delta.content)
    return Piece(
        text="".join(texts),
        parts=tuple(texts) if len(texts) > 1 else (),
        finish=finish_of(choices[-1].finish_reason),
        usage=usage,
        model=model,
        done=True,
    )


class ChatReader:
    """Reads a stream of `/v1/chat/completions`."""

    __slots__ = ("_num_top",)
    is_steady = True
    at_once = AtOnce(20, _chat_at_once)
    """More of them are cut at what is alike in less time."""

    def __init__(self, request: GenerateRequest) -> None:
        self._num_top = request.sampling.logprobs or 0

    def read(self, event: bytes) -> Piece:
        """See `AnswerReader`."""
        found = decode_chat_event(event)
        if (found.error is not None or found.object == "error") and (said := said_by(found)) is not None:
            return Piece(error=said)
        usage = None if found.usage is None else _usage_of(found.usage)
        if not found.choices:
            return Piece(usage=usage, model=found.model or "")
        choice = found.choices[0]
        delta = choice.delta or AnswerDelta()
        calls, logprobs = delta.tool_calls, choice.logprobs and choice.logprobs.content
        return Piece(
            text=delta.content or "",
            thought=delta.reasoning_content or delta.reasoning or "",
            tool_calls=tuple([_call_piece(call) for call in calls]) if calls else (),
            text_logprobs=tuple([self._logprob(each) for each in logprobs]) if logprobs else (),
            finish=finish_of(choice.finish_reason) if choice.finish_reason else None,
            usage=usage,
            model=found.model or "",
        )

    def end(self) -> Piece:
        """See `AnswerReader`."""
        return NOTHING

    def _logprob(self, found: ContentLogprob) -> TextLogprob:
        top = found.top_logprobs[: self._num_top]
        return TextLogprob(
            found.token,
            _bytes_of(found),
            found.logprob,
            tuple((each.token, _bytes_of(each), each.logprob) for each in top),
        )


class EngineDialect:
    """The common parts of the servers of vLLM, SGLang and TensorRT-LLM: prompts go as token ids, and they say
    what they are.
    """

    health_path = "/health"
    facts_path = "/v1/models"
    needs_facts = True
    sends_chats = False
    has_adapters = False
    resumes = False
    capabilities = COMMON_CAPABILITIES

    def __init__(self, model: str, *, has_priorities: bool) -> None:
        """`has_priorities`: it was started so that its waiting queue goes by priority."""
        self.expects_model = self.listed_model = model
        self._has_priorities = has_priorities

    def facts(self, body: bytes) -> ServerFacts:
        """See `Dialect`."""
        return models_of(body, self.listed_model)

    def token_fields(self, request: GenerateRequest) -> dict[str, Any]:
        """The fields of `/v1/completions` with the prompt's token ids and what engines have beyond OpenAI's
        API.
        """
        sampling = request.sampling
        return completion_fields(request, self.listed_model) | {
            "prompt": request.prompt_token_ids,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,
            "skip_special_tokens": request.skip_special_tokens,
        }


class OpenAIDialect:
    """A provider, or any server that is addressed as one."""

    engine = "openai"
    health_path = ""
    facts_path = "/models"
    needs_facts = False
    sends_chats = True
    has_adapters = False
    resumes = False
    capabilities = (
        ALL_CAPABILITIES
        - VECTOR_CAPABILITIES
        - {
            Capability.ECHO_LOGPROBS,
            Capability.TOKEN_IDS,
        }
    )
    listed_model = ""
    """Not every provider lists every name that it answers to, or has a list at all."""
    expects_model = ""
    """Providers answer with the name of a dated version."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        """`max_model_len` is what its context is taken to be."""
        self._model, self._tokenizer, self._max_model_len = model, tokenizer, max_model_len
        self._stream_fields = {
            "model": _raw(model),
            "stream": _raw(True),
            "stream_options": _raw({"include_usage": True}),
        }

    def facts(self, body: bytes) -> ServerFacts:
        """See `Dialect`."""
        return models_of(body, self._model)

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """See `Dialect`."""
        if not request.is_chat:
            return self._completion(request)
        asked = _decode_fields(request.body)
        fields = {
            name: value
            for name, value in asked.items()
            if name not in _NOT_FORWARDED and bytes(value) != b"null"
        }
        sampling = request.sampling
        if _gives(asked, "max_completion_tokens"):
            fields["max_completion_tokens"] = _raw(sampling.max_tokens)
        elif _gives(asked, "max_tokens") or self._is_limited(request):
            fields["max_tokens"] = _raw(sampling.max_tokens)
        if _gives(asked, "seed"):
            fields["seed"] = _raw(sampling.seed)
        return HttpSubmission("/chat/completions", _encode(fields | self._stream_fields))

    def _is_limited(self, request: GenerateRequest) -> bool:
        """Whether the answer may be less long than the context leaves: a limit that the client did not ask
        for.
        """
        return request.sampling.max_tokens < self._max_model_len - len(request.prompt_token_ids)

    def _completion(self, request: GenerateRequest) -> HttpSubmission:
        refuse(self.engine, echo=request.sampling.prompt_logprobs is not None)
        fields = completion_fields(request, self._model)
        fields["prompt"] = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        asked = _decode_fields(request.body) if request.body else {}
        # Parameters that are the same for every engine go as this server understood them, the rest as it
        # came.
        fields |= {
            name: value
            for name, value in asked.items()
            if name not in fields and name not in _DONE_HERE and _gives(asked, name)
        }
        return HttpSubmission("/completions", _encode(fields))

    def reader(self, request: GenerateRequest) -> CompletionReader | ChatReader:
        """See `Dialect`."""
        return ChatReader(request) if request.is_chat else TextReader(request)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def _gives(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    return name in fields and bytes(fields[name]) != b"null"


def _usage_of(usage: UsageBody) -> ReportedUsage:
    return ReportedUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _call_piece(call: AnswerToolCall) -> ToolCallPiece:
    function = call.function or CalledFunction()
    return ToolCallPiece(
        index=call.index or 0, id=call.id or "", name=function.name or "", arguments=function.arguments or ""
    )


def _bytes_of(found: TopLogprob) -> bytes:
    values: Sequence[int] = found.bytes or ()
    if values and all(0 <= value <= 255 for value in values):
        return bytes(values)
    return found.token.encode(errors="replace")
