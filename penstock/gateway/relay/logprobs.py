"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.backends.base import TextLogprob
from penstock.protocol.openai import ChatLogprobs, CompletionLogprobs, ContentLogprob, TopLogprob

LOWEST = -9999.0
"""What OpenAI writes for a probability of zero, which JSON has no logarithm of."""


@dataclass(slots=True, frozen=True)
class Echo:
    """What is shown of a prompt in front of its answers."""

    text: str = ""
    first: TextLogprob | None = None
    """The prompt's first token, where log-probabilities are shown too: it has none, and those that follow
    do."""


def chat_logprobs(logprobs: Sequence[TextLogprob]) -> ChatLogprobs:
    """`choices[].logprobs` of a chat answer or chunk."""
    return ChatLogprobs(
        [
            ContentLogprob(
                token=item.token,
                logprob=_shown(item.logprob),
                bytes=list(item.token_bytes),
                top_logprobs=[TopLogprob(t, _shown(p), list(b)) for t, b, p in item.top],
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
        token_logprobs=[None if item.logprob is None else _shown(item.logprob) for item in logprobs],
        tokens=[item.token for item in logprobs],
        top_logprobs=[
            None if item.logprob is None else {t: _shown(p) for t, _, p in item.top} for item in logprobs
        ],
    )


def echoed_logprobs(echo: Echo, following: Sequence[TextLogprob]) -> list[TextLogprob]:
    """The prompt's tokens: its first, and `following`; nothing where no prompt is shown."""
    return [] if echo.first is None else [echo.first, *following]


def _shown(logprob: float | None) -> float:
    assert logprob is not None, "only a prompt's first token has no log-probability"
    return max(logprob, LOWEST)
