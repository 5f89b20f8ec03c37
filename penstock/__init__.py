"""Penstock: an LLM serving platform that keeps overload boring.

The library's names (`from penstock import LLM, SamplingParams`) are imported when they are asked for: the
package itself costs every process next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.offline.async_llm import AsyncEngineArgs, AsyncLLM
    from penstock.offline.llm import LLM
    from penstock.offline.outputs import CompletionOutput, Logprob, RequestOutput, ScoringRequestOutput
    from penstock.offline.params import (
        GuidedDecodingParams,
        LoRARequest,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from penstock.offline.prompts import TextPrompt, TokensPrompt
    from penstock.offline.vectors import EmbeddingRequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
_ROOMS = {
    "LLM": "llm",
    "AsyncEngineArgs": "async_llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
    "EmbeddingRequestOutput": "vectors",
}
"""Where in `penstock.offline` each is; the others are in `params`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    return getattr(import_module(f"penstock.offline.{_ROOMS.get(name, 'params')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
