"""TensorRT-LLM's server, `trtllm-serve` (its serve/openai_protocol.py, versions 0.17 to 1.2).

It forbids fields that it does not know. With `detokenize` off it answers with token ids instead of text. It has no cache
salt for plain completions: its KV cache is shared by all tenants (docs/backends.md says what that means).
"""

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.backends.dialect import Submission, WorkerFacts, refuse
from penstock.backends.openai import CompletionReader, completion_fields, models_of

_encode = msgspec.json.Encoder().encode


class TrtllmDialect:
    """TensorRT-LLM."""

    engine = "trtllm"
    health_path = "/health"
    facts_path = "/v1/models"
    needs_facts = True
    sends_chats = False

    def __init__(self, model: str, *, has_priorities: bool) -> None:
        """`has_priorities`: its waiting queue goes by priority."""
        self.expects_model = self.listed_model = model
        self._has_priorities = has_priorities

    def facts(self, body: bytes) -> WorkerFacts:
        """See `Dialect`."""
        return models_of(body, self.expects_model)

    def submission(self, request: GenerateRequest) -> Submission:
        """See `Dialect`."""
        sampling = request.sampling
        refuse(self.engine, echo=sampling.prompt_logprobs is not None)
        fields = completion_fields(request, self.expects_model) | {
            "prompt": request.prompt_token_ids,
            "detokenize": False,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,
            "skip_special_tokens": request.skip_special_tokens,
        }
        if sampling.logprobs is not None:
            fields["logprobs"] = max(1, sampling.logprobs)  # 0 means none to it.
        if self._has_priorities and request.priority:
            # Ours goes down to the most urgent, its own up to 1 from 0.
            fields["priority"] = min(1.0, max(0.0, 0.5 - request.priority / 100))
        return Submission("/v1/completions", _encode(fields))

    def reader(self, request: GenerateRequest) -> CompletionReader:
        """See `Dialect`."""
        return CompletionReader(request)
