"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.backends.base import TextLogprob
from penstock.protocol.openai import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LOWEST = -9999.0
"""What OpenAI writes for a probability of zero, which JSON has no logarithm of."""


@dataclass(slots=True, frozen=True)
class Echo:
    """What is shown of a prompt in front of its answers."""

    text: str = ""
    first: TextLogprob | None = None
    """The prompt's first token, where log-probabilities are shown too: it has none, and those that follow
    do."""
    num_top: int = 0
    """Alternatives that are shown beside each token; more may have been asked for, for `prompt_logprobs`."""


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
        top_logprobs=[None if item.logprob is None else _tops(item) for item in logprobs],
    )


def prompt_logprobs(following: Sequence[TextLogprob], count: int) -> PromptLogprobs:
    """VLLM's `prompt_logprobs`, of a prompt's tokens from the second on, with `count` alternatives each."""
    return [None, *(_by_id(item, count) for item in following)]


def _by_id(item: TextLogprob, count: int) -> dict[str, PromptLogprob]:
    ranked = zip(item.top_ids[:count], item.top, strict=False)
    found = {
        str(token_id): PromptLogprob(logprob=_shown(logprob), rank=rank, decoded_token=text)
        for rank, (token_id, (text, _, logprob)) in enumerate(ranked, start=1)
    }
    own = PromptLogprob(logprob=_shown(item.logprob), rank=item.rank or None, decoded_token=item.token)
    return {str(item.token_id): own} | found


def _tops(item: TextLogprob) -> dict[str, float]:
    """The likeliest tokens, and the token itself, by their text; of tokens with one text the likeliest."""
    found: dict[str, float] = {}
    for text, _, logprob in item.top:
        found.setdefault(text, _shown(logprob))
    found.setdefault(item.token, _shown(item.logprob))
    return found


def echoed_logprobs(echo: Echo, following: Sequence[TextLogprob]) -> list[TextLogprob]:
    """The prompt's tokens: its first, and `following`; nothing where no prompt is shown."""
    if echo.first is None:
        return []
    return [echo.first, *(replace(each, top=each.top[: echo.num_top]) for each in following)]


def _shown(logprob: float | None) -> float:
    assert logprob is not None, "only a prompt's first token has no log-probability"
    return max(logprob, LOWEST)
