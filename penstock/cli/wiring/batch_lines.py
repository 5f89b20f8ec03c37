"""The lines of `penstock generate`: what each asks for, and how its answer is written.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}   OpenAI's batch files
    {"prompt": "...", "max_tokens": 8}    or "messages", or "prompt_token_ids"; the rest are parameters

An OpenAI line means what the server would make of its body, and its answer is the server's; what takes more
than one pass of text through a model (tools, streams, several prompts) is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.backends.base import TextLogprob, to_text_logprob
from penstock.config.flow import LimitsConfig
from penstock.errors import InvalidRequest, NotFound, PenstockError, Unsupported
from penstock.gateway.http.errors import error_answer, status_of
from penstock.gateway.relay.relay import chat_logprobs, completion_logprobs
from penstock.offline.llm import LLM, PendingCall
from penstock.offline.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from penstock.offline.params import LoRARequest, SamplingParams, StructuredOutputsParams
from penstock.offline.prompts import ChatOptions
from penstock.protocol.needs import constraint_of, rare_needs, unsupported
from penstock.protocol.openai import (
    AnswerMessage,
    CachedTokens,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
    ErrorAnswer,
    GenerationRequest,
    UsageBody,
)
from penstock.protocol.openai_validate import parse_chat, parse_completion, prompts_of
from penstock.rng import SEED_BITS, IdSource, stream
from penstock.types import TokenLogprob

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
COMPLETION_MAX_TOKENS = 16
"""As at OpenAI, where a plain completion does not say."""
_REFUSED = (
    "tools", "prompt_logprobs", "return_token_ids", "reasoning_effort", "thinking_token_budget", "echo",
)  # fmt: skip
"""Parameters of a server's answers that the library has not."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens", "include_stop_str_in_output",
    "skip_special_tokens", "bad_words", "allowed_token_ids", "truncate_prompt_tokens",
)  # fmt: skip
"""Parameters of a body that mean the same to the library."""


class _OpenAILine(msgspec.Struct, frozen=True):
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Id(msgspec.Struct, frozen=True):
    custom_id: str | int | None = None


@dataclass(slots=True, frozen=True)
class BatchLine:
    """One line of the input."""

    custom_id: str
    """Its own, or `line-NUMBER`."""
    model: str = ""
    url: str = ""
    """Of the endpoint; empty for a line that is no request to OpenAI."""
    num_top: int = 0
    """Alternatives to show beside each token."""


def id_of(data: bytes, number: int) -> str:
    """The id of a line, whatever else it says."""
    try:
        found = msgspec.json.decode(data, type=_Id).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    return f"line-{number}" if found in (None, "") else str(found)


