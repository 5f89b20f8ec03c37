"""SGLang's own API, `POST /generate` (managers/io_struct.py and tokenizer_manager.py, versions 0.4 to 0.5).

Its events carry all tokens so far, or, where the server was started with `--stream-output` or
`--incremental-streaming-output`, the new ones: `meta_info.completion_tokens`, which always counts from the
start, tells which. Of an answer that was broken off, `finish_reason` has a status and a message.
"""

from typing import Any

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.backends.http.dialects.base import (
    NOTHING,
    HttpSubmission,
    Piece,
    ReportedUsage,
    SaidError,
    form_of,
    rest_of,
    said_by,
)
from penstock.backends.http.dialects.openai import EngineDialect
from penstock.kv.hashing import namespace_of
from penstock.protocol.needs import Constraint
from penstock.protocol.openai import TokenId
from penstock.protocol.server_answers import ErrorEvent
from penstock.text.tokenizer import Tokenizer
from penstock.types import COMMON_CAPABILITIES, Capability, FinishReason, TokenLogprob

_encode = msgspec.json.Encoder().encode
_Logprob = tuple[float | None, TokenId, str | None]


class _FinishReason(msgspec.Struct):
    type: str
    matched: TokenId | str | None = None
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    input_token_logprobs: list[_Logprob] | None = None
    input_top_logprobs: list[list[_Logprob] | None] | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None


class _Event(ErrorEvent, frozen=True, kw_only=True):
    text: str | None = None
    output_ids: list[TokenId] | None = None
    meta_info: _MetaInfo | None = None


_decode = msgspec.json.Decoder(_Event).decode


class SglangReader:
    """Reads one answer's events, whichever of the two kinds they are."""

    __slots__ = ("_num_prompt_top", "_num_seen", "_num_top", "_text_seen")
    is_steady = False
    at_once = None

    def __init__(self, request: GenerateRequest) -> None:
        self._num_top, self._num_prompt_top = request.sampling.logprobs, request.sampling.prompt_logprobs
        self._num_seen = 0
        self._text_seen = ""

    def read(self, event: bytes) -> Piece:
        """See `AnswerReader`."""
        found = _decode(event)
        if (said := said_by(found)) is not None:
            return Piece(error=said)
        if found.meta_info is None:
            raise msgspec.DecodeError("the event has no meta_info")
        meta = found.meta_info
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            return Piece(error=SaidError(message=reason.message or "aborted", status=reason.status_code))
        ids = self._new_ids(found.output_ids, meta.completion_tokens)
        finish = None
        if reason is not None:
            finish = FinishReason.LENGTH if reason.type == "length" else FinishReason.STOP
        return Piece(
            token_ids=ids,
            text="" if found.output_ids is not None else self._new_text(found.text or ""),
            logprobs=self._logprobs(meta, len(ids)),
            prompt_logprobs=self._prompt_logprobs(meta),
            finish=finish,
            stop=reason.matched if reason is not None else None,
            usage=None if finish is None else _usage(meta),
            done=finish is not None,
        )

    def end(self) -> Piece:
        """See `AnswerReader`."""
        return NOTHING

    def _new_ids(self, ids: list[int] | None, count: int) -> tuple[int, ...]:
        if ids is None:
            return ()
        new = count - self._num_seen
        if new < 0 or len(ids) not in (count, new):
            raise msgspec.DecodeError(
                f"{len(ids)} tokens, where {count} in all and {new} new ones are reported"
            )
        self._num_seen = count
        return tuple(ids[len(ids) - new :])

    def _new_text(self, text: str) -> str:
        """Of a server that has no ids, whose text is all so far or what is new."""
        if text.startswith(self._text_seen) and len(text) >= len(self._text_seen):
            new, self._text_seen = text[len(self._text_seen) :], text
            return new
        self._text_seen += text
        return text

    def _logprobs(self, meta: _MetaInfo, num_new: int) -> tuple[TokenLogprob, ...]:
        found = meta.output_token_logprobs
        if self._num_top is None or not found or not num_new:
            return ()
        tops = (meta.output_top_logprobs or [])[-num_new:] or [None] * num_new
        if len(found) < num_new or len(tops) != num_new:
            raise msgspec.DecodeError("the lists of log-probabilities do not fit the tokens")
        return tuple(
            _logprob(each, top, self._num_top) for each, top in zip(found[-num_new:], tops, strict=True)
        )

    def _prompt_logprobs(self, meta: _MetaInfo) -> tuple[TokenLogprob, ...]:
        """Every event repeats them; they are wanted once."""
        found, num_top = meta.input_token_logprobs, self._num_prompt_top
        if num_top is None or not found:
            return ()
        self._num_prompt_top = None
        tops = meta.input_top_logprobs or [None] * len(found)
        if len(tops) != len(found):
            raise msgspec.DecodeError("the lists of the prompt's log-probabilities do not fit each other")
        return tuple(_logprob(each, top, num_top) for each, top in list(zip(found, tops, strict=True))[1:])


