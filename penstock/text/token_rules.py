"""What a request's sampling parameters mean in token ids: words that are not drawn, tokens that end an
answer.
"""

from collections.abc import Iterable

from penstock.text.tokenizer import Tokenizer


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and behind a space, as vLLM has them."""
    found: list[tuple[int, ...]] = []
    for word in words:
        alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        found.append(alone)
        behind = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if behind[0] != alone[0] and len(behind) == len(alone):
            found.append(behind)
    return tuple(found)


def stop_token_ids(tokenizer: Tokenizer, more: Iterable[int], *, ignores_eos: bool) -> tuple[int, ...]:
    """The model's own tokens that end an answer, unless they are ignored, and `more`; each once."""
    ends = () if ignores_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*ends, *more)))