class BatchReader:
    """Turns lines into what an `LLM` is asked."""

    def __init__(self, llm: LLM, adapters: Mapping[str, str]) -> None:
        """`adapters`: paths by the names under which lines ask for them."""
        self._llm, self._maker = llm, llm.prompts
        self._name = str(llm.settings.name)
        self._adapters = {name: LoRARequest(name, 0, path) for name, path in adapters.items()}
        self._limits = LimitsConfig()

    def read(self, data: bytes, custom_id: str) -> tuple[BatchLine, PendingCall]:
        """One line.

        Raises:
            PenstockError: what is wrong with it.
        """
        try:
            found: Any = msgspec.json.decode(data)
            if not isinstance(found, dict):
                raise InvalidRequest("A line must be a JSON object.", code="invalid_json")
            if "body" in found or "url" in found:
                return self._openai(msgspec.json.decode(data, type=_OpenAILine), custom_id)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The line is not a request: {error}.", code="invalid_json") from None
        return self._simple({str(name): value for name, value in found.items()}, custom_id)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    def _simple(self, found: dict[str, Any], custom_id: str) -> tuple[BatchLine, PendingCall]:
        found.pop("custom_id", None)
        lora = self._lora(found.pop("model", self._name))
        messages = found.pop("messages", None)
        given = {name: found.pop(name) for name in ("prompt", "prompt_token_ids") if name in found}
        if (messages is None) == (not given):
            raise InvalidRequest("A line has a 'prompt', 'prompt_token_ids' or 'messages'.", param="prompt")
        if unknown := found.keys() - {*_SAMPLING, "max_tokens", "logprobs", "structured_outputs"}:
            raise InvalidRequest(f"'{min(unknown)}' is no sampling parameter.", param=min(unknown))
        if (structured := found.get("structured_outputs")) is not None:
            found["structured_outputs"] = _structured(structured)
        params = self._params(found, custom_id)
        prompt = self._maker.plain(given) if messages is None else self._maker.chat(messages, ChatOptions())
        return BatchLine(custom_id), PendingCall(prompt, params, lora)

    def _openai(self, line: _OpenAILine, custom_id: str) -> tuple[BatchLine, PendingCall]:
        if line.method != "POST" or line.url not in (CHAT_URL, COMPLETION_URL):
            raise InvalidRequest(
                f"'{line.method[:16]} {line.url[:64]}' is not supported: POST {CHAT_URL} and "
                f"{COMPLETION_URL} are.",
                param="url",
            )
        body, is_chat = bytes(line.body), line.url == CHAT_URL
        parse = parse_chat if is_chat else parse_completion
        request: GenerationRequest = parse(body, self._limits)
        self._refuse(request)
        lora = self._lora(request.model)
        given = {name: value for name in _SAMPLING if (value := getattr(request, name, None)) is not None}
        if request.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in request.logit_bias.items()}
        if structured := constraint_of(request).structured:
            given["structured_outputs"] = _structured(structured)
        if isinstance(request, ChatRequest):
            given["max_tokens"] = request.max_completion_tokens or request.max_tokens
            given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
            prompt = self._maker.chat(
                [msgspec.to_builtins(message) for message in request.messages], _options(request)
            )
        else:
            assert isinstance(request, CompletionRequest), "there are two"
            given["max_tokens"] = request.max_tokens or COMPLETION_MAX_TOKENS
            given["logprobs"] = request.logprobs
            (text,) = _one_prompt(request)
            prompt = self._maker.plain(text)
            if request.max_tokens is None:
                room = self._llm.max_model_len - len(prompt.token_ids)
                given["max_tokens"] = max(1, min(COMPLETION_MAX_TOKENS, room))
        asked = BatchLine(custom_id, request.model, line.url, given["logprobs"] or 0)
        return asked, PendingCall(prompt, self._params(given, custom_id), lora)

    def _refuse(self, request: GenerationRequest) -> None:
        for name in _REFUSED:
            value = getattr(request, name, None)
            if value and not (name == "tools" and getattr(request, "tool_choice", None) == "none"):
                raise Unsupported(f"'{name}' is not supported by `penstock generate`.", param=name)
        if request.stream:
            raise Unsupported("'stream' is not supported in a batch.", param="stream")
        if request.max_tokens == 0:
            raise Unsupported("'max_tokens' 0 is not supported by `penstock generate`.", param="max_tokens")
        needs = rare_needs(request)
        if lacking := {need.capability for need in needs} - self._llm.capabilities:
            raise unsupported(needs, frozenset(lacking), self._name)

    def _params(self, given: dict[str, Any], custom_id: str) -> SamplingParams:
        """The checkpoint's recommended parameters, overridden by those given.

        A seed that is not said is the line's own, so that one that is tried again has the same answer.
        """
        params = self._llm.get_default_sampling_params()
        params.seed = stream(self._llm.settings.seed, f"line/{custom_id}").getrandbits(SEED_BITS)
        for name, value in given.items():
            setattr(params, name, value)
        params.check()
        return params

    def _lora(self, model: object) -> LoRARequest | None:
        if model == self._name:
            return None
        if isinstance(model, str) and model in self._adapters:
            return self._adapters[model]
        known = ", ".join(f"'{name}'" for name in (self._name, *self._adapters))
        raise NotFound(
            f"The model '{str(model)[:64]}' does not exist. Here is {known}; --name calls the model "
            "as the lines do.",
            param="model",
            code="model_not_found",
        )


def _one_prompt(request: CompletionRequest) -> list[Any]:
    prompts = prompts_of(request)
    if len(prompts) != 1:
        raise Unsupported("A line has one prompt: several are several lines.", param="prompt")
    return list(prompts)


