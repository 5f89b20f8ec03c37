"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence

from penstock.backends.base import TextLogprob
from penstock.protocol.openai import ChatLogprobs, CompletionLogprobs, ContentLogprob, TopLogprob

LOWEST = -9999.0
"""What OpenAI writes for a probability of zero, which JSON has no logarithm of."""


def chat_logprobs(logprobs: Sequence[TextLogprob]) -> ChatLogprobs:
    """`choices[].logprobs` of a chat answer or chunk."""
    return ChatLogprobs(
        [
            ContentLogprob(
                token=item.token,
                logprob=max(item.logprob, LOWEST),
                bytes=list(item.token_bytes),
                top_logprobs=[TopLogprob(t, max(p, LOWEST), list(b)) for t, b, p in item.top],
            )
            for item in logprobs
        ]
    )


def completion_logprobs(logprobs: Sequence[TextLogprob], offset: int) -> CompletionLogprobs:
    """`choices[].logprobs` of a plain completion; the first token stands at character `offset`."""
    offsets: list[int] = []
    for item in logprobs:
        offsets.append(offset)
        offset += len(item.token)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[max(item.logprob, LOWEST) for item in logprobs],
        tokens=[item.token for item in logprobs],
        top_logprobs=[{t: max(p, LOWEST) for t, _, p in item.top} for item in logprobs],
    )
