"""NVIDIA's servers. Triton Inference Server's generate extension over HTTP (its
docs/protocol/extension_generate.md):

    POST /v2/models/{model}/generate_stream   {"id", "text_input", "parameters": {...}}
    data: {"model_name", "model_version", "text_output"}     each a further piece of the answer

The inputs that a model takes beside `text_input` are the model's own business: `parameters` go to its inputs
of that name, or to its request parameters. The names sent here are those of its TensorRT-LLM and vLLM
backends. Answers are text alone, and neither say why they ended nor count, unless the model has outputs
`finish_reason`, `num_output_tokens` and `num_input_tokens`, as the vLLM backend can. Otherwise the end of the
stream is the end of the answer.

And TensorRT-LLM's server, `trtllm-serve` (its serve/openai_protocol.py, versions 0.17 to 1.2), which speaks
OpenAI's API. It forbids fields that it does not know. With `detokenize` off it answers with token ids instead
of text. It has no cache salt for plain completions: its KV cache is shared by all tenants (docs/backends.md
says what that means).
"""

from typing import Any
from urllib.parse import quote

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.backends.http.dialects.base import (
    HttpSubmission,
    Piece,
    ReportedUsage,
    ServerFacts,
    refuse,
    said_by,
)
from penstock.backends.http.dialects.openai import CompletionReader, EngineDialect, finish_of
from penstock.protocol.server_answers import ErrorEvent
from penstock.text.tokenizer import Tokenizer
from penstock.types import COMMON_CAPABILITIES, Capability, FinishReason

_encode = msgspec.json.Encoder().encode


class _Event(ErrorEvent, frozen=True, kw_only=True):
    model_name: str | None = None
    text_output: str | None = None
    finish_reason: str | None = None
    num_output_tokens: int | None = None
    num_input_tokens: int | None = None


class _Metadata(msgspec.Struct):
    name: str


_decode = msgspec.json.Decoder(_Event).decode
_decode_metadata = msgspec.json.Decoder(_Metadata).decode


class TritonReader:
    """Reads pieces of text until the stream ends."""

    __slots__ = ("_finish", "_num_tokens")
    is_steady = False
    at_once = None

    def __init__(self) -> None:
        self._num_tokens = 0
        self._finish: FinishReason | None = None

    def read(self, event: bytes) -> Piece:
        """See `AnswerReader`."""
        found = _decode(event)
        if (said := said_by(found)) is not None:
            return Piece(error=said)
        if found.text_output is None:
            raise msgspec.DecodeError("the event has no text_output")
        self._finish = finish_of(found.finish_reason) or self._finish
        usage = None
        if found.num_output_tokens is not None:
            self._num_tokens += found.num_output_tokens
            usage = ReportedUsage(prompt_tokens=found.num_input_tokens, completion_tokens=self._num_tokens)
        return Piece(text=found.text_output, usage=usage, model=found.model_name or "")

    def end(self) -> Piece:
        """See `AnswerReader`."""
        return Piece(finish=self._finish, ends=True, done=True)


class TritonDialect:
    """Triton."""

    engine = "triton"
    needs_facts = True
    sends_chats = False
    has_adapters = False
    resumes = False
    capabilities = COMMON_CAPABILITIES - {
        Capability.LOGPROBS,
        Capability.ECHO_LOGPROBS,
        Capability.LOGIT_BIAS,
    }

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self.expects_model = self.listed_model = model
        self.facts_path = f"/v2/models/{quote(model, safe='')}"
        self.health_path = f"{self.facts_path}/ready"
        self._tokenizer = tokenizer

    def facts(self, body: bytes) -> ServerFacts:
        """See `Dialect`."""
        return ServerFacts(models=(_decode_metadata(body).name,))

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """See `Dialect`."""
        sampling = request.sampling
        refuse(
            self.engine,
            echo=sampling.prompt_logprobs is not None,
            logprobs=sampling.logprobs is not None,
            logit_bias=bool(sampling.logit_bias),
        )
        parameters: dict[str, Any] = {
            "stream": True,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.temperature > 0:
            parameters["seed"] = sampling.seed
        usual = {
            "top_p": (sampling.top_p, 1.0),
            "top_k": (sampling.top_k, 0),
            "min_p": (sampling.min_p, 0.0),
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "presence_penalty": (sampling.presence_penalty, 0.0),
            "frequency_penalty": (sampling.frequency_penalty, 0.0),
            "min_tokens": (sampling.min_tokens, 0),
        }
        parameters |= {name: value for name, (value, nothing) in usual.items() if value != nothing}
        text = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        fields = {"id": request.request_id, "text_input": text, "parameters": parameters}
        return HttpSubmission(f"{self.facts_path}/generate_stream", _encode(fields))

    def reader(self, request: GenerateRequest) -> TritonReader:
        """See `Dialect`."""
        return TritonReader()


class TrtllmDialect(EngineDialect):
    """TensorRT-LLM."""

    engine = "trtllm"
    capabilities = COMMON_CAPABILITIES - {Capability.ECHO_LOGPROBS}

    def submission(self, request: GenerateRequest) -> HttpSubmission:
        """See `Dialect`."""
        sampling = request.sampling
        refuse(self.engine, echo=sampling.prompt_logprobs is not None)
        fields = self.token_fields(request) | {"detokenize": False}
        if sampling.logprobs is not None:
            fields["logprobs"] = max(1, sampling.logprobs)  # 0 means none to it.
        if self._has_priorities and request.priority:
            # Ours goes down to the most urgent, its own up to 1 from 0.
            fields["priority"] = min(1.0, max(0.0, 0.5 - request.priority / 100))
        return HttpSubmission("/v1/completions", _encode(fields))

    def reader(self, request: GenerateRequest) -> CompletionReader:
        """See `Dialect`."""
        return CompletionReader(request)
