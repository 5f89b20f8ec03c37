"""vLLM's OpenAI server, by what it has beyond OpenAI's API (its entrypoints/openai, versions 0.10 to 0.32).

Prompts go and answers come as token ids (`return_token_ids`), so neither side tokenizes the other's text.
Tokens that log-probabilities name are ids too (`return_tokens_as_token_ids`). Stop tokens are given one by
one with `ignore_eos`, for whether EOS ends an answer was decided by the gateway.
"""

from typing import Any

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.backends.http.dialects.base import HttpSubmission, Piece, ReportedUsage, rest_of
from penstock.backends.http.dialects.openai import (
    CompletionReader,
    EngineDialect,
    finish_of,
    token_id_of,
    top_of,
)
from penstock.kv.hashing import namespace_of
from penstock.protocol.openai import CompletionLogprobs
from penstock.protocol.server_answers import CompletionEventChoice
from penstock.types import COMMON_CAPABILITIES, Capability, TokenLogprob

_encode = msgspec.json.Encoder().encode
_PATH = "/v1/completions"
_OWN = "max_tokens", "seed", "prompt", "request_id"
"""Fields that are a request's own."""
_BODIES_MAX = 256


class VllmReader(CompletionReader):
    """Reads token ids, and log-probabilities by id; with an echo, the prompt's own first."""

    __slots__ = ("_answer_limit", "_echoes", "_num_prompt", "_num_prompt_top")

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self._answer_limit, self._num_prompt_top = request.sampling.logprobs, request.sampling.prompt_logprobs
        self._num_prompt = len(request.prompt_token_ids)
        self._echoes = self._num_prompt_top is not None

    def piece(self, choice: CompletionEventChoice, usage: ReportedUsage | None, model: str) -> Piece:
        """Decode a choice."""
        ids = tuple(choice.token_ids or ())
        prompt: tuple[TokenLogprob, ...] = ()
        answer: tuple[TokenLogprob, ...] = ()
        if choice.logprobs is not None and choice.logprobs.tokens:
            num_prompt = self._num_prompt if self._echoes else 0
            self._echoes = False
            # The first token of a prompt has nothing before it, and no log-probability.
            prompt = _logprobs(choice.logprobs, 1, num_prompt, self._num_prompt_top or 0)
            if self._answer_limit is not None:
                answer = _logprobs(
                    choice.logprobs, num_prompt, len(choice.logprobs.tokens), self._answer_limit
                )
            ids = ids or tuple(each.token_id for each in answer)
            if answer and len(answer) != len(ids):
                raise msgspec.DecodeError(f"{len(answer)} log-probabilities of {len(ids)} tokens")
        return Piece(
            token_ids=ids,
            text="" if ids or choice.token_ids is not None else choice.text or "",
            logprobs=answer,
            prompt_logprobs=prompt,
            finish=finish_of(choice.finish_reason),
            stop=choice.stop_reason,
            usage=usage,
            model=model,
        )


class VllmDialect(EngineDialect):
    """vLLM. `has_priorities`: it was started with `--scheduling-policy priority`; without it refuses them."""

    engine = "vllm"
    has_adapters = True
    resumes = True
    capabilities = COMMON_CAPABILITIES | {
        Capability.JSON_OBJECT, Capability.JSON_SCHEMA, Capability.STRUCTURED_OUTPUTS, Capability.GRAMMARS,
        Capability.FORCED_TOOLS, Capability.BAD_WORDS, Capability.ALLOWED_TOKEN_IDS, Capability.TOKEN_IDS,
    }  # fmt: skip

    def __init__(self, model: str, *, has_priorities: bool) -> None:
        """`has_priorities`: see `EngineDialect`."""
        super().__init__(model, has_priorities=has_priorities)
        self._bodies: dict[tuple[object, ...], bytes] = {}
        """Beginnings of plain requests' bodies, by all that is in them: they come again and again."""

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """See `Dialect`."""
        sampling, constraint = request.sampling, request.constraint
        if request.resumed or sampling.prompt_logprobs is not None or sampling.logit_bias:
            return self._submission(request)
        if constraint.structured or constraint.fields or (self._has_priorities and request.priority):
            return self._submission(request)
        key = (
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.presence_penalty,
            sampling.frequency_penalty, sampling.repetition_penalty, sampling.min_tokens, sampling.logprobs,
            sampling.stop_token_ids, request.skip_special_tokens, request.adapter, request.cache_salt,
        )  # fmt: skip
        begins = self._bodies.get(key)
        if begins is None:
            fields = self._fields(request)
            for name in _OWN:
                del fields[name]
            if len(self._bodies) >= _BODIES_MAX:
                self._bodies.clear()
            begins = self._bodies[key] = _encode(fields)[:-1]
        own = (
            sampling.max_tokens,
            sampling.seed,
            _encode(request.prompt_token_ids),
            _encode(request.request_id),
        )
        return HttpSubmission(
            _PATH, b'%b,"max_tokens":%d,"seed":%d,"prompt":%b,"request_id":%b}' % (begins, *own)
        )

    def _submission(self, request: GenerateRequest) -> HttpSubmission:
        return HttpSubmission(_PATH, _encode(self._fields(rest_of(request))))

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        fields = self.token_fields(request) | {
            "request_id": request.request_id,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if sampling.prompt_logprobs is not None:
            # Streams have no `prompt_logprobs`, but an echo has them in its first event.
            fields |= {"echo": True, "logprobs": max(sampling.prompt_logprobs, sampling.logprobs or 0)}
        constraint = request.constraint
        if constraint.structured:
            fields["structured_outputs"] = constraint.structured
        fields |= constraint.fields
        if request.adapter:
            fields["model"] = request.adapter
        if request.cache_salt:
            fields["cache_salt"] = namespace_of(request.cache_salt)
        if self._has_priorities and request.priority:
            fields["priority"] = request.priority
        return fields

    def reader(self, request: GenerateRequest) -> VllmReader:
        """See `Dialect`."""
        return VllmReader(request)


def _logprobs(found: CompletionLogprobs, start: int, end: int, num_top: int) -> tuple[TokenLogprob, ...]:
    tops = found.top_logprobs or [None] * len(found.tokens)
    if not len(found.tokens) == len(found.token_logprobs) == len(tops) >= end:
        raise msgspec.DecodeError("the lists of log-probabilities do not fit each other")
    made: list[TokenLogprob] = []
    for i in range(start, end):
        value = found.token_logprobs[i]
        if value is None:
            raise msgspec.DecodeError("a token has no log-probability")
        top = tuple((token_id_of(name), logprob) for name, logprob in top_of(tops[i], num_top))
        made.append(TokenLogprob(token_id_of(found.tokens[i]), value, top))
    return tuple(made)