def _options(request: ChatRequest) -> ChatOptions:
    return ChatOptions(
        add_generation_prompt=getattr(request, "add_generation_prompt", None) is not False,
        continue_final_message=getattr(request, "continue_final_message", None) is True,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _structured(form: object) -> StructuredOutputsParams:
    try:
        return msgspec.convert(form, type=StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid 'structured_outputs': {error}.", param="structured_outputs") from None


class BatchWriter:
    """Writes what became of lines."""

    def __init__(self, llm: LLM, created_s: int) -> None:
        self._llm, self._created_s, self._ids = llm, created_s, IdSource()

    def failed(self, line: BatchLine, error: PenstockError) -> bytes:
        """A line that has no answer."""
        status, answer = status_of(error), ErrorAnswer(error_answer(error))
        if not line.url:
            found = {"custom_id": line.custom_id, "status_code": status, "error": answer.error}
            return msgspec.json.encode(found) + b"\n"
        return self._response(line, status, answer)

    def answered(self, line: BatchLine, output: RequestOutput) -> bytes:
        """A line's answer."""
        usage = UsageBody(
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=sum(len(each.token_ids) for each in output.outputs),
            total_tokens=len(output.prompt_token_ids) + sum(len(each.token_ids) for each in output.outputs),
            prompt_tokens_details=CachedTokens(output.num_cached_tokens),
        )
        if not line.url:
            choices = [_plain(each) for each in output.outputs]
            shown: dict[str, Any] = choices[0] if len(choices) == 1 else {"choices": choices}
            return msgspec.json.encode({"custom_id": line.custom_id, **shown, "usage": usage}) + b"\n"
        is_chat = line.url == CHAT_URL
        kind, make = (ChatAnswer, self._chat_choice) if is_chat else (CompletionAnswer, self._choice)
        body = kind(
            id=self._ids.take("chatcmpl" if is_chat else "cmpl"),
            object="chat.completion" if is_chat else "text_completion",
            created=self._created_s,
            model=line.model,
            system_fingerprint=f"fp_{self._llm.identity[:10]}",
            choices=[make(each, line.num_top) for each in output.outputs],  # pyright: ignore[reportArgumentType] - of its kind.
            usage=usage,
        )
        return self._response(line, 200, body)

    def _response(self, line: BatchLine, status: int, body: msgspec.Struct) -> bytes:
        request_id = self._ids.take("req")
        response = {"status_code": status, "request_id": request_id, "body": body}
        found = {
            "id": IdSource.renamed(request_id, "batch_req_"),
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        return msgspec.json.encode(found) + b"\n"

    def _chat_choice(self, answer: CompletionOutput, num_top: int) -> ChatChoice:
        shown = self._shown(answer, num_top)
        return ChatChoice(
            index=answer.index,
            message=AnswerMessage(content=answer.text, refusal=None),
            logprobs=None if shown is None else chat_logprobs(shown),
            finish_reason=answer.finish_reason or "",
        )

    def _choice(self, answer: CompletionOutput, num_top: int) -> CompletionChoice:
        shown = self._shown(answer, num_top)
        return CompletionChoice(
            index=answer.index,
            text=answer.text,
            logprobs=None if shown is None else completion_logprobs(shown, 0),
            finish_reason=answer.finish_reason or "",
        )

    def _shown(self, answer: CompletionOutput, num_top: int) -> list[TextLogprob] | None:
        if answer.logprobs is None:
            return None
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        return [
            to_text_logprob(_ranked(i, found, num_top), self._llm.prompts.tokenizer) for i, found in pairs
        ]


def _ranked(token_id: int, found: TokenLogprobs, num_top: int) -> TokenLogprob:
    """A token and the likeliest in its place, best first."""
    top = sorted((each.rank or 0, i, each.logprob) for i, each in found.items() if each.rank)
    own = found[token_id]
    best = tuple((i, logprob) for rank, i, logprob in top if rank <= num_top)
    return TokenLogprob(token_id, own.logprob, best, own.rank or 0)


def _plain(answer: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        found |= {"token_ids": answer.token_ids, "token_logprobs": [by_id[i].logprob for i, by_id in pairs]}
    return found
