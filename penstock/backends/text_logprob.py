"""Log-probabilities by token id, as clients see them: with the tokens' texts."""

from penstock.backends.base import TextLogprob
from penstock.text.tokenizer import Tokenizer
from penstock.types import TokenLogprob


def to_text_logprob(logprob: TokenLogprob, tokenizer: Tokenizer) -> TextLogprob:
    """A token's log-probability as clients see it."""
    return TextLogprob(
        token=tokenizer.token_text(logprob.token_id),
        token_bytes=tokenizer.token_bytes(logprob.token_id),
        logprob=logprob.logprob,
        top=tuple((tokenizer.token_text(i), tokenizer.token_bytes(i), value) for i, value in logprob.top),
    )