class SglangDialect(EngineDialect):
    """SGLang. `has_priorities`: it was started with `--enable-priority-scheduling`."""

    engine = "sglang"
    resumes = True
    capabilities = COMMON_CAPABILITIES | {
        Capability.JSON_OBJECT, Capability.JSON_SCHEMA, Capability.STRUCTURED_OUTPUTS, Capability.GRAMMARS,
        Capability.FORCED_TOOLS,
    }  # fmt: skip

    def __init__(self, model: str, tokenizer: Tokenizer, *, has_priorities: bool) -> None:
        super().__init__(model, has_priorities=has_priorities)
        self.expects_model = ""  # Answers do not name the model; the list of models does.
        self._eos_ids = frozenset(tokenizer.eos_ids)

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """See `Dialect`."""
        request = rest_of(request, keeps_seed=True)
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "min_new_tokens": sampling.min_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            # With it no stop token is looked at, so it is set only if EOS is none. Others are watched for
            # here too.
            "ignore_eos": self._eos_ids.isdisjoint(sampling.stop_token_ids),
            "skip_special_tokens": request.skip_special_tokens,
        }
        if sampling.temperature > 0:
            params["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            params["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
        if request.constraint.structured:
            params |= _grammar(request.constraint)
        fields: dict[str, Any] = {
            "input_ids": request.prompt_token_ids,
            "sampling_params": params,
            "rid": request.request_id,
            "stream": True,
        }
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            start = 0 if sampling.prompt_logprobs is not None else -1
            num_top = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
            fields |= {"return_logprob": True, "top_logprobs_num": num_top, "logprob_start_len": start}
        if request.cache_salt:
            fields["extra_key"] = namespace_of(request.cache_salt)
        if self._has_priorities and request.priority:
            fields["priority"] = -request.priority  # Its larger numbers go first by default.
        return HttpSubmission("/generate", _encode(fields))

    def reader(self, request: GenerateRequest) -> SglangReader:
        """See `Dialect`."""
        return SglangReader(request)


def _grammar(constraint: Constraint) -> dict[str, str]:
    """Its words for what the answer must look like; a schema goes as text."""
    kind, value = form_of(constraint)
    if kind == "json":
        return {"json_schema": _encode(value).decode()}
    return {"ebnf" if kind == "grammar" else "regex": value}


def _usage(meta: _MetaInfo) -> ReportedUsage:
    return ReportedUsage(
        prompt_tokens=meta.prompt_tokens,
        completion_tokens=meta.completion_tokens,
        cached_tokens=meta.cached_tokens,
    )


def _logprob(found: _Logprob, top: list[_Logprob] | None, num_top: int) -> TokenLogprob:
    value, token_id, _ = found
    if value is None:
        raise msgspec.DecodeError("a token has no log-probability")
    ranked = sorted((-(each[0] or 0.0), each[1]) for each in top or () if each[0] is not None)
    return TokenLogprob(token_id, value, tuple((other, -minus) for minus, other in ranked[:num_top]))
