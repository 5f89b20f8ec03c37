"""Text Generation Inference: `POST /generate_stream` (its router/src/lib.rs and server.rs, versions 2 and 3).

Prompts go as text, which it tokenizes, adding the tokens that open a text (BOS) itself; answers come one
token at a time with its id and log-probability, and the last event says why it ended and counts. There is no
`[DONE]`.
"""

from typing import Any

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.backends.http.dialects.base import (
    NOTHING,
    HttpSubmission,
    Piece,
    ReportedUsage,
    ServerFacts,
    form_of,
    refuse,
    said_by,
)
from penstock.backends.http.dialects.openai import finish_of
from penstock.protocol.openai import TokenId
from penstock.protocol.server_answers import ErrorEvent
from penstock.text.tokenizer import Tokenizer
from penstock.types import Capability, TokenLogprob

_encode = msgspec.json.Encoder().encode


class _Token(msgspec.Struct):
    id: TokenId
    logprob: float | None = None


class _Details(msgspec.Struct):
    finish_reason: str
    generated_tokens: int
    input_length: int | None = None


class _Event(ErrorEvent, frozen=True, kw_only=True):
    token: _Token | None = None
    top_tokens: list[_Token] = []  # noqa: RUF012 - msgspec copies it.
    details: _Details | None = None


class _Info(msgspec.Struct):
    model_id: str
    max_total_tokens: int | None = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_info = msgspec.json.Decoder(_Info).decode


class TgiReader:
    """Reads one answer's events: one token each."""

    __slots__ = ("_num_top",)
    is_steady = False
    at_once = None

    def __init__(self, request: GenerateRequest) -> None:
        self._num_top = request.sampling.logprobs

    def read(self, event: bytes) -> Piece:
        """See `AnswerReader`."""
        found = _decode(event)
        if (said := said_by(found)) is not None:
            return Piece(error=said)
        if found.token is None:
            raise msgspec.DecodeError("the event has no token")
        details = found.details
        return Piece(
            token_ids=(found.token.id,),
            logprobs=()
            if self._num_top is None
            else (self._logprob(found.token, found.top_tokens, self._num_top),),
            finish=finish_of(details.finish_reason) if details is not None else None,
            usage=_usage(details) if details is not None else None,
            done=details is not None,
        )

    def end(self) -> Piece:
        """See `AnswerReader`."""
        return NOTHING

    def _logprob(self, token: _Token, top: list[_Token], num_top: int) -> TokenLogprob:
        ranked = sorted((-each.logprob, each.id) for each in top if each.logprob is not None)
        return TokenLogprob(
            token.id, token.logprob or 0.0, tuple((token_id, -minus) for minus, token_id in ranked[:num_top])
        )


class TgiDialect:
    """TGI."""

    engine = "tgi"
    health_path = "/health"
    facts_path = "/info"
    needs_facts = True
    sends_chats = False
    has_adapters = False
    resumes = False
    capabilities = frozenset({
        Capability.LOGPROBS, Capability.JSON_OBJECT, Capability.JSON_SCHEMA, Capability.STRUCTURED_OUTPUTS,
        Capability.FORCED_TOOLS,
    })  # fmt: skip
    """Of structured outputs, no `grammar`."""
    listed_model = ""
    """It goes by the name of its checkpoint, which is not the name that anybody asks for."""
    expects_model = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opening = tokenizer.encode("", add_special_tokens=True)
        """The tokens that it puts before every text by itself."""

    def facts(self, body: bytes) -> ServerFacts:
        """See `Dialect`."""
        info = _decode_info(body)
        return ServerFacts(models=(info.model_id,), max_model_len=info.max_total_tokens)

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """See `Dialect`."""
        sampling = request.sampling
        refuse(
            self.engine,
            echo=sampling.prompt_logprobs is not None,
            min_p=sampling.min_p > 0,
            presence_penalty=bool(sampling.presence_penalty),
            logit_bias=bool(sampling.logit_bias),
            min_tokens=bool(sampling.min_tokens),
        )
        parameters: dict[str, Any] = {
            "details": True,
            "max_new_tokens": sampling.max_tokens,
            "do_sample": sampling.temperature > 0,
        }
        if sampling.temperature > 0:  # It refuses 0, and greedy is what is left when nothing is said.
            parameters |= {"temperature": sampling.temperature, "seed": sampling.seed}
            if sampling.top_k:
                parameters["top_k"] = sampling.top_k
            if 0 < sampling.top_p < 1:
                parameters["top_p"] = sampling.top_p
        if sampling.repetition_penalty != 1.0:
            parameters["repetition_penalty"] = sampling.repetition_penalty
        if sampling.frequency_penalty:
            parameters["frequency_penalty"] = sampling.frequency_penalty
        if sampling.logprobs:
            parameters["top_n_tokens"] = sampling.logprobs
        if request.constraint.structured:
            kind, value = form_of(request.constraint)
            parameters["grammar"] = {"type": kind, "value": value}
        return HttpSubmission(
            "/generate_stream", _encode({"inputs": self._text(request), "parameters": parameters})
        )

    def reader(self, request: GenerateRequest) -> TgiReader:
        """See `Dialect`."""
        return TgiReader(request)

    def _text(self, request: GenerateRequest) -> str:
        ids, opening = request.prompt_token_ids, self._opening
        if opening and ids[: len(opening)] == opening:
            ids = ids[len(opening) :]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _usage(details: _Details) -> ReportedUsage:
    return ReportedUsage(prompt_tokens=details.input_length, completion_tokens=details.generated_tokens)
