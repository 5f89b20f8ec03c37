"""TensorRT-LLM's server, `trtllm-serve` (its serve/openai_protocol.py, versions 0.17 to 1.2).

It forbids fields that it does not know. With `detokenize` off it answers with token ids instead of text. It
has no cache salt for plain completions: its KV cache is shared by all tenants (docs/backends.md says what
that means).
"""

import msgspec

from penstock.backends.base import GenerateRequest
from penstock.backends.http.dialects.base import HttpSubmission, refuse
from penstock.backends.http.dialects.openai import CompletionReader, EngineDialect
from penstock.types import COMMON_CAPABILITIES, Capability

_encode = msgspec.json.Encoder().encode


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
